"""Communication between ranks in separate processes, over any transport."""

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .group import GroupError, Message
from .nccl import Nccl
from .transport import Transfer, Transport

UNLIMITED_WAIT = timedelta(days=365)
"""How long a rank without work waits for some. A lost rank is noticed at once, as its connection closes."""
_MESSAGES = 0
"""The tag of messages. The tags of tensors count up, so that tensors may be awaited in any order."""
_MAX_TAGS = 1 << 20


class ProcessEnd:
    """A `Communicator` between processes.

    Args:
        transport: connections to the other ranks.
        rank, size: rank in the group, and size of the group.
        timeout_s: longest time that the ranks of a call may keep each other waiting.
        device: device of the received tensors.
        threads: number of threads that torch uses while the end is held (`with end:`); None to leave it unchanged.
        nccl: carries tensors of leaves; None to use the transport.

    Attributes:
        timeout, device: as given.
        last_sent_s: time of the last message sent, on the monotonic clock.
        waited_s: seconds spent waiting for others, in all calls so far.
    """

    def __init__(
        self,
        transport: Transport,
        rank: int,
        size: int,
        timeout_s: float,
        device: torch.device | str = "cpu",
        threads: int | None = None,
        nccl: Nccl | None = None,
    ) -> None:
        self.rank, self.size, self.device = rank, size, torch.device(device)
        self._threads, self._threads_before = threads, 0
        self.timeout = timedelta(seconds=timeout_s)
        self._transport, self._nccl = transport, nccl
        self._numbers: Counter[tuple[Any, ...]] = Counter()
        self.last_sent_s = time.monotonic()
        self.waited_s = 0.0

    def __enter__(self) -> "ProcessEnd":
        if self._threads is not None:
            self._threads_before = torch.get_num_threads()
            torch.set_num_threads(self._threads)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads_before)

    def send(self, rank: int, message: Message) -> None:
        """Send a message. Raises GroupError."""
        self.last_sent_s = time.monotonic()
        specs = [[name, list(each.shape), str(each.dtype)[6:]] for name, each in message.tensors.items()]
        number = self._next("message", self.rank, rank)
        header = json.dumps([number, message.kind, dict(message.facts), specs]).encode()
        parts = [torch.tensor([len(header)]), torch.from_numpy(np.frombuffer(header, np.uint8).copy())]
        for tensor in (*parts, *message.tensors.values()):
            self._transport.send(rank, tensor.cpu(), _MESSAGES).wait(self.timeout)

    def receive(self, rank: int, *, is_idle: bool = False) -> Message:
        """Wait for the next message of a rank, without a timeout if this rank is idle. Raises GroupError."""
        start_s = time.perf_counter()

        def receive(shape: Sequence[int], dtype: torch.dtype, timeout: timedelta = self.timeout) -> Tensor:
            return self._transport.receive(rank, shape, dtype, _MESSAGES).wait(timeout)

        length = int(receive((1,), torch.int64, UNLIMITED_WAIT if is_idle else self.timeout))
        number, kind, facts, specs = json.loads(receive((length,), torch.uint8).numpy().tobytes())
        if number != (wanted := self._next("message", rank, self.rank)):
            raise GroupError(f"rank {rank} has sent message {number}, but {wanted} is due")
        tensors = {name: receive(shape, getattr(torch, dtype)) for name, shape, dtype in specs}
        if not is_idle:
            self.waited_s += time.perf_counter() - start_s
        return Message(kind, facts, {name: tensor.to(self.device) for name, tensor in tensors.items()})

    def swap(
        self, sends: Mapping[int, Tensor], shapes: Mapping[int, Sequence[int]], dtype: torch.dtype
    ) -> "ProcessPending":
        """Start to send and receive tensors. Raises GroupError."""
        if self._nccl is not None:
            return ProcessPending(self, *self._nccl.swap(sends, shapes, dtype))
        begin = self._transport
        sent = [begin.send(rank, each.cpu(), self._tag(self.rank, rank)) for rank, each in sends.items()]
        awaited = {rank: begin.receive(rank, each, dtype, self._tag(rank, self.rank)) for rank, each in shapes.items()}
        return ProcessPending(self, awaited, sent)

    def disconnect(self) -> None:
        """Close all connections, so that every rank that waits on this end gets a GroupError. Thread-safe."""
        self._transport.disconnect()
        self.close()

    def close(self) -> None:
        """End swaps over NCCL, once the others have been notified of the end or have gone."""
        if self._nccl is not None:
            self._nccl.disconnect()

    def _tag(self, source: int, target: int) -> int:
        """Return the tag of the next tensor between two ranks."""
        return _MESSAGES + 1 + self._next("tensor", source, target) % _MAX_TAGS

    def _next(self, *channel: Any) -> int:
        """Return the number of the next item on a channel between two ranks; both ranks count alike."""
        self._numbers[channel] += 1
        return self._numbers[channel]


class ProcessPending:
    """A `Pending` swap between processes."""

    def __init__(self, end: ProcessEnd, awaited: Mapping[int, Transfer], sent: Sequence[Transfer]) -> None:
        self._end, self._awaited, self._sent = end, awaited, sent

    def wait(self) -> dict[int, Tensor]:
        """Wait for the tensors and return them by the rank that sent them. Raises GroupError."""
        end, start_s = self._end, time.perf_counter()
        found = {rank: transfer.wait(end.timeout).to(end.device) for rank, transfer in self._awaited.items()}
        for transfer in self._sent:
            transfer.wait(end.timeout)
        end.waited_s += time.perf_counter() - start_s
        return found
