"""Store of one block: its input and output when each cell was last computed (PatchedServe section 5.2)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .active import Active
from .cells import CellTables, Integers, match_keys

MIN_SQUARE = 1e-12
"""Lower bound on the mean square of an input, so that its relative change is finite even if it is zero everywhere."""


class BlockStore:
    """Stored tensors of one block for all cells of a batch, in packed order.

    Inputs are stored only as samples, and only if the store `compares`, to measure how far they have changed. The cache
    counts steps over all batches.

    Attributes:
        keys: (cells,) keys of the cells, in the order of `tables`.
        outputs: tokens [tokens, channels], of any levels.
        row_outputs: tensors with one entry per row: text tokens [rows, length, channels].
        samples: for every input, [cells, sampled tokens * channels] when each cell was last computed.
        square: (cells,) mean square of the samples, float32, never 0.
        is_known: (cells,) whether a cell has been computed.
        reuses: (cells,) number of times in a row that a cell was reused.
        gaps: (cells,) number of steps between the last two computations of a cell; 1 after the first.
        changed_at: (cells,) step at which each cell of the outputs was last computed.
    """

    def __init__(self, *, compares: bool = True) -> None:
        self.compares = compares
        self.clear()

    def clear(self) -> None:
        """Discard everything."""
        self.keys: Integers = np.empty(0, np.int64)
        self.tables: CellTables | None = None
        self.outputs: tuple[Tensor, ...] = ()
        self.row_outputs: tuple[Tensor, ...] = ()
        self.samples: tuple[Tensor, ...] = ()
        self.square: Tensor | None = None
        self.is_known: NDArray[np.bool_] = np.empty(0, bool)
        self.reuses: Integers = np.empty(0, np.int64)
        self.gaps: Integers = np.empty(0, np.int64)
        self.changed_at: Integers = np.empty(0, np.int64)
        # For each input, by cell: the sum of the squared change, and the step at which it was measured.
        self._moved: list[Tensor] = []
        self._measured_at: list[Integers] = []

    @property
    def num_bytes(self) -> int:
        unique = {id(tensor): tensor.nbytes for tensor in (*self.outputs, *self.row_outputs, *self.samples)}
        return sum(unique.values())

    def move_to(self, tables: CellTables, keys: Integers) -> None:
        """Reorder the stored tensors for a new batch: the Common Set moves, the Expired Set is discarded.

        Cells of the New Set are unknown until they have been computed.
        """
        if tables is self.tables:
            return
        old, here, there = self.tables, *match_keys(keys, self.keys)

        def in_order(array: Any) -> Any:
            new = np.zeros(len(keys), array.dtype)
            new[here] = array[there]
            return new

        arrays = self.is_known, self.reuses, self.gaps, self.changed_at
        self.is_known, self.reuses, self.gaps, self.changed_at = map(in_order, arrays)
        if old is not None and (self.outputs or self.samples):
            to, of = (torch.from_numpy(index).to(tables.device) for index in (here, there))

            def by_cell(tensor: Tensor) -> Tensor:
                return tensor.new_zeros(len(keys), *tensor.shape[1:]).index_copy_(0, to, tensor.index_select(0, of))

            def by_token(tensor: Tensor) -> Tensor:
                before = old.level_of(len(tensor)).index
                after = tables.packing.levels[before]
                new = tensor.new_zeros(after.num_tokens, tensor.shape[1])
                places = tables.tokens(before).index_select(0, to).flatten()
                taken = tensor.index_select(0, old.tokens(before).index_select(0, of).flatten())
                return new.index_copy_(0, places, taken)

            moved = {
                id(tensor): by_token(tensor) for tensor in {id(tensor): tensor for tensor in self.outputs}.values()
            }
            self.outputs = tuple(moved[id(tensor)] for tensor in self.outputs)
            self.samples, self._moved = tuple(map(by_cell, self.samples)), list(map(by_cell, self._moved))
            self._measured_at = list(map(in_order, self._measured_at))
            if self.square is not None:
                self.square = by_cell(self.square).clamp_(min=MIN_SQUARE)
            # A row is known as soon as one of its cells is.
            rows, taken = np.unique(tables.row_of_cell[here], return_index=True)
            old_rows = old.row_of_cell[there][taken]
            to_row, of_row = (torch.from_numpy(index).to(tables.device) for index in (rows, old_rows))
            self.row_outputs = tuple(
                tensor.new_zeros(tables.packing.num_rows, *tensor.shape[1:]).index_copy_(
                    0, to_row, tensor.index_select(0, of_row)
                )
                for tensor in self.row_outputs
            )
        self.tables, self.keys = tables, keys

    def fit_text(self, length: int) -> None:
        """Resize `row_outputs` to `length` tokens, the current length of the batch's texts.

        The common end of a batch's texts is left out of them (`serving.patched.text`): padding, or copies of the last
        token. Tokens that are cut off here belong to this end, and added tokens are copies of the last one.
        """
        self.row_outputs = tuple(
            text[:, torch.arange(length, device=text.device).clamp_(max=text.shape[1] - 1)]
            if text.shape[1] != length
            else text
            for text in self.row_outputs
        )

    def count(self, is_reused: NDArray[np.bool_]) -> None:
        """Count a step at which these cells (cells,) are reused and the others are computed."""
        self.gaps = np.where(is_reused, self.gaps, self.reuses + 1)
        self.reuses = np.where(is_reused, self.reuses + 1, 0)

    def check_mask(self, is_reused: NDArray[np.bool_]) -> None:
        """Raise RuntimeError if a mask (cells,) reuses a cell that is not in the Common Set (section 5.2)."""
        if not self.is_known[is_reused].all():
            missing = np.flatnonzero(is_reused & ~self.is_known)
            raise RuntimeError(f"the mask reuses cells that are not in the cache: {missing[:8].tolist()}")

    def measure_change(
        self, inputs: Sequence[Tensor], changed_at: Sequence[Integers | None], now: int, needed: NDArray[np.bool_]
    ) -> None:
        """Measure how far the input has changed.

        Args:
            inputs: tokens [tokens, channels] of all cells.
            changed_at: for each input, the step at which each cell of it was last computed; None if it is not known.
            now: the current step.
            needed: (cells,) cells for which `moved` must be up to date. An input that has not changed in these cells is
                not measured again.
        """
        assert self.tables is not None
        for number, (tensor, stamps) in enumerate(zip(inputs, changed_at, strict=True)):
            if stamps is None or (needed & (stamps > self._measured_at[number])).any():
                taken = sampled(tensor, self.tables).sub_(self.samples[number])
                self._moved[number] = (taken * taken).sum(1, dtype=torch.float32)
                self._measured_at[number][:] = now

    def moved(self) -> Tensor:
        """Return (cells,) the mean squared change of the input since a cell was last computed, as last measured."""
        return torch.stack(self._moved).sum(0).div_(self._sample_size)

    def change(self) -> Tensor:
        """Return (cells,) the change from `moved`, relative to the mean square of the input."""
        assert self.square is not None
        return self.moved().div_(self.square)

    @property
    def _sample_size(self) -> int:
        return sum(sample.shape[1] for sample in self.samples)

    def put(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        row_outputs: Sequence[Tensor],
        active: Active,
        now: int = 0,
    ) -> None:
        """Store the tensors of step `now`, for all cells or for the active ones.

        `inputs` are those of all cells in either case, `outputs` those of the computed cells, `row_outputs` those of
        their rows. Outputs are never modified in place, because the current pass reads them.
        """
        tables = self.tables
        assert tables is not None
        if active is None:
            self.outputs, self.row_outputs = tuple(outputs), tuple(row_outputs)
            self.is_known[:] = True
            self.changed_at[:] = now
            if self.compares:
                self.samples = tuple(sampled(tensor, tables) for tensor in inputs)
                self.square = self._mean_square(self.samples)
                self._moved = [self.square.new_zeros(tables.num_cells) for _ in inputs]
                self._measured_at = [np.full(tables.num_cells, now) for _ in inputs]
            return
        merged: dict[int, Tensor] = {}
        for old, new in zip(self.outputs, outputs, strict=True):
            if id(old) not in merged:
                level = tables.level_of(len(old)).index
                merged[id(old)] = old.index_copy(0, active.tokens(level), new)
        self.outputs = tuple(merged[id(old)] for old in self.outputs)
        self.row_outputs = tuple(
            old.index_copy(0, active.rows, new) for old, new in zip(self.row_outputs, row_outputs, strict=True)
        )
        cells = active.cells.cpu().numpy()
        self.is_known[cells] = True
        self.changed_at[cells] = now
        if not self.compares:
            return
        assert self.square is not None
        taken = [sampled(tensor, tables, active.cells) for tensor in inputs]
        self.square.index_copy_(0, active.cells, self._mean_square(taken))
        for number, own in enumerate(taken):
            self.samples[number].index_copy_(0, active.cells, own)
            self._moved[number].index_fill_(0, active.cells, 0.0)
            self._measured_at[number][cells] = now

    def _mean_square(self, samples: Sequence[Tensor]) -> Tensor:
        total = torch.stack([(sample * sample).sum(1, dtype=torch.float32) for sample in samples]).sum(0)
        return total.div_(self._sample_size).clamp_(min=MIN_SQUARE)


def sampled(tensor: Tensor, tables: CellTables, cells: Tensor | None = None) -> Tensor:
    """Sample tokens [tokens, channels] of any level, for some cells or all, to [cells, sampled tokens * channels]."""
    places = tables.sample(tables.level_of(len(tensor)).index)
    places = places if cells is None else places.index_select(0, cells)
    return tensor.index_select(0, places.flatten()).view(len(places), -1)
