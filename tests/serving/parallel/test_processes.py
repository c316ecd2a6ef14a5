"""Ranks as processes: the same bits as virtual ranks, and an end that leaves nothing behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from patchedserve.data.errors import RunError, UsageError
from patchedserve.serving.models.loading import load_denoiser
from patchedserve.serving.models.rank import command_of
from patchedserve.serving.parallel.group import GroupError
from patchedserve.serving.parallel.launch import ProcessRanks
from patchedserve.serving.parallel.options import ParallelOptions
from patchedserve.serving.parallel.strip_model import flat
from patchedserve.serving.parallel.virtual import VirtualRanks
from patchedserve.serving.parallel.worker import RankSettings

from ...support.http_server import until
from ...support.patched_models import Row, draw_rows, stack_conditions
from ...support.tiny_models import save_tiny, tiny_sd3, tiny_sdxl

pytestmark = pytest.mark.slow
MODELS = {"sdxl": tiny_sdxl, "sd3": tiny_sd3}


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model", MODELS[request.param]())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def settings_of(folder: Path, size: int) -> tuple[RankSettings, Any]:
    fingerprint, model = load_denoiser(str(folder), "cpu", "float32")
    return RankSettings(0, 0, size, str(folder), fingerprint, "cpu", "float32", 1, 60.0, 0), model


def predict(ranks: VirtualRanks | ProcessRanks, rows: list[Row], call: int = 0) -> Tensor:
    names = [(index // 2, index % 2) for index in range(len(rows))]
    with ranks.end, torch.inference_mode():
        ranks.ranks.learn(names, flat(stack_conditions(rows)))
        latents, timesteps = (
            (1 + call) * torch.stack([row.latents for row in rows]),
            torch.tensor([row.timestep for row in rows]),
        )
        return ranks.ranks.predict(names, latents, timesteps)


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("size", "more"),
    [(2, {"splits_guidance": True}), (2, {"mode": "displaced", "warmup": 0}), (3, {"shares": (2, 1, 1)})],
)
def test_processes_give_the_bits_of_virtual_ranks(folder: Path, size: int, more: dict[str, Any]) -> None:
    settings, model = settings_of(folder, size)
    rows = draw_rows(model, [(20, 12), (20, 12)], num_each=2)
    with closing(VirtualRanks(model, size, ParallelOptions(**more))) as virtual:
        wanted = [predict(virtual, rows, call) for call in range(3)]
    with closing(ProcessRanks(model, command_of, settings, ParallelOptions(**more))) as ranks:
        assert all(torch.equal(predict(ranks, rows, call), each) for call, each in enumerate(wanted))
        processes = [process.pid for process in ranks.processes]
    assert not any(map(is_alive, processes))


def test_a_rank_that_is_killed_ends_the_call(tmp_path: Path) -> None:
    settings, model = settings_of(save_tiny(tmp_path / "model", tiny_sdxl()), 3)
    rows = draw_rows(model, [(20, 12)], num_each=2)
    with closing(ProcessRanks(model, command_of, settings, ParallelOptions())) as ranks:
        predict(ranks, rows)
        ranks.processes[1].send_signal(signal.SIGKILL)
        ranks.processes[1].wait()
        with pytest.raises(GroupError, match="rank"):
            predict(ranks, rows)


_RANK_0 = """
import sys, time
from patchedserve.serving.models.loading import load_denoiser
from patchedserve.serving.models.rank import command_of
from patchedserve.serving.parallel.launch import ProcessRanks
from patchedserve.serving.parallel.options import ParallelOptions
from patchedserve.serving.parallel.worker import RankSettings

fingerprint, model = load_denoiser(sys.argv[1], "cpu", "float32")
settings = RankSettings(0, 0, 3, sys.argv[1], fingerprint, "cpu", "float32", 1, 60.0, 0)
ranks = ProcessRanks(model, command_of, settings, ParallelOptions())
print(*(process.pid for process in ranks.processes), flush=True)
time.sleep(600)
"""


def test_no_rank_outlives_rank_0(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", tiny_sdxl())
    with subprocess.Popen([sys.executable, "-c", _RANK_0, str(folder)], stdout=subprocess.PIPE, text=True) as rank_0:
        assert rank_0.stdout is not None
        others = [int(number) for number in rank_0.stdout.readline().split()]
        assert len(others) == 2
        assert all(map(is_alive, others))
        rank_0.kill()
    until(lambda: not any(map(is_alive, others)), timeout_s=5)


def test_what_differs_is_named(tmp_path: Path) -> None:
    settings, model = settings_of(save_tiny(tmp_path / "model", tiny_sdxl()), 2)
    with pytest.raises(UsageError, match=r"rank 1 has model \w+, but rank 0 has another"):
        ProcessRanks(model, command_of, replace(settings, fingerprint="another"), ParallelOptions())
    with pytest.raises(UsageError, match="rank 1 has dtype bfloat16, but rank 0 has float32"):
        ProcessRanks(model, command_of, replace(settings, dtype="bfloat16"), ParallelOptions())


def test_a_rank_that_does_not_come_up_is_told(tmp_path: Path) -> None:
    settings, model = settings_of(save_tiny(tmp_path / "model", tiny_sdxl()), 2)
    with pytest.raises(RunError, match=r"rank 1: .*model_index\.json"):
        ProcessRanks(model, command_of, replace(settings, model=str(tmp_path / "nowhere")), ParallelOptions())
