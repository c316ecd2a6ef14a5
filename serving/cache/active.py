"""The cells that go through a block at one step, and the index tensors that its operators need for them.

These are either some cells (`ActiveSet`) or all cells of some rows (`ActiveRows`).
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..layout.device_tables import to_device
from .cells import CellTables, Integers, window_places

_READ = ("cells", "slots", "rows", "row_of_cell", "around", "context", "num_cells_of_row")
"""Attributes of an `ActiveSet` from which its other tensors are computed."""


@dataclass(frozen=True, slots=True, eq=False)
class QueryGroup:
    """The rows of one resolution that have active cells.

    Rows may have different numbers of active cells; shorter rows are padded with cells whose results are discarded.

    Attributes:
        rows: (R,) rows of the batch.
        local: slice of the same rows among the active rows.
        index: (R * most,) indices among the active cells.
        valid: (n,) positions in `index` that are not padding, in order; None if all are valid.
        context: (R * cells of a row,) all cells of these rows.
    """

    rows: Tensor
    local: slice
    index: Tensor
    valid: Tensor | None
    context: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StreamPart:
    """The computed part of a stream of tokens, which holds the texts of all rows, then the images.

    Attributes:
        places: (n,) positions of the computed tokens in the stream.
        rows: (n,) for each token, the index of its row among the computed rows.
    """

    places: Tensor
    rows: Tensor


class ActiveRows:
    """All cells of some rows of a batch, at least one: a batch of their own, independent of the other rows.

    Attributes:
        tables: tables of the batch that the rows are part of.
        own: tables of the rows' own batch, whose cells keep their slots.
        rows: (R,) the rows, ascending.
        numbers: the same as a list.
        cells: (n,) their cells.
    """

    def __init__(self, tables: CellTables, rows: Integers) -> None:
        self.tables = tables
        starts, self.numbers = tables.row_start.tolist(), rows.tolist()
        cells = np.concatenate([np.arange(starts[row], starts[row + 1]) for row in self.numbers])
        self.own = tables.of_rows(self.numbers, tables.slots[cells])
        self.rows, self.cells = (torch.from_numpy(each).to(tables.device) for each in (rows, cells))
        self._tokens: dict[int, Tensor] = {}
        self._streams: dict[int, StreamPart] = {}

    def tokens(self, level: int) -> Tensor:
        """Return the indices of these rows' tokens in the whole batch, in the packed order of their own batch."""
        if level not in self._tokens:
            tokens = np.concatenate([np.arange(*self.tables.token_span(row, level)) for row in self.numbers])
            self._tokens[level] = torch.from_numpy(tokens).to(self.tables.device)
        return self._tokens[level]

    def stream(self, length: int) -> StreamPart:
        """Return the part of these rows in a stream whose texts have `length` tokens each."""
        if length not in self._streams:
            level = self.own.packing.levels[0]
            own = level.row_index.repeat_interleave(level.grain**2)
            self._streams[length] = _stream_part(self, own, length)
        return self._streams[length]


