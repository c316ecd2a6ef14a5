"""Positions of the cells of a batch. A cell is a patch of the cache in one row (conditional or unconditional).

Cells are numbered by row, then by their position in the image, line by line, regardless of the order of tokens in the
packing. A cell has a slot, which it keeps as long as its request is served; slots index the buffers that operators keep
as context. Slot 0 belongs to no cell and holds the zeros that are read beyond the edge of an image.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import cache, wraps

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..layout.packing import Level, Packing

Integers = NDArray[np.int64]
Floats = NDArray[np.float32]

_SAMPLE_FROM_SIDE = 4
"""Side in tokens from which the change of a cell is computed from every second token of every second line: comparing
all tokens took half of the cache's time.
"""


def _cached_tensor(make: Callable[..., Integers]) -> Callable[..., Tensor]:
    """Make a method of `CellTables` compute each of its tables once, as a tensor on their device."""

    @wraps(make)
    def cached(self: "CellTables", *levels: int) -> Tensor:
        key = make.__name__, *levels
        if key not in self.cached_tables:
            self.cached_tables[key] = torch.from_numpy(np.array(make(self, *levels))).to(self.device)
        return self.cached_tables[key]

    return cached


class CellTables:
    """Index tables of one packing and one assignment of slots; built when the active set changes.

    `cell_size` is the side of a cell in latent pixels, which divides all sides and suits all levels; `unit` is the side
    of a token of the finest level, and `owners` the request of every row. In a padded packing, the cells of padding
    patches come last and belong to the last row.

    Attributes:
        owners: requests of these cells.
        everyone: requests of the batch that these cells are part of.
        slots: (cells,) slot of every cell, from 1.
        num_cells: number of cells in all rows.
        row_of_cell: (cells,) row of every cell.
        row_start: (rows + 1,) first cell of each row, then the number of cells.
        cached_tables: tables computed so far, by name and levels.
    """

    def __init__(
        self,
        packing: Packing,
        cell_size: int,
        unit: int,
        slots: Integers,
        owners: Sequence[int],
        everyone: frozenset[int] | None = None,
    ) -> None:
        self.packing, self.slots, self.device = packing, slots, packing.row_index.device
        self._cell_size, self._unit, self._row_owners = cell_size, unit, owners
        self.owners = frozenset(owners)
        self.everyone = everyone or self.owners
        self._sides = [(cell_size // unit) >> level.index for level in packing.levels]
        counts = [height * width // cell_size**2 for height, width in packing.sizes]
        counts += [0] * packing.num_dummies
        counts[-1] += packing.levels[0].num_padding // self._sides[0] ** 2
        self.row_start: Integers = np.cumsum([0, *counts])
        self.num_cells = int(self.row_start[-1])
        assert len(slots) == self.num_cells
        self.row_of_cell = np.repeat(np.arange(len(counts)), counts)
        self.cached_tables: dict[tuple[str | int, ...], Tensor] = {}

    def of_rows(self, rows: Sequence[int], slots: Integers) -> "CellTables":
        """Return tables of only these rows, whose cells have these slots."""
        owners = [self._row_owners[row] for row in rows]
        return CellTables(self.packing.of_rows(rows), self._cell_size, self._unit, slots, owners, self.everyone)

    def reading(self, tables: Mapping[tuple[str | int, ...], Tensor]) -> "CellTables":
        """Return the same tables, of which these are in other memory."""
        found = copy(self)
        found.cached_tables = dict(tables)
        return found

    def token_span(self, row: int, level: int) -> tuple[int, int]:
        """Return the first token of a row in packed order, and the end of its tokens (exclusive)."""
        for group in self.packing.levels[level].groups:
            if row < group.first_row + group.rows:
                area = group.height * group.width
                first = group.start + (row - group.first_row) * area
                return first, first + area
        raise IndexError(f"the batch has no row {row}")

    def side(self, level: int) -> int:
        """Return the number of tokens on the side of a cell at a level."""
        return self._sides[level]

    def level_of(self, num_tokens: int) -> Level:
        """Return the level whose packed tensors have this number of tokens."""
        return next(level for level in self.packing.levels if level.num_tokens == num_tokens)

    @_cached_tensor
    def tokens(self, level: int) -> Integers:
        """Return (cells, side * side) tokens of each cell in packed order."""
        return self._tokens(level)

    @_cached_tensor
    def sample(self, level: int) -> Integers:
        """Return (cells, n) the tokens of each cell from which its change is computed: the same in every packing."""
        side = self._sides[level]
        every = 2 if side >= _SAMPLE_FROM_SIDE else 1
        return self._tokens(level).reshape(-1, side, side)[:, ::every, ::every].reshape(self.num_cells, -1)

    @_cached_tensor
    def slot_tokens(self, level: int) -> Integers:
        """Return (cells, side * side) positions of each cell's tokens in the buffers of operators."""
        return self._slot_tokens(level)

    def window_side(self, level: int, out_level: int) -> int:
        """Return the side of the window that a 3 x 3 convolution reads for the outputs of a cell."""
        return (2 if out_level < level else 1) * self._sides[level] + 2

    @_cached_tensor
    def neighbours(self) -> Integers:
        """Return (cells, 9) the slots of the 3 x 3 cells around each cell, line by line; 0 beyond the edge."""
        side, parts, end = self._sides[0], [], 0
        for rows, height, width, _ in self._images(0):
            shape = rows, height // side, width // side
            start, end = end, end + shape[0] * shape[1] * shape[2]
            padded = np.pad(self.slots[start:end].reshape(shape), ((0, 0), (1, 1), (1, 1)))
            parts.append(np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2)).reshape(-1, 9))
        return np.concatenate(parts)

    def _slot_tokens(self, level: int) -> Integers:
        area = self._sides[level] ** 2
        return self.slots[:, None] * area + np.arange(area)

    def _tokens(self, level: int) -> Integers:
        grain, side, parts = self.packing.levels[level].grain, self._sides[level], []
        for rows, height, width, start in self._images(level):
            numbers = np.arange(start, start + rows * height * width)
            # Tokens of a patch of the packing go line by line, and so do the patches.
            patches = numbers.reshape(rows, height // grain, width // grain, grain, grain)
            raster = patches.transpose(0, 1, 3, 2, 4).reshape(rows, height // side, side, width // side, side)
            parts.append(raster.transpose(0, 1, 3, 2, 4).reshape(-1, side * side))
        return np.concatenate(parts)

    def _images(self, level: int) -> Iterator[tuple[int, int, int, int]]:
        """Iterate over the resolutions of a level: the number of images, their height and width in tokens, and their
        first token. Padding patches are images of their own.
        """
        at = self.packing.levels[level]
        for group in at.groups:
            yield group.rows, group.height, group.width, group.start
        if at.num_padding:
            yield at.num_padding // at.grain**2, at.grain, at.grain, at.num_tokens - at.num_padding

    def groups(self) -> list[tuple[int, int, int]]:
        """Return the first row, the number of rows and the number of cells in a row for every resolution."""
        starts = self.row_start
        return [
            (group.first_row, group.rows, int(starts[group.first_row + 1] - starts[group.first_row]))
            for group in self.packing.levels[0].groups
        ]


@cache
def window_places(side: int, scale: int, stride: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tokens that a 3 x 3 convolution reads for the outputs of a cell.

    Args:
        side: tokens on the side of a cell.
        scale: factor of the up-sampling before the convolution.
        stride: None for the window of all tokens; otherwise stride of the convolution, for the 9 tokens of each output.
        device: device of the result.

    Returns:
        For each token, the cell among the 3 x 3 around its own, and its place in that cell.
    """
    area, edge = side * side, scale * side
    numbers = np.arange(9 * area).reshape(3, 3, side, side).transpose(0, 2, 1, 3).reshape(3 * side, 3 * side)
    around = slice(edge - 1, 2 * edge + 1)
    places = numbers.repeat(scale, 0).repeat(scale, 1)[around, around]
    if stride is not None:
        places = np.lib.stride_tricks.sliding_window_view(places, (3, 3))[::stride, ::stride]
    cells, tokens = (torch.from_numpy(each).to(device) for each in np.divmod(places.reshape(-1), area))
    return cells, tokens


class SlotTable:
    """Assignment of slots to cells. Cells are identified by unique keys, which are never used again."""

    def __init__(self) -> None:
        self._keys: Integers = np.empty(0, np.int64)
        self._slots: Integers = np.empty(0, np.int64)
        self._free: list[int] = []
        self.num_slots = 1  # with slot 0

    def assign(self, keys: Integers) -> Integers:
        """Return the slot of every cell: its current one, or a free one. The slots of absent cells become free."""
        slots = np.zeros(len(keys), np.int64)
        here, there = match_keys(keys, self._keys)
        slots[here] = self._slots[there]
        is_gone = np.ones(len(self._keys), bool)
        is_gone[there] = False
        self._free.extend(self._slots[is_gone].tolist())
        is_new = slots == 0
        missing = int(is_new.sum()) - len(self._free)
        if missing > 0:
            self._free.extend(range(self.num_slots, self.num_slots + missing))
            self.num_slots += missing
        # Lowest slots first, so that the buffers of operators stay dense.
        self._free.sort(reverse=True)
        slots[is_new] = [self._free.pop() for _ in range(int(is_new.sum()))]
        self._keys, self._slots = keys, slots
        return slots


def match_keys(new: Integers, old: Integers) -> tuple[Integers, Integers]:
    """Return the Common Set: the indices in `new` and in `old` of the keys that both have (PatchedServe section 5.2).

    The other keys of `new` are the New Set, the other keys of `old` the Expired Set.
    """
    if not len(old):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    order = np.argsort(old, kind="stable")
    place = np.minimum(np.searchsorted(old, new, sorter=order), len(old) - 1)
    there = order[place]
    here = np.flatnonzero(old[there] == new)
    return here, there[here]
