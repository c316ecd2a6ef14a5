"""Tensors between the GPUs of ranks by NCCL: they do not go through the memory of the host."""

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
    """One rank's GPU among those of its group, each of which is another one.

    All ranks that send each other something must do so in the same order, as those do that run the same model.

    Args:
        store: where the ranks find each other.
        rank, size: of the group.
        timeout: for each of them to come.
        device: this rank's.
        look: raises GroupError where a rank is known to have gone. NCCL itself would wait for it.

    Raises:
        GroupError: a rank does not come.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        device: torch.device,
        look: Callable[[int], None],
    ) -> None:
        self._device, self._look, self._over = device, look, threading.Event()
        # Otherwise a thread of torch's ends the whole process where another rank has gone. It is read with each group.
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
        """Begin to receive from some ranks and to send to some, in one go. Raises GroupError."""
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
            finally:  # what is begun in a thread is begun for its next group, too
                work = self._group._end_coalescing()
        except RuntimeError as error:
            raise GroupError(f"GPUs of other ranks cannot be reached: {in_short(error)}") from error
        swap = NcclSwap(work, sent.keys() | received.keys(), self._look, self._over)
        awaited = {rank: NcclTransfer(swap, tensor) for rank, tensor in received.items()}
        return awaited, [NcclTransfer(swap, tensor) for tensor in sent.values()]

    def break_off(self) -> None:
        """Let whoever waits here raise GroupError, and stop what the GPU still waits for; any thread may."""
        self._over.set()
        with contextlib.suppress(RuntimeError):  # which has been broken off before
            self._group.abort()


class NcclSwap:
    """What is sent and received in one go.

    Args:
        work: of NCCL.
        ranks: with whom.
        look: raises GroupError where one of them is known to have gone.
        over: is set where the group has been broken off.
    """

    def __init__(self, work: Any, ranks: Collection[int], look: Callable[[int], None], over: threading.Event) -> None:
        self._work, self._ranks, self._look, self._over = work, ranks, look, over

    def wait(self, timeout: timedelta) -> None:
        """Until the GPU has done it. Raises GroupError."""
        # To let the GPU wait by itself would save a moment, but leave nobody to notice that a rank has gone.
        until_s = time.monotonic() + timeout.total_seconds()
        look_s = time.monotonic() + _LOOK_EVERY_S
        while not (self._over.is_set() or self._work.is_completed()):
            if (now_s := time.monotonic()) > until_s:
                raise GroupError(f"{self._whom} do not answer within {timeout.total_seconds():g} s")
            if now_s > look_s:
                look_s = now_s + _LOOK_EVERY_S
                for rank in self._ranks:
                    self._look(rank)
            time.sleep(0)  # lets other threads go on
        # What is broken off counts as completed, too.
        if self._over.is_set():
            raise GroupError(f"{self._whom} have been broken off")
        try:
            self._work.wait()
        except RuntimeError as error:
            raise GroupError(f"{self._whom} have failed: {in_short(error)}") from error

    @property
    def _whom(self) -> str:
        return f"GPUs of ranks {', '.join(map(str, sorted(self._ranks)))}"


class NcclTransfer:
    """See `Transfer`; the tensor is kept until it is there."""

    def __init__(self, swap: NcclSwap, tensor: Tensor) -> None:
        self._swap, self._tensor = swap, tensor

    def wait(self, timeout: timedelta) -> Tensor:
        """See `Transfer`."""
        self._swap.wait(timeout)
        return self._tensor
