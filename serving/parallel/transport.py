"""Transport of tensors between processes: shared memory on one machine, otherwise gloo."""

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
    """A tensor that is being sent or received."""

    def wait(self, timeout: timedelta) -> Tensor:
        """Return the tensor once it has been received or, on the sender, may be modified. Raises GroupError."""
        ...


class Transport(Protocol):
    """Connections of one rank to all others. Tensors with the same tag arrive in the order in which they are sent."""

    def send(self, rank: int, tensor: Tensor, tag: int) -> Transfer:
        """Start to send a CPU tensor. Raises GroupError."""
        ...

    def receive(self, rank: int, shape: Sequence[int], dtype: torch.dtype, tag: int) -> Transfer:
        """Start to receive a tensor. Raises GroupError."""
        ...

    def check_peer(self, rank: int) -> None:
        """Raise GroupError if a rank is known to have gone. Does not wait."""
        ...

    def disconnect(self) -> None:
        """Close all connections: every thread that waits for this rank, or on it, gets a GroupError. Thread-safe."""
        ...


def connect_ranks(
    store: dist.Store, rank: int, size: int, timeout: timedelta, host: str, backend: Backend = "auto"
) -> Transport:
    """Connect a rank to the others of its group, over the fastest transport that all of them have.

    Args:
        store: store through which the ranks find each other.
        rank, size: rank in the group, and size of the group.
        timeout: longest wait for each rank to connect.
        host: address of this machine for the other ranks.
        backend: as in `ParallelOptions`. With `nccl`, which carries only GPU tensors, this transport carries the rest.

    Raises:
        GroupError: a rank does not connect.
    """
    if backend != "gloo" and host == LOOPBACK and is_available():
        return SharedMemory(store, rank, size, timeout)
    return Gloo(store, rank, size, timeout, host)
