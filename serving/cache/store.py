"""What the cache keeps of one block: input and output when each cell was last computed (PatchedServe section 5.2)."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .active import Active
from .cells import CellTables, Integers, match_keys

LEAST_SQUARE = 1e-12
"""Mean square of an input that is zero everywhere, so that relative changes of it are finite."""


class BlockStore:
    """Tensors of one block for all cells of a batch, in packed order; inputs only if it `compares`, for `change`.

    Attributes:
        keys: (cells,) of the cells, in the order of `tables`.
        inputs, outputs: tokens [tokens, channels], of any levels.
        row_outputs: tensors with one entry per row (SD3's text tokens).
        square: (cells,) mean square of the inputs, float32, never 0.
        is_known: (cells,) whether a cell has been computed.
        reuses: (cells,) how often in a row a cell was reused.
    """

    def __init__(self, *, compares: bool = True) -> None:
        self.compares = compares
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.keys: Integers = np.empty(0, np.int64)
        self.tables: CellTables | None = None
        self.inputs: tuple[Tensor, ...] = ()
        self.outputs: tuple[Tensor, ...] = ()
        self.row_outputs: tuple[Tensor, ...] = ()
        self.square: Tensor | None = None
        self._owns_inputs = False
        self.is_known: NDArray[np.bool_] = np.empty(0, bool)
        self.reuses: Integers = np.empty(0, np.int64)

    @property
    def num_bytes(self) -> int:
        unique = {id(tensor): tensor.nbytes for tensor in (*self.inputs, *self.outputs, *self.row_outputs)}
        return sum(unique.values())

    def move_to(self, tables: CellTables, keys: Integers) -> None:
        """Bring what is kept into the order of a new batch: the Common Set moves, the Expired Set is let go.

        Cells of the New Set are unknown until they have been computed.
        """
        if tables is self.tables:
            return
        old, old_keys = self.tables, self.keys
        here, there = match_keys(keys, old_keys)
        is_known, reuses = np.zeros(len(keys), bool), np.zeros(len(keys), np.int64)
        is_known[here], reuses[here] = self.is_known[there], self.reuses[there]
        if old is not None and (self.inputs or self.outputs):
            to, of = (torch.from_numpy(index).to(tables.device) for index in (here, there))

            def moved(tensor: Tensor) -> Tensor:
                before = old.level_of(len(tensor)).index
                after = tables.packing.levels[before]
                new = tensor.new_zeros(after.num_tokens, tensor.shape[1])
                places = tables.tokens(before).index_select(0, to).flatten()
                taken = tensor.index_select(0, old.tokens(before).index_select(0, of).flatten())
                return new.index_copy_(0, places, taken)

            known: dict[int, Tensor] = {}
            for tensor in (*self.inputs, *self.outputs):
                if id(tensor) not in known:
                    known[id(tensor)] = moved(tensor)
            self.inputs = tuple(known[id(tensor)] for tensor in self.inputs)
            self._owns_inputs = False
            self.outputs = tuple(known[id(tensor)] for tensor in self.outputs)
            if self.square is not None:
                self.square = self.square.new_ones(len(keys)).index_copy_(0, to, self.square.index_select(0, of))
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
        self.tables, self.keys, self.is_known, self.reuses = tables, keys, is_known, reuses

    def check_mask(self, is_reused: NDArray[np.bool_]) -> None:
        """Raise RuntimeError if a mask (cells,) points to a cell that is not in the Common Set (section 5.2)."""
        if not self.is_known[is_reused].all():
            missing = np.flatnonzero(is_reused & ~self.is_known)
            raise RuntimeError(f"the mask reuses cells that are not in the cache: {missing[:8].tolist()}")

    def change(self, inputs: Sequence[Tensor]) -> Tensor:
        """(cells,): mean squared change of the input since a cell was last computed, relative to its mean square."""
        assert self.tables is not None
        assert self.square is not None
        return mean_square(inputs, self.tables, minus=self.inputs) / self.square

    def put(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        row_outputs: Sequence[Tensor],
        active: Active,
    ) -> None:
        """Keep what was computed: of all cells, or of the active ones.

        `inputs` are those of all cells in either case, `outputs` those of the cells that were computed, `row_outputs`
        those of their rows. Outputs are never changed in place, because other blocks keep them as their inputs.
        """
        tables = self.tables
        assert tables is not None
        if active is None:
            self.outputs, self.row_outputs = tuple(outputs), tuple(row_outputs)
            if self.compares:
                self.inputs, self._owns_inputs = tuple(inputs), False
                self.square = mean_square(inputs, tables).clamp_(min=LEAST_SQUARE)
            self.is_known[:] = True
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
        self.is_known[active.cells.cpu().numpy()] = True
        if not self.compares:
            return
        assert self.square is not None
        if not self._owns_inputs:
            self.inputs, self._owns_inputs = tuple(old.clone() for old in self.inputs), True
        for old, new in zip(self.inputs, inputs, strict=True):
            places = active.tokens(tables.level_of(len(old)).index)
            old.index_copy_(0, places, new.index_select(0, places))
        square = mean_square(inputs, tables).clamp_(min=LEAST_SQUARE)
        self.square.index_copy_(0, active.cells, square.index_select(0, active.cells))


def mean_square(tensors: Sequence[Tensor], tables: CellTables, minus: Sequence[Tensor] | None = None) -> Tensor:
    """(cells,) float32: mean square of each cell's values, estimated from every n-th token (`CellTables.sample`).

    `tensors` are tokens [tokens, channels] of any levels; `minus` is subtracted from them first, if given.
    """
    total, count = torch.zeros(tables.num_cells, device=tables.device), 0
    for number, tensor in enumerate(tensors):
        every, places = tables.sample(tables.level_of(len(tensor)).index)
        count += places.shape[1] * tensor.shape[1]
        if minus is not None and is_same(tensor, minus[number]):
            continue
        taken = tensor[::every] if minus is None else tensor[::every] - minus[number][::every]
        total += (taken * taken).sum(1, dtype=torch.float32).take(places).sum(1)
    return total / count


def is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors show the same memory in the same way, so that a block was handed what it had been before."""
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()
