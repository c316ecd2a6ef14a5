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
        step = 1 << max((num_patches - 1).bit_length() - 3, 0)
        return cls(-(-num_patches // step) * step, 1 + max(2, 1 << (num_rows - 1).bit_length()))
