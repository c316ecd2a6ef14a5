"""The requests of a batch as the cache sees them: their patches, and the patches that must be computed at a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from ..layout.packing import Packing
from .active import ActiveRows, ActiveSet
from .cells import CellTables, Integers, SlotTable
from .rules import Booleans

_MAX_CACHED = 16
"""Number of row sets, and of masks, whose index tables are kept while the batch lasts: blocks share them, and some
recur.
"""

_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class CachedRequest:
    """A request as the cache sees it.

    Attributes:
        key: unique key, which is never used again.
        num_rows: 2 with guidance, otherwise 1.
        num_steps: number of steps of its schedule.
        pixels: width times height of its image.
        is_exact: whether all its steps are computed, regardless of the rule.
    """

    key: int
    num_rows: int
    num_steps: int
    pixels: int
    is_exact: bool = False


class PatchBatch:
    """The patches of the requests in a batch, and their cells, one per row of the request.

    Attributes:
        tables: index tables of the cells.
        keys: (cells,) unique keys of the cells, which are never used again.
        request, patch: (patches,) index of the request in the batch, and number of the patch in its image.
        first_cell, last_cell: (patches,) cell of the patch in the first and in the last row of its request.
        patch_of_cell: (cells,) patch of each cell.
        steps_done, is_forced: (patches,) number of steps done before this step, and whether the patch must be computed
            regardless of the rule.
    """

    def __init__(
        self, packing: Packing, requests: Sequence[CachedRequest], slots: SlotTable, cell_size: int, unit: int
    ) -> None:
        rows = np.cumsum([0, *(request.num_rows for request in requests)])
        counts = np.array([packing.sizes[row][0] * packing.sizes[row][1] // cell_size**2 for row in rows[:-1]])
        row_counts = np.repeat(counts, [request.num_rows for request in requests])
        places = np.concatenate([np.arange(count) for count in row_counts])
        second = np.concatenate([np.arange(request.num_rows) for request in requests])
        owners = [request.key for request in requests for _ in range(request.num_rows)]
        keys = np.repeat(owners, row_counts)
        self.keys: Integers = (keys << 21) + (np.repeat(second, row_counts) << 20) + places
        self.tables = CellTables(packing, cell_size, unit, slots.assign(self.keys), owners)
        starts = self.tables.row_start
        self.request_keys = [request.key for request in requests]
        self.request: Integers = np.repeat(np.arange(len(requests)), counts)
        self.request_start: Integers = np.cumsum([0, *counts[:-1]])
        self.num_patches = int(counts.sum())
        patch = np.arange(self.num_patches) - self.request_start[self.request]
        self.first_cell: Integers = starts[rows[:-1]][self.request] + patch
        self.last_cell: Integers = starts[rows[1:] - 1][self.request] + patch
        self.patch_of_cell: Integers = np.empty(self.tables.num_cells, np.int64)
        self.patch_of_cell[self.first_cell] = self.patch_of_cell[self.last_cell] = np.arange(self.num_patches)
        self._rows, self._counts = rows, counts
        self._cached_rows: dict[bytes, ActiveRows] = {}
        self._cached_masks: dict[bytes, ActiveSet] = {}
        device = self.tables.device
        self.patch: Integers = patch
        self.first_cell_tensor = torch.from_numpy(self.first_cell).to(device)
        self.last_cell_tensor = torch.from_numpy(self.last_cell).to(device)
        self.num_steps: Integers = np.array([request.num_steps for request in requests])[self.request]
        self.pixels: Integers = np.array([request.pixels for request in requests])[self.request]
        self._is_exact: Booleans = np.array([request.is_exact for request in requests])[self.request]
        self.steps_done: Integers = np.zeros(self.num_patches, np.int64)
        self.is_forced: Booleans = np.ones(self.num_patches, bool)

    def start_step(self, steps_done: Integers, warmup_steps: int) -> None:
        self.steps_done = steps_done[self.request]
        self.is_forced = (self.steps_done < warmup_steps) | (self.steps_done >= self.num_steps - 1) | self._is_exact

    def fill(self, reuse: Booleans, full_above: float) -> ActiveRows | None:
        """Extend the patches to compute to whole requests, if that costs no more than a mask.

        Args:
            reuse: (patches,) whether each patch is reused; modified in place.
            full_above: of the requests with patches to compute, the share of patches to compute above which all their
                patches are computed.

        Returns:
            The rows to compute, if they are whole requests but not all of the batch; None for all rows of the batch, no
            rows, or a mask.
        """
        is_touched = np.logical_or.reduceat(~reuse, self.request_start)
        num_touched = int(self._counts[is_touched].sum())
        num_active = len(reuse) - int(reuse.sum())
        if num_active <= full_above * num_touched and num_active < num_touched:
            return None
        np.copyto(reuse, np.repeat(~is_touched, self._counts))
        if is_touched.all() or not num_touched:
            return None
        rows = np.repeat(is_touched, np.diff(self._rows))
        return _cached(self._cached_rows, rows, lambda: ActiveRows(self.tables, np.flatnonzero(rows)))

    def mask(self, is_reused: Booleans) -> ActiveSet:
        """Return the cells that are not reused, given `is_reused` (cells,)."""
        return _cached(self._cached_masks, is_reused, lambda: ActiveSet(self.tables, np.flatnonzero(~is_reused)))


def _cached(cached: dict[bytes, _Made], chosen: Booleans, make: Callable[[], _Made]) -> _Made:
    key = chosen.tobytes()
    if key not in cached:
        if len(cached) == _MAX_CACHED:
            del cached[next(iter(cached))]
        cached[key] = make()
    return cached[key]
