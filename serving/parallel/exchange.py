"""Exchange of tensors between the leaves of different ranks: for the current call of the model, or for the next one.

A displaced row reads the tensors that the other ranks had in its previous call. They were sent while the rest of that
call ran. Each row has its own state, so that a batch may mix both kinds. Source: DistriFusion section 4, figures 3 and
4.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .group import Communicator, Pending

RowName = tuple[int, int]
"""A row of a batch: the request's key and the row's number, which with guidance is 1 for the conditional row."""


class ExchangeSlot:
    """Tensors of some rows that the ranks had in a call.

    Args:
        own: tensor of this rank.
        others: tensors of the others by rank, or a pending swap of them.
    """

    def __init__(self, own: Tensor, others: dict[int, Tensor] | Pending) -> None:
        self.own, self._others = own, others

    @property
    def others(self) -> dict[int, Tensor]:
        """Tensors of the other ranks. Waits until they have arrived. Raises GroupError."""
        if not isinstance(self._others, dict):
            self._others = self._others.wait()
        return self._others


@dataclass(frozen=True, slots=True)
class ExchangedTensors:
    """Tensors that a leaf works with.

    Attributes:
        others: tensors of the other ranks: from this call or, for displaced rows, from their previous call.
        before: this rank's own tensor, from the same calls as `others`.
    """

    others: dict[int, Tensor]
    before: Tensor


class Exchange:
    """One rank's side of the exchange, with the slots of all its leaves."""

    def __init__(self) -> None:
        self._slots: dict[Hashable, dict[RowName, tuple[ExchangeSlot, int]]] = {}

    def swap(
        self,
        end: Communicator,
        rows: Sequence[RowName],
        is_displaced: Sequence[bool],
        is_last: Sequence[bool],
        key: Hashable,
        own: Tensor,
        sends: Mapping[int, Tensor],
        shapes: Mapping[int, Sequence[int]],
    ) -> ExchangedTensors:
        """Send the tensors that other ranks need of this one, and return those that this rank needs of them.

        Args:
            end: end of this rank.
            rows: rows of the batch, which are the first dimension of every tensor.
            is_displaced: for each row, whether it reads what others had in its previous call.
            is_last: for each row, whether no call follows this one.
            key: key of the leaf.
            own: tensor of this rank.
            sends: tensors that other ranks need, by rank.
            shapes: shapes of the tensors that other ranks send, by rank.

        Raises:
            GroupError: another rank does not answer.
        """
        slots = self._slots.setdefault(key, {})
        now = [index for index, displaced in enumerate(is_displaced) if not displaced]
        later = [index for index, displaced in enumerate(is_displaced) if displaced]
        stale = self._read(slots, [rows[index] for index in later]) if later else None
        # Tensors of rows that wait are sent first, then those for the next call.
        fresh = None
        if now:
            fresh = self._begin(end, now, len(rows), sends, shapes, own.dtype).wait()
        self._discard(slots, rows)
        kept_now = [(place, index) for place, index in enumerate(now) if not is_last[index]]
        if fresh is not None and kept_now:
            slot = ExchangeSlot(own[now], fresh)
            slots.update({rows[index]: (slot, place) for place, index in kept_now})
        if kept := [index for index in later if not is_last[index]]:
            slot = ExchangeSlot(
                _part(own, kept, len(rows)), self._begin(end, kept, len(rows), sends, shapes, own.dtype)
            )
            slots.update({rows[index]: (slot, place) for place, index in enumerate(kept)})
        if stale is None:
            assert fresh is not None
            return ExchangedTensors(fresh, own)
        if fresh is None:
            return stale
        others = {
            rank: _merged(len(rows), {tuple(now): fresh[rank], tuple(later): stale.others[rank]}) for rank in fresh
        }
        return ExchangedTensors(others, _merged(len(rows), {tuple(now): own[now], tuple(later): stale.before}))

    def retain(self, rows: set[RowName]) -> None:
        """Discard the tensors of all other rows."""
        for slots in self._slots.values():
            self._discard(slots, [row for row in slots if row not in rows])

    def clear(self) -> None:
        """Discard everything, without waiting for pending tensors."""
        self._slots.clear()

    @staticmethod
    def _begin(
        end: Communicator,
        index: list[int],
        count: int,
        sends: Mapping[int, Tensor],
        shapes: Mapping[int, Sequence[int]],
        dtype: torch.dtype,
    ) -> Pending:
        given = {rank: _part(tensor, index, count) for rank, tensor in sends.items()}
        return end.swap(given, {rank: (len(index), *shape[1:]) for rank, shape in shapes.items()}, dtype)

    @staticmethod
    def _read(slots: Mapping[RowName, tuple[ExchangeSlot, int]], rows: Sequence[RowName]) -> ExchangedTensors:
        """Return the tensors of some rows from their previous calls."""
        places = [slots[row] for row in rows]
        first = places[0][0]
        if all(slot is first and index == place for place, (slot, index) in enumerate(places)):
            count = len(first.own)
            whole = list(range(len(rows)))
            others = {rank: _part(tensor, whole, count) for rank, tensor in first.others.items()}
            return ExchangedTensors(others, _part(first.own, whole, count))
        others = {rank: torch.stack([slot.others[rank][index] for slot, index in places]) for rank in first.others}
        return ExchangedTensors(others, torch.stack([slot.own[index] for slot, index in places]))

    @staticmethod
    def _discard(slots: dict[RowName, tuple[ExchangeSlot, int]], rows: Sequence[RowName]) -> None:
        """Remove rows, after waiting for their pending tensors."""
        for row in rows:
            if row in slots:
                slots.pop(row)[0].others  # noqa: B018


def _part(tensor: Tensor, index: list[int], count: int) -> Tensor:
    """Return some rows of a tensor of `count` rows."""
    return tensor if len(index) == count else tensor[index]


def _merged(count: int, parts: Mapping[tuple[int, ...], Tensor]) -> Tensor:
    """Merge the rows of several tensors, each at its indices, into one tensor of `count` rows."""
    first = next(iter(parts.values()))
    whole = first.new_empty(count, *first.shape[1:])
    for index, tensor in parts.items():
        whole[list(index)] = tensor
    return whole
