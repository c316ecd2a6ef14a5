"""What operators keep of their input for the patches that are not computed: PatchedServe section 5.1, DESIGN.md.

A computed patch refreshes its place, a reused one leaves it stale. What a full pass has seen is kept as it is, and only
put into slots when some patches are computed without the others, so a full pass costs nothing more.
"""

import torch
from torch import Tensor

from .active import ActiveSet
from .cells import CellTables


class TokenSlots:
    """The tokens that a convolution or an attention has read last, for all slots."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._pending: tuple[Tensor, CellTables, int] | None = None

    def keep(self, tokens: Tensor, tables: CellTables, level: int) -> None:
        """Take over the tokens [tokens, ...] of a full pass, in packed order. They must not change afterwards."""
        self._pending = tokens, tables, level

    def write(self, values: Tensor, active: ActiveSet, level: int) -> Tensor:
        """Refresh the places of the active cells; returns what is kept of all, [slots * side * side, ...]."""
        buffer = self._flushed(active.tables, level)
        buffer.index_copy_(0, active.slot_tokens(level), values)
        return buffer

    def _flushed(self, tables: CellTables, level: int) -> Tensor:
        area = tables.side(level) ** 2
        source = self._buffer if self._pending is None else self._pending[0]
        assert source is not None, "a block was masked before it ran in full"
        needed = (int(tables.slots.max()) + 1) * area
        if self._pending is not None:
            needed = max(needed, (int(self._pending[1].slots.max()) + 1) * area)
        if self._buffer is None or len(self._buffer) < needed:
            # Half as many again, so that a growing batch does not copy at every join; zeros for slot 0.
            rows = needed if self._buffer is None else max(needed, len(self._buffer) * 3 // 2)
            grown = source.new_zeros(rows, *source.shape[1:])
            if self._buffer is not None:
                grown[: len(self._buffer)] = self._buffer
            self._buffer = grown
        if self._pending is not None:
            tokens, old, old_level = self._pending
            taken = tokens.index_select(0, old.tokens(old_level).flatten())
            self._buffer.index_copy_(0, old.slot_tokens(old_level).flatten(), taken)
            self._pending = None
        return self._buffer

    @property
    def num_bytes(self) -> int:
        pending = 0 if self._pending is None else self._pending[0].nbytes
        return pending + (0 if self._buffer is None else self._buffer.nbytes)

    def clear(self) -> None:
        self._buffer = self._pending = None


class NormSlots:
    """Sums of the values and of their squares by cell and group of channels, for GroupNorm."""

    def __init__(self, num_groups: int) -> None:
        self.num_groups = num_groups
        self._sums: Tensor | None = None
        self._pending: tuple[Tensor, CellTables, int] | None = None

    def keep(self, tokens: Tensor, tables: CellTables, level: int) -> None:
        """Take over the input tokens [tokens, channels] of a full pass. They must not change afterwards."""
        self._pending = tokens, tables, level

    def statistics(self, values: Tensor, active: ActiveSet, eps: float) -> tuple[Tensor, Tensor]:
        """Refresh the sums of the active cells; mean and reciprocal deviation of each row, (rows, groups) float32.

        Args:
            values: float32 [active cells, tokens of a cell, channels].
        """
        self._flush()
        sums = self._sums
        needed = int(active.tables.slots.max()) + 1
        assert sums is not None, "a block was masked before it ran in full"
        if len(sums) < needed:
            sums = self._sums = torch.cat([sums, sums.new_zeros(needed - len(sums), *sums.shape[1:])])
        sums.index_copy_(0, active.slots, self._sum(values))
        slots, local = active.context
        # Doubles, because the mean of squares less the square of the mean loses digits.
        total = sums.new_zeros(len(active.rows), 2, self.num_groups, dtype=torch.float64)
        total.index_add_(0, local, sums.index_select(0, slots).double())
        count = active.num_cells_of_row * (values.shape[1] * (values.shape[2] // self.num_groups))
        mean, square = (total / count.double()[:, None, None]).unbind(1)
        rstd = (square - mean * mean).clamp_(min=0).add_(eps).rsqrt_()
        return mean.float(), rstd.float()

    def _flush(self) -> None:
        if self._pending is None:
            return
        tokens, tables, level = self._pending
        cells = tokens.index_select(0, tables.tokens(level).flatten()).float()
        new = self._sum(cells.view(tables.num_cells, -1, tokens.shape[1]))
        needed = int(tables.slots.max()) + 1
        if self._sums is None or len(self._sums) < needed:
            grown = new.new_zeros(needed, *new.shape[1:])
            if self._sums is not None:
                grown[: len(self._sums)] = self._sums
            self._sums = grown
        self._sums.index_copy_(0, torch.from_numpy(tables.slots).to(new.device), new)
        self._pending = None

    def _sum(self, values: Tensor) -> Tensor:
        """[cells, tokens, channels] -> [cells, 2, groups]."""
        sums = torch.stack([values.sum(1), (values * values).sum(1)], 1)
        return sums.view(len(values), 2, self.num_groups, -1).sum(3)

    @property
    def num_bytes(self) -> int:
        pending = 0 if self._pending is None else self._pending[0].nbytes
        return pending + (0 if self._sums is None else self._sums.nbytes)

    def clear(self) -> None:
        self._sums = self._pending = None
