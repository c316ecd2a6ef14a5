"""Buffers in which operators keep their inputs, as context for passes that compute only some patches.

Source: PatchedServe section 5.1, DESIGN.md. A computed patch refreshes its slot, a reused one leaves it stale. The
tensors of a pass over whole requests are kept as they are, and sorted into slots only when some patches are computed
without the others: until then they cost nothing more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from .active import ActiveSet
from .cells import CellTables

Placed = Callable[[Tensor, CellTables, int], tuple[Tensor, Tensor]]
"""Tokens of a full pass, tables and level -> positions in the buffer (n,), and the values for them [n, ...]."""


@dataclass(frozen=True, slots=True, eq=False)
class _Pass:
    """Inputs of a pass over whole requests: tokens [tokens, ...] in packed order, with their tables and level."""

    number: int
    tokens: Tensor
    tables: CellTables
    level: int


class SlotBuffer:
    """Buffer with rows for every slot. Passes over whole requests are sorted into it by `placed` when first needed."""

    def __init__(self, placed: Placed) -> None:
        self._placed = placed
        self._rows: Tensor | None = None
        self._per_slot = 1
        self._passes = count()
        self._pending: dict[int, _Pass] = {}
        """Last pass of each request that has not been sorted into rows yet, by the request's key."""
        self._pending_bytes = 0
        self._read: Callable[[], Tensor] | None = None

    def store(self, tokens: Tensor, tables: CellTables, level: int) -> None:
        """Keep the tokens [tokens, ...] of a pass, in packed order. They must not be modified afterwards."""
        self._pending |= dict.fromkeys(tables.owners, _Pass(next(self._passes), tokens, tables, level))
        if len(self._pending) > len(tables.everyone):
            self._pending = {key: last for key, last in self._pending.items() if key in tables.everyone}
        # A view keeps its whole storage alive.
        self._pending_bytes = sum(last.tokens.untyped_storage().nbytes() for last in set(self._pending.values()))

    def rows(self, tables: CellTables, per_slot: int) -> Tensor:
        """Return the rows of all slots, [slots * per_slot or more, ...]; slot 0 and new slots hold zeros."""
        if self._read is not None:
            self._rows, self._read = self._read().flatten(0, 1), None
        self._per_slot = per_slot
        # A later pass has newer tokens of the requests that it shares with an earlier one.
        for last in sorted(set(self._pending.values()), key=lambda each: each.number):
            places, values = self._placed(last.tokens, last.tables, last.level)
            self._grow_to((int(last.tables.slots.max()) + 1) * per_slot, values).index_copy_(0, places, values)
        self._pending.clear()
        self._pending_bytes = 0
        assert self._rows is not None, "a block was masked before it ran in full"
        return self._grow_to((int(tables.slots.max()) + 1) * per_slot, self._rows)

    def take_values(self) -> Tensor | None:
        """Return and discard the values of the last pass, [cells, entries of a cell, ...] in the order of its tables;
        None if there are none.
        """
        if not self._pending:
            return None
        (last,) = set(self._pending.values())
        _, values = self._placed(last.tokens, last.tables, last.level)
        self.clear()
        return values.view(last.tables.num_cells, -1, *values.shape[1:])

    def put(self, read: Callable[[], Tensor]) -> None:
        """Set the contents: for each slot, an entry of `take_values`, or zeros for slot 0. Passes may modify them.

        `read` is called when rows are first needed, so that a pass waits for them only there. Its errors are raised by
        `rows`.
        """
        self.clear()
        self._read = read

    def _grow_to(self, count: int, like: Tensor) -> Tensor:
        old = self._rows
        if old is None or len(old) < count:
            # Grow by at least half, so that a growing batch does not copy at every join.
            grown = like.new_zeros(count if old is None else max(count, len(old) * 3 // 2), *like.shape[1:])
            if old is not None:
                grown[: len(old)] = old
            self._rows = old = grown
        return old

    def bytes_per_cell(self, num_cells: int) -> float:
        """Return the bytes held for each cell of the batch; the rows of free slots do not count."""
        rows = 0.0 if self._rows is None else self._rows.nbytes * self._per_slot / len(self._rows)
        return rows + self._pending_bytes / num_cells

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return self._pending_bytes + (0 if self._rows is None else self._rows.nbytes)

    def clear(self) -> None:
        """Discard everything."""
        self._rows = self._read = None
        self._pending.clear()
        self._pending_bytes = 0


class TokenSlots:
    """Tokens that a convolution or an attention has last read, for all slots."""

    def __init__(self) -> None:
        self.buffer = SlotBuffer(_placed_tokens)

    def write(self, values: Tensor, active: ActiveSet, level: int) -> Tensor:
        """Refresh the slots of the active cells, and return the tokens of all slots, [slots * side * side, ...]."""
        rows = self.buffer.rows(active.tables, active.tables.side(level) ** 2)
        return rows.index_copy_(0, active.slot_tokens(level), values)


class NormSlots:
    """Sums of the values and of their squares by cell and group of channels, for GroupNorm."""

    def __init__(self, num_groups: int) -> None:
        self.num_groups = num_groups
        self.buffer = SlotBuffer(self._placed_sums)

    def statistics(self, values: Tensor, active: ActiveSet, eps: float) -> tuple[Tensor, Tensor]:
        """Refresh the sums of the active cells; return mean and reciprocal deviation of each row, (rows, groups)
        float32.

        Args:
            values: float32 [active cells, tokens of a cell, channels].
            active: the active cells.
            eps: added to the variance.
        """
        sums = self.buffer.rows(active.tables, 1)
        if not active.freezes_norms:
            sums.index_copy_(0, active.slots, self._sum(values))
        slots, local = active.context
        # In double precision, because the mean of squares minus the square of the mean loses digits.
        total = sums.new_zeros(len(active.rows), 2, self.num_groups, dtype=torch.float64)
        total.index_add_(0, local, sums.index_select(0, slots).double())
        count = active.num_cells_of_row * (values.shape[1] * (values.shape[2] // self.num_groups))
        mean, square = (total / count.double()[:, None, None]).unbind(1)
        rstd = (square - mean * mean).clamp_(min=0).add_(eps).rsqrt_()
        return mean.float(), rstd.float()

    def _placed_sums(self, tokens: Tensor, tables: CellTables, level: int) -> tuple[Tensor, Tensor]:
        cells = tokens.index_select(0, tables.tokens(level).flatten()).float()
        sums = self._sum(cells.view(tables.num_cells, -1, tokens.shape[1]))
        return torch.from_numpy(tables.slots).to(sums.device), sums

    def _sum(self, values: Tensor) -> Tensor:
        """[cells, tokens, channels] -> [cells, 2, groups]."""
        sums = torch.stack([values.sum(1), (values * values).sum(1)], 1)
        return sums.view(len(values), 2, self.num_groups, -1).sum(3)


def _placed_tokens(tokens: Tensor, tables: CellTables, level: int) -> tuple[Tensor, Tensor]:
    return tables.slot_tokens(level).flatten(), tokens.index_select(0, tables.tokens(level).flatten())
