"""How ranks talk: orders from rank 0 to the others, and tensors between any of them.

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
    """A rank of the group has failed or gone; nothing of this call can be relied on."""


class RankError(PsctlError):
    """A rank could not do what it was asked for; the group stands again."""


@dataclass(frozen=True, slots=True)
class Message:
    """What ranks tell each other besides parts of images.

    Attributes:
        kind: says what is to be done, or was.
        facts: plain values, as JSON can hold them.
        tensors: by name.
    """

    kind: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


class Pending(Protocol):
    """Tensors that are on their way."""

    def wait(self) -> dict[int, Tensor]:
        """They, by the rank that they come from. Raises GroupError."""
        ...


class Communicator(Protocol):
    """One rank's end of the group. Messages from one rank to another arrive in the order in which they are sent.

    Attributes:
        rank, size: of the group.
    """

    rank: int
    size: int

    def tell(self, rank: int, message: Message) -> None:
        """Send a message. Raises GroupError."""
        ...

    def hear(self, rank: int, *, is_idle: bool = False) -> Message:
        """Wait for the next message of a rank, for as long as it takes if this one has nothing to do. Raises
        GroupError.
        """
        ...

    def swap(self, sends: Mapping[int, Tensor], shapes: Mapping[int, Sequence[int]], dtype: torch.dtype) -> Pending:
        """Send a tensor to some ranks, and await one of a known shape of some. Returns at once. Raises GroupError."""
        ...


class VirtualGroup:
    """Ranks in one process, of which one runs at a time: whoever waits for a message lets another run.

    A rank's thread holds the baton (`with end:`) while it computes.

    Args:
        size: number of ranks.
        news: of the group that this one follows, whose baton it has then.
    """

    def __init__(self, size: int, news: threading.Condition | None = None) -> None:
        self.size = size
        # Its lock is the baton.
        self.news = news or threading.Condition()
        self.error: BaseException | None = None
        self._posted: dict[tuple[Any, ...], Any] = {}

    def end(self, rank: int) -> "VirtualEnd":
        """The end of a rank."""
        return VirtualEnd(self, rank)

    def abort(self, error: BaseException) -> None:
        """Let every rank that waits, or is going to, raise GroupError; the baton is held."""
        self.error = error
        self.news.notify_all()

    def post(self, address: tuple[Any, ...], what: Any) -> None:
        """Send; the baton is held."""
        self._check()
        self._posted[address] = what
        self.news.notify_all()

    def take(self, address: tuple[Any, ...]) -> Any:
        """Wait for what is sent to an address; the baton is held again when it is there."""
        self.news.wait_for(lambda: address in self._posted or self.error is not None)
        self._check()
        return self._posted.pop(address)

    def _check(self) -> None:
        if self.error is not None:
            raise GroupError(f"the group has been given up: {self.error}") from self.error


class VirtualEnd:
    """A rank's end of a `VirtualGroup`, and its baton: `with end:` around all that the rank does."""

    def __init__(self, group: VirtualGroup, rank: int) -> None:
        self.group, self.rank, self.size = group, rank, group.size
        self._numbers: Counter[tuple[Any, ...]] = Counter()

    def __enter__(self) -> "VirtualEnd":
        self.group.news.acquire()
        return self

    def __exit__(self, *exception: object) -> None:
        self.group.news.release()

    def tell(self, rank: int, message: Message) -> None:
        """See `Communicator`."""
        tensors = {name: tensor.clone() for name, tensor in message.tensors.items()}
        address = self._next("message", self.rank, rank)
        self.group.post(address, Message(message.kind, message.facts, tensors))

    def hear(self, rank: int, *, is_idle: bool = False) -> Message:
        """See `Communicator`."""
        return self.group.take(self._next("message", rank, self.rank))

    def swap(
        self, sends: Mapping[int, Tensor], shapes: Mapping[int, Sequence[int]], dtype: torch.dtype
    ) -> "VirtualPending":
        """See `Communicator`."""
        for rank, tensor in sends.items():
            assert tensor.dtype == dtype
            # As with processes, what the sender does to its tensor later is not seen.
            self.group.post(self._next("tensor", self.rank, rank), tensor.clone())
        addresses = {rank: self._next("tensor", rank, self.rank) for rank in shapes}
        return VirtualPending(self.group, addresses, shapes)

    def _next(self, *channel: Any) -> tuple[Any, ...]:
        """The address of the next of a kind between two ranks: both of them count alike."""
        self._numbers[channel] += 1
        return *channel, self._numbers[channel]


class VirtualPending:
    """See `Pending`."""

    def __init__(
        self, group: VirtualGroup, addresses: Mapping[int, tuple[Any, ...]], shapes: Mapping[int, Sequence[int]]
    ) -> None:
        self._group, self._addresses, self._shapes = group, addresses, shapes

    def wait(self) -> dict[int, Tensor]:
        """See `Pending`."""
        found = {rank: self._group.take(address) for rank, address in self._addresses.items()}
        for rank, shape in self._shapes.items():
            given = found[rank].shape
            assert given == torch.Size(shape), f"rank {rank} has sent {tuple(given)}, not {tuple(shape)}"
        return found
