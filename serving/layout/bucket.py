"""Shapes of passes to which batches are padded, so that one recorded pass serves many batches. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Bucket:
    """Numbers of patches and rows that packings are padded to. The last row is a dummy, the owner of the padding.

    Attributes:
        longest: bound for the number of patches of a row, and of the padding.
    """

    num_patches: int
    num_rows: int
    longest: int

    @classmethod
    def of(cls, num_patches: int, num_rows: int, longest: int | None = None) -> Self:
        """Return the smallest bucket for these numbers of patches and rows.

        There are four numbers of patches between a power of two and the next, so that less than a quarter is padding,
        and one number of rows, beside the dummy.

        Args:
            num_patches, num_rows: numbers of all rows.
            longest: number of patches that no row exceeds; None if unknown.
        """
        return cls._padded(rounded_up(num_patches), num_rows, longest, _step(num_patches))

    @classmethod
    def with_spare(cls, num_patches: int, num_rows: int, longest: int | None = None) -> Self:
        """Return the same with at least one padding patch."""
        return cls._padded(rounded_up(num_patches) + 1, num_rows, longest, _step(num_patches))

    @classmethod
    def of_memory(cls, num_patches: int, num_rows: int, longest: int | None = None) -> Self:
        """Return a bucket for patches that are kept and not computed, so that padding costs no time.

        Their number is a power of two and at least one padding patch.
        """
        padded = _power_of_two(num_patches) + 1
        return cls._padded(padded, num_rows, longest, padded)

    @classmethod
    def _padded(cls, padded: int, num_rows: int, longest: int | None, most_padding: int) -> Self:
        bound = padded if longest is None else min(padded, max(_power_of_two(longest), most_padding))
        return cls(padded, 1 + max(2, _power_of_two(num_rows)), bound)


def rounded_up(count: int) -> int:
    """Return the smallest number of a bucket's patches that is not below this count."""
    step = _step(count)
    return -(-count // step) * step


def _step(count: int) -> int:
    """Return the difference between numbers of a bucket's patches near this count."""
    return 1 << max((count - 1).bit_length() - 3, 0)


def _power_of_two(count: int) -> int:
    """Return the smallest power of two that is not below this count."""
    return 1 << (count - 1).bit_length()


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
            found.setdefault(Bucket.of(total * rows_each, num_requests * rows_each, max(num_patches)), counts)
    return dict(sorted(found.items(), key=lambda pair: (pair[0].num_patches, pair[0].num_rows), reverse=True))
