"""Rows of a batch that are computed as a batch of their own, because a cache forecasts the others."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ..core.captured import PassBatch
from ..core.denoiser import of_rows
from ..layout.device_tables import to_device
from ..layout.packing import Packing
from .context import BatchValues


@dataclass(frozen=True, slots=True, eq=False)
class OwnBatch:
    """Rows of a batch that are computed as a batch of their own, until others are.

    Attributes:
        numbers: the rows.
        packing: their packing.
        rows, patches: rows and patches of the whole batch that its rows and patches are copies of.
        conditions: conditions of its rows.
        values: values that its passes read.
        passes: its passes.
    """

    numbers: tuple[int, ...]
    packing: Packing
    rows: Tensor
    patches: Tensor
    conditions: dict[str, Any]
    values: BatchValues
    passes: PassBatch

    @classmethod
    def of(
        cls,
        numbers: tuple[int, ...],
        packing: Packing,
        conditions: dict[str, Any],
        values: BatchValues,
        *,
        is_padded: bool,
    ) -> Self:
        """Make a batch of some rows of a packing, padded or not, from the conditions and values of all rows."""
        own, device = packing.of_rows(numbers, is_padded=is_padded), packing.row_index.device
        places = [place for row in numbers for place in range(packing.starts[row], packing.starts[row + 1])]
        places += places[:1] * (own.num_patches - len(places))
        rows = to_device(torch.tensor(numbers), device).index_select(0, own.value_rows)
        patches = to_device(torch.tensor(places), device)
        return cls(numbers, own, rows, patches, of_rows(conditions, rows), values.of_rows(rows), PassBatch())
