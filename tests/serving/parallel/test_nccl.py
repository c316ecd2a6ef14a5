"""Waiting for transfers of NCCL, and options that refuse it; NCCL itself is tested in tests/gpu.

The tests wait for a receive of gloo, which, like one of NCCL, does not complete until the other rank sends.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from patchedserve.data.errors import UsageError
from patchedserve.serving.parallel.group import GroupError
from patchedserve.serving.parallel.launch import devices_of
from patchedserve.serving.parallel.nccl import NcclSwap, NcclTransfer
from patchedserve.serving.parallel.options import ParallelOptions

SOON, LATE = timedelta(seconds=0.3), timedelta(seconds=20)
GPU = torch.device("cuda:0")


def _gloo(store: dist.Store, rank: int) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    return gloo(store, rank, 2, LATE)


@pytest.fixture
def pending() -> Callable[..., tuple[NcclSwap, threading.Event]]:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: _gloo(store, rank), range(2)))

    def begin(look: Callable[[int], None] = lambda _: None) -> tuple[NcclSwap, threading.Event]:
        over = threading.Event()
        work = groups[0].recv([torch.zeros(3)], 1, 0)
        return NcclSwap(work, {3, 1}, look, over), over

    return begin


def test_unresponsive_rank_is_named(pending: Callable[..., tuple[NcclSwap, threading.Event]]) -> None:
    swap, _ = pending()
    start_s = time.monotonic()
    with pytest.raises(GroupError, match=r"GPUs of ranks 1, 3 do not answer within 0\.3 s"):
        NcclTransfer(swap, torch.zeros(3)).wait(SOON)
    assert 0.3 <= time.monotonic() - start_s < 5


def test_lost_rank_is_detected_while_waiting(
    pending: Callable[..., tuple[NcclSwap, threading.Event]],
) -> None:
    until_s, seen = time.monotonic() + 0.1, set[int]()

    def check_peer(rank: int) -> None:
        seen.add(rank)
        if time.monotonic() > until_s:
            raise GroupError(f"rank {rank} has gone")

    swap, _ = pending(check_peer)
    with pytest.raises(GroupError, match=r"rank [13] has gone"):
        swap.wait(LATE)
    assert seen == {1, 3}
    assert time.monotonic() - until_s < 5


def test_pending_transfers_fail_on_disconnect(pending: Callable[..., tuple[NcclSwap, threading.Event]]) -> None:
    swap, over = pending()
    timer = threading.Timer(0.1, over.set)
    timer.start()
    with pytest.raises(GroupError, match="GPUs of ranks 1, 3 have been broken off"):
        swap.wait(LATE)
    timer.join()


@pytest.mark.parametrize(
    ("device", "named", "said"),
    [
        ("cpu", None, "takes a GPU of its own for each rank, but they are on cpu, cpu"),
        ("cuda:0", "cuda:0,cuda:0", "but they are on cuda:0, cuda:0"),
        ("cuda:0", "cuda,cuda:0", "but they are on cuda, cuda:0"),
    ],
)
def test_each_rank_needs_its_own_gpu(device: str, named: str | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        devices_of(torch.device(device), ParallelOptions("2", backend="nccl", devices=named))


def test_devices_of_other_machines_are_not_compared() -> None:
    assert devices_of(GPU, ParallelOptions("3"), is_here=False) == ["cuda:0"] * 3
    same = ParallelOptions("2", backend="nccl", devices="cuda:0,cuda:0")
    different = ParallelOptions("2", backend="nccl", devices="cuda:0,cuda:1")
    for options, is_here in ((different, True), (same, False)):
        if dist.is_nccl_available():
            assert devices_of(GPU, options, is_here=is_here) == options.device_names
        else:
            with pytest.raises(UsageError, match="this torch has been built without NCCL: try auto"):
                devices_of(GPU, options, is_here=is_here)


def test_threads_of_one_process_have_no_backend() -> None:
    with pytest.raises(UsageError, match="--parallel-backend gloo is for processes, but --parallel is virtual:2"):
        ParallelOptions("virtual:2", backend="gloo")
    with pytest.raises(UsageError, match="--parallel-backend is 'mpi', but it must be one of auto, gloo, nccl"):
        ParallelOptions("2", backend="mpi")  # type: ignore[arg-type]
