"""Shapes of passes to which batches are padded, so that one recorded pass serves many batches. No torch."""

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
