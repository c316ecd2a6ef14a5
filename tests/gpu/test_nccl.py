"""NCCL between the GPUs of ranks: one GPU sends to itself; two draw the images of one, also if one is lost."""

from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from patchedserve.serving.models.loading import load_model
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.parallel.group import GroupError
from patchedserve.serving.parallel.launch import ProcessRanks
from patchedserve.serving.parallel.nccl import Nccl
from patchedserve.serving.parallel.options import ParallelOptions
from patchedserve.serving.parallel.stepper import ParallelStepper

from ..support.family_kit import denoised
from ..support.patched_models import relative_error
from .cases import EXACT, alone, mixed

SOON = timedelta(seconds=20)


@pytest.fixture
def one_rank_group(cuda: str) -> Iterator[Nccl]:
    """An NCCL group of one rank."""
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    nccl = Nccl(dist.HashStore(), 0, 1, SOON, torch.device(cuda, 0), lambda _: None)
    yield nccl
    nccl.disconnect()


def test_gpu_receives_what_it_sends_to_itself(one_rank_group: Nccl) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        given = torch.randn(3, 40, 5, device="cuda:0").to(dtype).transpose(1, 2)
        for _ in range(3):
            awaited, sent = one_rank_group.swap({0: given}, {0: given.shape}, dtype)
            found = awaited[0].wait(SOON)
            for each in sent:
                each.wait(SOON)
            assert torch.equal(found, given)
    assert one_rank_group.swap({}, {}, torch.float32) == ({}, [])


def test_swap_after_disconnect_fails(one_rank_group: Nccl) -> None:
    given = torch.ones(3, device="cuda:0")
    awaited, _ = one_rank_group.swap({0: given}, {0: given.shape}, given.dtype)
    one_rank_group.disconnect()
    one_rank_group.disconnect()
    with pytest.raises(GroupError, match="GPUs of ranks 0 have been broken off"):
        awaited[0].wait(SOON)
    with pytest.raises(GroupError):
        one_rank_group.swap({0: given}, {0: given.shape}, given.dtype)[0][0].wait(SOON)
    torch.cuda.synchronize()


@pytest.mark.parametrize("mode", ["sync", "displaced"])
def test_two_gpus_equal_one_also_after_losing_one(mode: Any, cuda: str) -> None:
    if torch.cuda.device_count() < 2 or not dist.is_nccl_available():
        pytest.skip("it needs two GPUs, and NCCL")
    found = {}
    for backend in ("nccl", "gloo"):
        parallel = ParallelOptions("2", mode=mode, cfg_split="off", backend=cast(Any, backend))
        with closing(
            load_model("emoji-xl", f"{cuda}:0", "float32", EngineOptions("parallel", parallel=parallel))
        ) as xl:
            found[backend] = denoised(xl, mixed())
            wanted = alone(xl, mixed())
            if mode == "sync":
                group = cast(ParallelStepper, xl.stepper).group
                assert isinstance(group, ProcessRanks)
                group.processes[1].kill()
                assert relative_error(denoised(xl, mixed()), wanted) <= EXACT
                assert not group.processes
                assert relative_error(found[backend], wanted) <= EXACT
    assert all(torch.equal(one, other) for one, other in zip(*found.values(), strict=True))
