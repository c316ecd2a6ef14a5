"""Shapes of passes to which batches are padded, so that one recorded pass serves many batches. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Bucket:
    """Numbers of patches and rows that packings are padded to. One row is always a dummy, the owner of the padding."""

    num_patches: int
    num_rows: int

    @classmethod
    def of(cls, num_patches: int, num_rows: int) -> Self:
        """Return the smallest bucket for these numbers of patches and rows.

        There are four numbers of patches between a power of two and the next, so that less than a quarter is padding,
        and one number of rows, beside the dummy.
        """
        return cls(rounded_up(num_patches), 1 + max(2, 1 << (num_rows - 1).bit_length()))

    @classmethod
    def with_spare(cls, num_patches: int, num_rows: int) -> Self:
        """Return the same with at least one padding patch."""
        return cls(rounded_up(num_patches) + 1, cls.of(num_patches, num_rows).num_rows)

    @classmethod
    def of_memory(cls, num_patches: int, num_rows: int) -> Self:
        """Return a bucket for patches that are kept and not computed, so that padding costs no time.

        Their number is a power of two and at least one padding patch.
        """
        return cls((1 << (num_patches - 1).bit_length()) + 1, cls.of(num_patches, num_rows).num_rows)


def rounded_up(count: int) -> int:
    """Return the smallest number of a bucket's patches that is not below this count."""
    step = 1 << max((count - 1).bit_length() - 3, 0)
    return -(-count // step) * step


def batches_by_bucket(num_patches: Sequence[int], rows_each: int, max_requests: int) -> dict[Bucket, tuple[int, ...]]:
    """Return, for each bucket of batches of up to `max_requests` requests, one of its batches; largest buckets first.

    Args:
        num_patches: number of patches of a row, by size.
        rows_each: number of rows of a request.
        max_requests: largest number of requests in a batch.

    Returns:
        Number of requests of each size, by bucket.
    """
    found: dict[Bucket, tuple[int, ...]] = {}
    batches = {0: (0,) * len(num_patches)}  # one for each total number of patches in a row of every request
    for num_requests in range(1, max_requests + 1):
        larger: dict[int, tuple[int, ...]] = {}
        for total, counts in batches.items():
            for place, patches in enumerate(num_patches):
                larger.setdefault(total + patches, (*counts[:place], counts[place] + 1, *counts[place + 1 :]))
        batches = larger
        for total, counts in batches.items():
            found.setdefault(Bucket.of(total * rows_each, num_requests * rows_each), counts)
    return dict(sorted(found.items(), key=lambda pair: (pair[0].num_patches, pair[0].num_rows), reverse=True))
