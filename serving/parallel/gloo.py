"""Transport of tensors between processes over TCP, by torch's gloo."""

import contextlib
import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .group import GroupError

_NEVER = 1 << 24
"""A tag that is never sent."""


class Gloo:
    """A `Transport` over gloo. Arguments as in `connect_ranks`. Raises GroupError if a rank does not connect."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, host: str) -> None:
        self._rank, self._size = rank, size
        gloo: Any = dist.ProcessGroupGloo  # torch's stubs leave out most of it
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [gloo.create_device(hostname=host)]
        try:
            self._group = gloo(store, rank, size, options)
        except RuntimeError as error:
            raise GroupError(f"ranks do not meet: {in_short(error)}") from error

    def send(self, rank: int, tensor: Tensor, tag: int) -> "GlooTransfer":
        """Start to send a CPU tensor. Raises GroupError."""
        tensor = tensor.contiguous()
        return GlooTransfer(self._begin(self._group.send, rank, tensor, tag), rank, tensor)

    def receive(self, rank: int, shape: Sequence[int], dtype: torch.dtype, tag: int) -> "GlooTransfer":
        """Start to receive a tensor. Raises GroupError."""
        tensor = torch.empty(tuple(shape), dtype=dtype)
        return GlooTransfer(self._begin(self._group.recv, rank, tensor, tag), rank, tensor)

    def disconnect(self) -> None:
        """Close all connections. Thread-safe."""
        # The only way with gloo: a wait that times out closes all connections of the group.
        with contextlib.suppress(GroupError):
            self.receive((self._rank + 1) % self._size, (1,), torch.uint8, _NEVER).wait(timedelta(milliseconds=1))

    def check_peer(self, rank: int) -> None:
        """Do nothing: gloo reports a lost rank only when something is sent or received."""

    @staticmethod
    def _begin(what: Any, rank: int, tensor: Tensor, tag: int) -> Any:
        try:
            return what([tensor], rank, tag)
        except RuntimeError as error:
            raise GroupError(f"rank {rank} cannot be reached: {in_short(error)}") from error


class GlooTransfer:
    """A `Transfer` over gloo, which keeps the tensor alive until it has been sent."""

    def __init__(self, work: Any, rank: int, tensor: Tensor) -> None:
        self._work, self._rank, self._tensor = work, rank, tensor

    def wait(self, timeout: timedelta) -> Tensor:
        """Wait for the transfer and return the tensor. Raises GroupError."""
        try:
            self._work.wait(timeout)
        except RuntimeError as error:
            raise GroupError(f"rank {self._rank} does not answer: {in_short(error)}") from error
        return self._tensor


def in_short(error: RuntimeError) -> str:
    """Return torch's error message without the source location before it and the advice after it."""
    return re.sub(r"^\[\S+:\d+\] ", "", str(error).splitlines()[0]).split(". ")[0]