class ActiveSet:
    """Some cells of a batch.

    Args:
        tables: tables of the batch.
        cells: (n,) numbers of the cells, ascending, at least one.
        freezes_norms: whether GroupNorm uses the kept sums of these cells, too, instead of the computed values.
        num_padding: number of times that the last cell of a padded packing is added, so that passes over different
            numbers of cells have the same shapes. All rows of such a packing count as rows with active cells.
    """

    def __init__(
        self, tables: CellTables, cells: Integers, *, freezes_norms: bool = False, num_padding: int = 0
    ) -> None:
        self.tables, self.freezes_norms, self.num_padding = tables, freezes_norms, num_padding
        self._cells = np.concatenate([cells, np.full(num_padding, tables.num_cells - 1)])
        self.cells = self._tensor(self._cells)
        local = tables.row_of_cell[self._cells]
        if tables.packing.bucket is None:
            self._rows, self._local = np.unique(local, return_inverse=True)
        else:
            self._rows, self._local = np.arange(tables.packing.num_rows), local
        self._cached_tables: dict[tuple[str | int, ...], Tensor] = {}
        self._streams: dict[int, StreamPart] = {}

    def __len__(self) -> int:
        return len(self._cells)

    @property
    def tensors(self) -> dict[str, Any]:
        """Tensors that passes read, and that other active sets of the same bucket have with the same shapes."""
        tables, levels = self.tables, range(len(self.tables.packing.levels))
        read = {(make.__name__, level): make(level) for level in levels for make in (tables.tokens, tables.slot_tokens)}
        return {name: getattr(self, name) for name in _READ} | {"tables": read}

    def reading(self, tensors: dict[str, Any]) -> "ActiveSet":
        """Return the same set with its `tensors` in other memory."""
        found = copy(self)
        vars(found).update(tensors | {"tables": self.tables.reading(tensors["tables"])})
        found._cached_tables, found._streams = {}, {}
        return found

    def _tensor(self, array: Integers) -> Tensor:
        return to_device(torch.from_numpy(array), self.tables.device)

    @cached_property
    def rows(self) -> Tensor:
        """(R,) rows with active cells. Values that exist once per row are computed for these rows."""
        return self._tensor(self._rows)

    @cached_property
    def row_of_cell(self) -> Tensor:
        """(n,) for each active cell, the index of its row in `rows`."""
        return self._tensor(self._local)

    def row_index(self, level: int, is_by_token: bool) -> Tensor:
        """Return the index in `rows` for each token, or for each cell if a packed tensor has one entry per cell."""
        if not is_by_token:
            return self.row_of_cell
        if ("rows", level) not in self._cached_tables:
            self._cached_tables["rows", level] = self.row_of_cell.repeat_interleave(self.tables.side(level) ** 2)
        return self._cached_tables["rows", level]

    def tokens(self, level: int) -> Tensor:
        """Return (n * side * side,) the tokens of these cells in packed order."""
        return self._rows_of(self.tables.tokens, level)

    def stream(self, length: int) -> StreamPart:
        """Return the part of these cells and of their rows' texts in a stream whose texts have `length` tokens each."""
        if length not in self._streams:
            self._streams[length] = _stream_part(self, self.row_index(0, is_by_token=True), length)
        return self._streams[length]

    def slot_tokens(self, level: int) -> Tensor:
        """Return (n * side * side,) the positions of these cells' tokens in the buffers of operators."""
        return self._rows_of(self.tables.slot_tokens, level)

    @cached_property
    def around(self) -> Tensor:
        """(n, 9) slots of the 3 x 3 cells around each of these cells, line by line."""
        return self.tables.neighbours().index_select(0, self.cells)

    def window(self, level: int, out_level: int) -> Tensor:
        """Return (n * window side squared,) the kept tokens that a 3 x 3 convolution reads for these cells and borders.

        Args:
            level: level of the kept tokens, the convolution's input (before up-sampling, if that comes first).
            out_level: level of the output: the same, the next coarser (stride 2) or the next finer (after up-sampling).
        """
        return self._read(level, out_level, None)

    def taps(self, level: int, out_level: int) -> Tensor:
        """Return (n * out side * out side * 9,) the tokens of `window` that each output reads."""
        return self._read(level, out_level, 2 if out_level > level else 1)

    def _read(self, level: int, out_level: int, stride: int | None) -> Tensor:
        key = "read", level, out_level, stride or 0
        if key not in self._cached_tables:
            side, around = self.tables.side(level), self.around
            cells, tokens = window_places(side, 2 if out_level < level else 1, stride, around.device)
            self._cached_tables[key] = around.index_select(1, cells).mul_(side**2).add_(tokens).flatten()
        return self._cached_tables[key]

    def _rows_of(self, table: Callable[..., Tensor], *levels: int) -> Tensor:
        """Return the rows of a table that belong to these cells."""
        key = table.__name__, *levels
        if key not in self._cached_tables:
            self._cached_tables[key] = table(*levels).index_select(0, self.cells).flatten()
        return self._cached_tables[key]

    @cached_property
    def slots(self) -> Tensor:
        """(n,) slots of these cells."""
        return self._tensor(self.tables.slots[self._cells])

    @cached_property
    def context(self) -> tuple[Tensor, Tensor]:
        """Slots of all cells of the rows with active cells, and for each of them the index of its row in `rows`."""
        starts = self.tables.row_start
        cells = np.concatenate([np.arange(int(starts[row]), int(starts[row + 1])) for row in self._rows])
        local = np.repeat(np.arange(len(self._rows)), starts[self._rows + 1] - starts[self._rows])
        return self._tensor(self.tables.slots[cells]), self._tensor(local)

    @cached_property
    def num_cells_of_row(self) -> Tensor:
        """(R,) number of cells of each row with active cells, float32; 1 for dummies without any."""
        starts = self.tables.row_start
        return self._tensor((starts[self._rows + 1] - starts[self._rows]).clip(1)).float()

    @cached_property
    def queries(self) -> list[QueryGroup]:
        """Groups of queries for attention, one per resolution."""
        groups = []
        for first_row, num_rows, num_cells in self.tables.groups():
            start, end = np.searchsorted(self._rows, (first_row, first_row + num_rows))
            if start == end:
                continue
            first, last = np.searchsorted(self._local, (start, end))
            rows = self._rows[start:end]
            local = self._local[first:last] - start
            counts = np.bincount(local, minlength=len(rows))
            most = int(counts.max())
            before = np.cumsum(counts) - counts
            place = np.arange(most)
            # Padding repeats the first active cell of the row.
            index = first + before[:, None] + np.where(place < counts[:, None], place, 0)
            valid = None
            if (counts < most).any():
                valid = self._tensor(np.flatnonzero((place < counts[:, None]).reshape(-1)))
            context = (self.tables.row_start[rows][:, None] + np.arange(num_cells)).reshape(-1)
            groups.append(
                QueryGroup(
                    self._tensor(rows),
                    slice(int(start), int(end)),
                    self._tensor(index.reshape(-1)),
                    valid,
                    self._tensor(context),
                )
            )
        return groups


def _stream_part(active: ActiveSet | ActiveRows, row_of_token: Tensor, length: int) -> StreamPart:
    rows, num_rows = active.rows, active.tables.packing.num_rows
    texts = (rows[:, None] * length + torch.arange(length, device=rows.device)).flatten()
    own = torch.arange(len(rows), device=rows.device).repeat_interleave(length)
    return StreamPart(torch.cat([texts, num_rows * length + active.tokens(0)]), torch.cat([own, row_of_token]))


Active = ActiveSet | ActiveRows | None
"""Cells that go through a block; None for all cells of the batch."""
