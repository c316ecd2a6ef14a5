"""What goes through a block at one step, and the index tensors that its operators need for it: some cells, or all cells
of some rows."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from .cells import CellTables, Integers


@dataclass(frozen=True, slots=True, eq=False)
class QueryGroup:
    """The rows of one resolution that have active cells.

    Rows may have different numbers of active cells; the shorter ones are padded with cells whose result is dropped.

    Attributes:
        rows: (R,) rows of the batch.
        local: the same rows among the active rows.
        index: (R * most,) place among the active cells.
        valid: (n,) which of these are not padding, in order; None if all.
        context: (R * cells of a row,) all cells of these rows.
    """

    rows: Tensor
    local: slice
    index: Tensor
    valid: Tensor | None
    context: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StreamPart:
    """What is computed of a stream of tokens: the texts of all rows, one after the other, then the images.

    Attributes:
        places: (n,) of these tokens in the stream.
        rows: (n,) for each token the place of its row among the rows that are computed.
    """

    places: Tensor
    rows: Tensor


class ActiveRows:
    """All cells of some rows of a batch, at least one: a batch of their own, which needs nothing of the other rows.

    Attributes:
        tables: of the batch that they are part of.
        own: tables of their own batch, whose cells keep their slots.
        rows: (R,) the rows, ascending.
        cells: (n,) their cells.
    """

    def __init__(self, tables: CellTables, rows: Integers) -> None:
        self.tables = tables
        starts, self._numbers = tables.row_start.tolist(), rows.tolist()
        cells = np.concatenate([np.arange(starts[row], starts[row + 1]) for row in self._numbers])
        self.own = tables.of_rows(self._numbers, tables.slots[cells])
        self.rows, self.cells = (torch.from_numpy(each).to(tables.device) for each in (rows, cells))
        self._tokens: dict[int, Tensor] = {}
        self._streams: dict[int, StreamPart] = {}

    def tokens(self, level: int) -> Tensor:
        """Their tokens in packed order, as their own batch has them."""
        if level not in self._tokens:
            tokens = np.concatenate([np.arange(*self.tables.token_span(row, level)) for row in self._numbers])
            self._tokens[level] = torch.from_numpy(tokens).to(self.tables.device)
        return self._tokens[level]

    def stream(self, length: int) -> StreamPart:
        """Their part of a stream whose texts have so many tokens each."""
        if length not in self._streams:
            level = self.own.packing.levels[0]
            own = level.row_index.repeat_interleave(level.grain**2)
            self._streams[length] = _stream_part(self, own, length)
        return self._streams[length]


class ActiveSet:
    """Some cells of a batch.

    Args:
        tables: of the batch.
        cells: (n,) their numbers, ascending, at least one.
        freezes_norms: GroupNorm counts what was kept of these cells, too, instead of what is computed.
    """

    def __init__(self, tables: CellTables, cells: Integers, *, freezes_norms: bool = False) -> None:
        self.tables, self._cells, self.freezes_norms = tables, cells, freezes_norms
        self.cells = self._tensor(cells)
        self._rows, self._local = np.unique(tables.row_of_cell[cells], return_inverse=True)
        self._kept: dict[tuple[str | int, ...], Tensor] = {}
        self._streams: dict[int, StreamPart] = {}

    def __len__(self) -> int:
        return len(self._cells)

    def _tensor(self, array: Integers) -> Tensor:
        return torch.from_numpy(array).to(self.tables.device)

    @cached_property
    def rows(self) -> Tensor:
        """(R,) rows with active cells. What is computed once per row is computed for these."""
        return self._tensor(self._rows)

    @cached_property
    def row_of_cell(self) -> Tensor:
        """(n,) for each active cell the place of its row in `rows`."""
        return self._tensor(self._local)

    def row_index(self, level: int, is_by_token: bool) -> Tensor:
        """The place in `rows` for each token, or for each cell where a packed tensor has one entry per cell."""
        if not is_by_token:
            return self.row_of_cell
        if ("rows", level) not in self._kept:
            self._kept["rows", level] = self.row_of_cell.repeat_interleave(self.tables.side(level) ** 2)
        return self._kept["rows", level]

    def tokens(self, level: int) -> Tensor:
        """(n * side * side,) their tokens in packed order."""
        return self._own(self.tables.tokens, level)

    def stream(self, length: int) -> StreamPart:
        """Their part, and the texts of their rows, of a stream whose texts have so many tokens each."""
        if length not in self._streams:
            self._streams[length] = _stream_part(self, self.row_index(0, is_by_token=True), length)
        return self._streams[length]

    def slot_tokens(self, level: int) -> Tensor:
        """(n * side * side,) their places in what operators keep."""
        return self._own(self.tables.slot_tokens, level)

    def window(self, level: int, out_level: int) -> Tensor:
        """(n * window side squared,), see `CellTables.window`."""
        return self._own(self.tables.window, level, out_level)

    def taps(self, level: int, out_level: int) -> Tensor:
        """(n * out side * out side * 9,), see `CellTables.taps`."""
        return self._own(self.tables.taps, level, out_level)

    def _own(self, table: Callable[..., Tensor], *levels: int) -> Tensor:
        """The rows of a table that belong to these cells."""
        key = table.__name__, *levels
        if key not in self._kept:
            self._kept[key] = table(*levels).index_select(0, self.cells).flatten()
        return self._kept[key]

    @cached_property
    def slots(self) -> Tensor:
        """(n,)"""
        return self._tensor(self.tables.slots[self._cells])

    @cached_property
    def context(self) -> tuple[Tensor, Tensor]:
        """Slots of all cells of the rows with active cells, and for each the place of its row in `rows`."""
        starts = self.tables.row_start
        cells = np.concatenate([np.arange(int(starts[row]), int(starts[row + 1])) for row in self._rows])
        local = np.repeat(np.arange(len(self._rows)), starts[self._rows + 1] - starts[self._rows])
        return self._tensor(self.tables.slots[cells]), self._tensor(local)

    @cached_property
    def num_cells_of_row(self) -> Tensor:
        """(R,) cells of each row with active cells, float32."""
        starts = self.tables.row_start
        return self._tensor(starts[self._rows + 1] - starts[self._rows]).float()

    @cached_property
    def queries(self) -> list[QueryGroup]:
        """How attention takes them, resolution by resolution."""
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
"""What goes through a block; None for all of the batch."""
