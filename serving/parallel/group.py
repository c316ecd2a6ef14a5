"""Communication between ranks: messages between rank 0 and the others, and tensors between any of them.

`VirtualGroup` has its ranks in one process, as threads of which one runs at a time: the same code, shapes and order of
messages as with processes, on any machine.
"""

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ...data.errors import PsctlError


class GroupError(PsctlError):
    """A rank of the group has failed or gone; the results of this call are invalid."""


class RankError(PsctlError):
    """A rank has failed to carry out a request; the group has recovered."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message between ranks. Leaves exchange their tensors without messages.

    Attributes:
        kind: name of the task, or of its result.
        facts: plain values that JSON can represent.
        tensors: tensors by name.
    """

    kind: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


class Pending(Protocol):
    """A swap of tensors that has been started."""

    def wait(self) -> dict[int, Tensor]:
        """Wait for the tensors and return them by the rank that sent them. Raises GroupError."""
        ...


class Communicator(Protocol):
    """One rank's end of the group. Messages from one rank to another arrive in the order in which they are sent.

    Attributes:
        rank, size: rank in the group, and size of the group.
    """

    rank: int
    size: int

    def send(self, rank: int, message: Message) -> None:
        """Send a message. Raises GroupError."""
        ...

    def receive(self, rank: int, *, is_idle: bool = False) -> Message:
        """Wait for the next message of a rank, without a timeout if this rank is idle. Raises GroupError."""
        ...

    def swap(self, sends: Mapping[int, Tensor], shapes: Mapping[int, Sequence[int]], dtype: torch.dtype) -> Pending:
        """Start to send a tensor to each of some ranks, and to receive one of a known shape from each of some.

        Returns at once. Raises GroupError.
        """
        ...


class VirtualGroup:
    """Ranks in one process, of which one runs at a time: a rank that waits for a message lets another run.

    A rank's thread holds the baton (`with end:`) while it computes.

    Args:
        size: number of ranks.
        news: condition of the group that this one replaces, so that both have the same baton.
    """

    def __init__(self, size: int, news: threading.Condition | None = None) -> None:
        self.size = size
        # Its lock is the baton.
        self.news = news or threading.Condition()
        self.error: BaseException | None = None
        self._posted: dict[tuple[Any, ...], Any] = {}

    def end(self, rank: int) -> "VirtualEnd":
        """Return the end of a rank."""
        return VirtualEnd(self, rank)

    def abort(self, error: BaseException) -> None:
        """Let every rank that waits, now or later, raise GroupError. The caller holds the baton."""
        self.error = error
        self.news.notify_all()

    def post(self, address: tuple[Any, ...], what: Any) -> None:
        """Send an object to an address. The caller holds the baton."""
        self._check()
        self._posted[address] = what
        self.news.notify_all()

    def take(self, address: tuple[Any, ...]) -> Any:
        """Wait for the object sent to an address and return it. The caller holds the baton, except during the wait."""
        self.news.wait_for(lambda: address in self._posted or self.error is not None)
        self._check()
        return self._posted.pop(address)

    def _check(self) -> None:
        if self.error is not None:
            raise GroupError(f"the group has been given up: {self.error}") from self.error


class VirtualEnd:
    """A rank's end of a `VirtualGroup`, and its baton: all work of the rank happens inside `with end:`."""

    def __init__(self, group: VirtualGroup, rank: int) -> None:
        self.group, self.rank, self.size = group, rank, group.size
        self._numbers: Counter[tuple[Any, ...]] = Counter()

    def __enter__(self) -> "VirtualEnd":
        self.group.news.acquire()
        return self

    def __exit__(self, *exception: object) -> None:
        self.group.news.release()

    def send(self, rank: int, message: Message) -> None:
        """Send a message. Raises GroupError."""
        tensors = {name: tensor.clone() for name, tensor in message.tensors.items()}
        address = self._next("message", self.rank, rank)
        self.group.post(address, Message(message.kind, message.facts, tensors))

    def receive(self, rank: int, *, is_idle: bool = False) -> Message:
        """Wait for the next message of a rank. Raises GroupError."""
        return self.group.take(self._next("message", rank, self.rank))

    def swap(
        self, sends: Mapping[int, Tensor], shapes: Mapping[int, Sequence[int]], dtype: torch.dtype
    ) -> "VirtualPending":
        """Send copies of the tensors, and return the swap that receives the others. Raises GroupError."""
        for rank, tensor in sends.items():
            assert tensor.dtype == dtype
            # As with processes, the receiver does not see later changes to the tensor.
            self.group.post(self._next("tensor", self.rank, rank), tensor.clone())
        addresses = {rank: self._next("tensor", rank, self.rank) for rank in shapes}
        return VirtualPending(self.group, addresses, shapes)

    def _next(self, *channel: Any) -> tuple[Any, ...]:
        """Return the address of the next item on a channel between two ranks; both ranks count alike."""
        self._numbers[channel] += 1
        return *channel, self._numbers[channel]


class VirtualPending:
    """A `Pending` swap of a `VirtualGroup`."""

    def __init__(
        self, group: VirtualGroup, addresses: Mapping[int, tuple[Any, ...]], shapes: Mapping[int, Sequence[int]]
    ) -> None:
        self._group, self._addresses, self._shapes = group, addresses, shapes

    def wait(self) -> dict[int, Tensor]:
        """Wait for the tensors and return them by the rank that sent them. Raises GroupError."""
        found = {rank: self._group.take(address) for rank, address in self._addresses.items()}
        for rank, shape in self._shapes.items():
            given = found[rank].shape
            assert given == torch.Size(shape), f"rank {rank} has sent {tuple(given)}, not {tuple(shape)}"
        return found
