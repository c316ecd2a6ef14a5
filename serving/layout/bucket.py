"""Shapes of passes to which batches are padded, so that one recorded pass serves many batches. No torch."""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Bucket:
    """Numbers of patches and rows that packings are padded to. One row is always a dummy, the owner of the padding.

    Attributes:
        longest: bound for the number of patches of a row.
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
            longest: number of patches that no row exceeds, which is rounded up to a power of two; None if unknown.
        """
        padded = -(-num_patches // (step := _step(num_patches))) * step
        bound = padded if longest is None else min(padded, 1 << (longest - 1).bit_length())
        return cls(padded, 1 + max(2, 1 << (num_rows - 1).bit_length()), bound)

    @property
    def num_sequences(self) -> int:
        """Number of sequences of at most `longest` patches that hold any batch of this bucket: rows, then padding."""
        return self.num_rows + -(-(_step(self.num_patches) - 1) // self.longest)


def _step(num_patches: int) -> int:
    """Return the difference between numbers of patches near this one, the same for all numbers of a bucket."""
    return 1 << max((num_patches - 1).bit_length() - 3, 0)
