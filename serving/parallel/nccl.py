"""Swaps of tensors between the GPUs of ranks by NCCL, without a copy through host memory."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .gloo import in_short
from .group import GroupError

_LOOK_EVERY_S = 1e-3


class Nccl:
    """One rank's end of an NCCL group, in which every rank has a GPU of its own.

    All ranks must start their swaps in the same order, as ranks that run the same model do.

    Args:
        store: store through which the ranks find each other.
        rank, size: rank in the group, and size of the group.
        timeout: longest wait for each rank to connect.
        device: GPU of this rank.
        check_peer: raises GroupError if a rank is known to have gone. NCCL itself would wait for that rank.

    Raises:
        GroupError: a rank does not connect.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        device: torch.device,
        check_peer: Callable[[int], None],
    ) -> None:
        self._device, self._check_peer, self._aborted = device, check_peer, threading.Event()
        # Otherwise a thread of torch ends the whole process when another rank has gone. torch reads this variable for
        # each group.
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
        nccl: Any = dist.ProcessGroupNCCL  # torch's stubs leave out most of it
        options = nccl.Options()
        options._timeout = timeout
        try:
            self._group = nccl(store, rank, size, options)
            self._group.eager_connect_single_device(device)
        except RuntimeError as error:
            raise GroupError(f"GPUs of the ranks do not meet: {in_short(error)}") from error

    def swap(
        self, sends: Mapping[int, Tensor], shapes: Mapping[int, Sequence[int]], dtype: torch.dtype
    ) -> tuple[dict[int, "NcclTransfer"], list["NcclTransfer"]]:
        """Start to send to some ranks and to receive from some, in one operation. Raises GroupError."""
        sent = {rank: tensor.contiguous() for rank, tensor in sends.items()}
        received = {rank: torch.empty(tuple(shape), dtype=dtype, device=self._device) for rank, shape in shapes.items()}
        if not sent and not received:
            return {}, []
        try:
            self._group._start_coalescing()
            try:
                for rank, tensor in sent.items():
                    self._group.send([tensor], rank, 0)
                for rank, tensor in received.items():
                    self._group.recv([tensor], rank, 0)
            finally:  # coalescing that is left open in a thread would apply to its next group, too
                work = self._group._end_coalescing()
        except RuntimeError as error:
            raise GroupError(f"GPUs of other ranks cannot be reached: {in_short(error)}") from error
        swap = NcclSwap(work, sent.keys() | received.keys(), self._check_peer, self._aborted)
        awaited = {rank: NcclTransfer(swap, tensor) for rank, tensor in received.items()}
        return awaited, [NcclTransfer(swap, tensor) for tensor in sent.values()]

    def disconnect(self) -> None:
        """Let every thread that waits here raise GroupError, and abort the GPU's pending operations. Thread-safe."""
        self._aborted.set()
        with contextlib.suppress(RuntimeError):  # the group was aborted before
            self._group.abort()


class NcclSwap:
    """Tensors that are sent and received in one operation.

    Args:
        work: NCCL's handle on the operation.
        ranks: ranks that take part, besides this one.
        check_peer: raises GroupError if one of them is known to have gone.
        aborted: set once the group has been aborted.
    """

    def __init__(
        self, work: Any, ranks: Collection[int], check_peer: Callable[[int], None], aborted: threading.Event
    ) -> None:
        self._work, self._ranks, self._check_peer, self._aborted = work, ranks, check_peer, aborted

    def wait(self, timeout: timedelta) -> None:
        """Wait until the GPU has completed the operation. Raises GroupError."""
        # Letting the GPU wait by itself would save a moment, but then nothing would notice that a rank has gone.
        until_s = time.monotonic() + timeout.total_seconds()
        look_s = time.monotonic() + _LOOK_EVERY_S
        while not (self._aborted.is_set() or self._work.is_completed()):
            if (now_s := time.monotonic()) > until_s:
                raise GroupError(f"{self._peer_names} do not answer within {timeout.total_seconds():g} s")
            if now_s > look_s:
                look_s = now_s + _LOOK_EVERY_S
                for rank in self._ranks:
                    self._check_peer(rank)
            time.sleep(0)  # lets other threads go on
        # An aborted operation counts as completed, too.
        if self._aborted.is_set():
            raise GroupError(f"{self._peer_names} have been broken off")
        try:
            self._work.wait()
        except RuntimeError as error:
            raise GroupError(f"{self._peer_names} have failed: {in_short(error)}") from error

    @property
    def _peer_names(self) -> str:
        return f"GPUs of ranks {', '.join(map(str, sorted(self._ranks)))}"


class NcclTransfer:
    """The `Transfer` of one tensor of a swap, which keeps the tensor alive until the swap has completed."""

    def __init__(self, swap: NcclSwap, tensor: Tensor) -> None:
        self._swap, self._tensor = swap, tensor

    def wait(self, timeout: timedelta) -> Tensor:
        """Wait for the swap and return the tensor. Raises GroupError."""
        self._swap.wait(timeout)
        return self._tensor
