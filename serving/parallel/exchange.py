"""What the leaves of different ranks send each other: at once, or for the next call of the model.

A displaced row reads what the others had in its call before, which has travelled while the rest of that call ran. Rows
stand for themselves: those of one batch may be in both states. Source: DistriFusion section 4, figures 3 and 4.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .group import Communicator, Pending

RowName = tuple[int, int]
"""A row of a batch: the request's key, and 0, or with guidance 1 for its conditional row."""


class Slot:
    """What the ranks had in a call, of some rows.

    Args:
        own: what this rank had.
        found: what the others had, by rank, or are still sending.
    """

    def __init__(self, own: Tensor, found: dict[int, Tensor] | Pending) -> None:
        self.own, self._found = own, found

    @property
    def found(self) -> dict[int, Tensor]:
        """Of the others; waits for it. Raises GroupError."""
        if not isinstance(self._found, dict):
            self._found = self._found.wait()
        return self._found


@dataclass(frozen=True, slots=True)
class Swapped:
    """What a leaf works with.

    Attributes:
        others: by rank: of this call, or for displaced rows of their call before.
        before: this rank's own, from the same calls as `others`.
    """

    others: dict[int, Tensor]
    before: Tensor


class Exchange:
    """One rank's side, with the slots of all its leaves."""

    def __init__(self) -> None:
        self._slots: dict[Hashable, dict[RowName, tuple[Slot, int]]] = {}

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
    ) -> Swapped:
        """Give others what they need of this rank, and get what this one needs of them.

        Args:
            end: of this rank.
            rows: of the batch; the first dimension of every tensor.
            is_displaced: which of them read what others had in their call before.
            is_last: which of them have no call after this one.
            key: of the leaf.
            own: what this rank has.
            sends: what others need of it, by rank.
            shapes: of what they have, by rank.

        Raises:
            GroupError: another rank does not answer.
        """
        slots = self._slots.setdefault(key, {})
        now = [index for index, displaced in enumerate(is_displaced) if not displaced]
        later = [index for index, displaced in enumerate(is_displaced) if displaced]
        stale = self._read(slots, [rows[index] for index in later]) if later else None
        # Sending comes first for rows that wait; what the next call needs follows.
        fresh = None
        if now:
            fresh = self._begin(end, now, len(rows), sends, shapes, own.dtype).wait()
        self._forget(slots, rows)
        kept_now = [(place, index) for place, index in enumerate(now) if not is_last[index]]
        if fresh is not None and kept_now:
            slot = Slot(own[now], fresh)
            slots.update({rows[index]: (slot, place) for place, index in kept_now})
        if kept := [index for index in later if not is_last[index]]:
            slot = Slot(_part(own, kept, len(rows)), self._begin(end, kept, len(rows), sends, shapes, own.dtype))
            slots.update({rows[index]: (slot, place) for place, index in enumerate(kept)})
        if stale is None:
            assert fresh is not None
            return Swapped(fresh, own)
        if fresh is None:
            return stale
        others = {
            rank: _merged(len(rows), {tuple(now): fresh[rank], tuple(later): stale.others[rank]}) for rank in fresh
        }
        return Swapped(others, _merged(len(rows), {tuple(now): own[now], tuple(later): stale.before}))

    def keep(self, rows: set[RowName]) -> None:
        """Forget what belongs to other rows."""
        for slots in self._slots.values():
            self._forget(slots, [row for row in slots if row not in rows])

    def clear(self) -> None:
        """Forget everything, without waiting for anything."""
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
    def _read(slots: Mapping[RowName, tuple[Slot, int]], rows: Sequence[RowName]) -> Swapped:
        """What the ranks had of some rows in their calls before."""
        places = [slots[row] for row in rows]
        first = places[0][0]
        if all(slot is first and index == place for place, (slot, index) in enumerate(places)):
            count = len(first.own)
            whole = list(range(len(rows)))
            others = {rank: _part(tensor, whole, count) for rank, tensor in first.found.items()}
            return Swapped(others, _part(first.own, whole, count))
        others = {rank: torch.stack([slot.found[rank][index] for slot, index in places]) for rank in first.found}
        return Swapped(others, torch.stack([slot.own[index] for slot, index in places]))

    @staticmethod
    def _forget(slots: dict[RowName, tuple[Slot, int]], rows: Sequence[RowName]) -> None:
        """Take rows out; what is still on its way to them has to arrive first."""
        for row in rows:
            if row in slots:
                slots.pop(row)[0].found  # noqa: B018


def _part(tensor: Tensor, index: list[int], count: int) -> Tensor:
    """Some rows of a tensor that has `count`."""
    return tensor if len(index) == count else tensor[index]


def _merged(count: int, parts: Mapping[tuple[int, ...], Tensor]) -> Tensor:
    """Rows of several tensors, each at its places."""
    first = next(iter(parts.values()))
    whole = first.new_empty(count, *first.shape[1:])
    for index, tensor in parts.items():
        whole[list(index)] = tensor
    return whole
