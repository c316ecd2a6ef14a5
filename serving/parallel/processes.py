"""Ranks as processes: a rank's end over a process group of torch (gloo on a CPU)."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .group import GroupError, Message

_FOR_EVER = timedelta(days=365)
"""How long a rank without work waits for some; one that has gone is noticed at once, as its connection closes."""
_MESSAGES = 0
"""The tag of messages; those of tensors count up, so that they may be awaited in any order."""
_MOST_TAGS = 1 << 20


class ProcessEnd:
    """See `Communicator`.

    Args:
        store: where the ranks find each other.
        rank, size: of the group.
        timeout_s: how long the ranks of a call may keep each other waiting.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._timeout = timedelta(seconds=timeout_s)
        gloo: Any = dist.ProcessGroupGloo  # torch's stubs leave out most of it
        options = gloo._Options()
        options._timeout = _FOR_EVER
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        self._group = gloo(store, rank, size, options)
        self._numbers: Counter[tuple[int, int]] = Counter()

    def __enter__(self) -> "ProcessEnd":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def tell(self, rank: int, message: Message) -> None:
        """See `Communicator`."""
        specs = [[name, list(each.shape), str(each.dtype)[6:]] for name, each in message.tensors.items()]
        header = json.dumps([message.kind, dict(message.facts), specs]).encode()
        parts = [torch.tensor([len(header)]), torch.from_numpy(np.frombuffer(header, np.uint8).copy())]
        for tensor in (*parts, *message.tensors.values()):
            self.send(rank, tensor.contiguous(), _MESSAGES).wait()

    def hear(self, rank: int, *, is_idle: bool = False) -> Message:
        """See `Communicator`."""

        def receive(shape: Sequence[int], dtype: torch.dtype, timeout: timedelta = self._timeout) -> Tensor:
            return self.receive(rank, shape, dtype, _MESSAGES).wait(timeout)

        length = int(receive((1,), torch.int64, _FOR_EVER if is_idle else self._timeout))
        kind, facts, specs = json.loads(receive((length,), torch.uint8).numpy().tobytes())
        return Message(kind, facts, {name: receive(shape, getattr(torch, dtype)) for name, shape, dtype in specs})

    def swap(
        self, sends: Mapping[int, Tensor], shapes: Mapping[int, Sequence[int]], dtype: torch.dtype
    ) -> "ProcessPending":
        """See `Communicator`."""
        sent = [self.send(rank, each.contiguous(), self._next(self.rank, rank)) for rank, each in sends.items()]
        awaited = {rank: self.receive(rank, each, dtype, self._next(rank, self.rank)) for rank, each in shapes.items()}
        return ProcessPending(awaited, sent, self._timeout)

    def send(self, rank: int, tensor: Tensor, tag: int) -> "Transfer":
        """Begin to send."""
        return Transfer(self._begin(self._group.send, rank, tensor, tag), rank, tensor)

    def receive(self, rank: int, shape: Sequence[int], dtype: torch.dtype, tag: int) -> "Transfer":
        """Begin to receive."""
        tensor = torch.empty(tuple(shape), dtype=dtype)
        return Transfer(self._begin(self._group.recv, rank, tensor, tag), rank, tensor)

    def _begin(self, what: Any, rank: int, tensor: Tensor, tag: int) -> Any:
        try:
            return what([tensor], rank, tag)
        except RuntimeError as error:
            raise GroupError(f"rank {rank} cannot be reached: {error}") from error

    def _next(self, source: int, target: int) -> int:
        """The tag of the next tensor between two ranks: both of them count alike."""
        self._numbers[source, target] += 1
        return 1 + self._numbers[source, target] % _MOST_TAGS


class Transfer:
    """One tensor on its way; it is kept until it has been sent."""

    def __init__(self, work: Any, rank: int, tensor: Tensor) -> None:
        self._work, self._rank, self._tensor = work, rank, tensor

    def wait(self, timeout: timedelta | None = None) -> Tensor:
        """The tensor, once it is here or gone. Raises GroupError."""
        try:
            self._work.wait(*(() if timeout is None else (timeout,)))
        except RuntimeError as error:
            raise GroupError(f"rank {self._rank} does not answer: {str(error).splitlines()[0]}") from error
        return self._tensor


class ProcessPending:
    """See `Pending`."""

    def __init__(self, awaited: Mapping[int, Transfer], sent: Sequence[Transfer], timeout: timedelta) -> None:
        self._awaited, self._sent, self._timeout = awaited, sent, timeout

    def wait(self) -> dict[int, Tensor]:
        """See `Pending`."""
        found = {rank: transfer.wait(self._timeout) for rank, transfer in self._awaited.items()}
        for transfer in self._sent:
            transfer.wait(self._timeout)
        return found
