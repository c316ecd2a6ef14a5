"""How tensors travel between processes: by shared memory on one machine, else over gloo."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .gloo import Gloo
from .options import Backend
from .shared_memory import SharedMemory, is_available

LOOPBACK = "127.0.0.1"
"""The host of ranks that are all on one machine."""


class Transfer(Protocol):
    """One tensor on its way."""

    def wait(self, timeout: timedelta) -> Tensor:
        """The tensor, once it is here, or may be changed here. Raises GroupError."""
        ...


class Transport(Protocol):
    """One rank's connections to all others. What has the same tag arrives in the order in which it is sent."""

    def send(self, rank: int, tensor: Tensor, tag: int) -> Transfer:
        """Begin to send a tensor of a CPU. Raises GroupError."""
        ...

    def receive(self, rank: int, shape: Sequence[int], dtype: torch.dtype, tag: int) -> Transfer:
        """Begin to receive. Raises GroupError."""
        ...

    def look(self, rank: int) -> None:
        """Raises GroupError: a rank is known to have gone. Does not wait."""
        ...

    def break_off(self) -> None:
        """Close all connections: whoever waits for this rank, or on it, gets a GroupError; any thread may."""
        ...


def meet(
    store: dist.Store, rank: int, size: int, timeout: timedelta, host: str, backend: Backend = "auto"
) -> Transport:
    """Connect a rank with the others of its group, in the fastest way that all of them have.

    Args:
        store: where they find each other.
        rank, size: of the group.
        timeout: for each of them to come.
        host: this machine, as the others reach it.
        backend: see `ParallelOptions`; of NCCL, which carries tensors of GPUs only, the rest.

    Raises:
        GroupError: a rank does not come.
    """
    if backend != "gloo" and host == LOOPBACK and is_available():
        return SharedMemory(store, rank, size, timeout)
    return Gloo(store, rank, size, timeout, host)
