"""Ranks as processes: the same bits as virtual ranks, and no processes left behind at the end."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from patchedserve.data.errors import RunError, UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.parts import load_rank
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.parallel.group import Message, RankError
from patchedserve.serving.parallel.launch import ProcessRanks
from patchedserve.serving.parallel.options import Mode, NormMode, NormOptions, ParallelOptions
from patchedserve.serving.parallel.ranks import Ranks
from patchedserve.serving.parallel.recovery import call_with_recovery
from patchedserve.serving.parallel.stepper import ParallelStepper
from patchedserve.serving.parallel.strip_model import flat
from patchedserve.serving.parallel.virtual import VirtualRanks
from patchedserve.serving.parallel.worker import RankModels, RankSettings

from ...conftest import RunPsctl
from ...support.patched_models import Row, draw_rows, run_plain, stack_conditions
from ...support.sockets import listening
from ...support.tiny_families import tiny_flux
from ...support.tiny_models import save_tiny, tiny_sd3, tiny_sdxl
from ...support.virtual_ranks import relative
from ...support.waits import is_alive, kill_parent

pytestmark = pytest.mark.slow
MODELS = {"sdxl": tiny_sdxl, "sd3": tiny_sd3, "flux": tiny_flux}


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model", MODELS[request.param]())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rank_models(folder: Path) -> RankModels:
    return load_rank(RankSettings(0, str(folder), "cpu", "float32", 1, 60.0))


def process_ranks(folder: Path, ranks: str, **more: Any) -> ProcessRanks:
    models = rank_models(folder)
    return ProcessRanks(models.denoiser, models.fingerprint, str(folder), ParallelOptions(ranks, **more))


def predict_together(group: VirtualRanks | ProcessRanks, rows: list[Row], call: int = 0) -> Tensor:
    """Return the ranks' predictions for guided requests; the call is repeated if a rank is lost."""
    names = [(index // 2, index % 2) for index in range(len(rows))]
    latents = (1 + call) * torch.stack([row.latents for row in rows])
    timesteps = torch.tensor([row.timestep for row in rows])

    def ask(ranks: Ranks) -> Tensor:
        ranks.learn(names, flat(stack_conditions(rows)))
        return ranks.predict(names, latents, timesteps)

    with group.end, torch.inference_mode():
        return call_with_recovery(group, ask)


def draw_together(group: VirtualRanks | ProcessRanks, rows: list[Row]) -> list[Tensor]:
    """Return the predictions of ranks that draw each row whole; the first image is lower than the others."""
    names = [(index // 2, index % 2) for index in range(len(rows))]
    images = [rows[0].latents[:, : rows[0].latents.shape[1] // 4 * 2], *(row.latents for row in rows[1:])]
    timesteps = torch.tensor([row.timestep for row in rows])

    def ask(ranks: Ranks) -> list[Tensor]:
        ranks.learn(names, flat(stack_conditions(rows)))
        return ranks.draw(names, images, timesteps)

    with group.end, torch.inference_mode():
        return call_with_recovery(group, ask)


def pid_of(group: ProcessRanks, rank: int) -> int:
    process = group.processes[rank]
    assert isinstance(process, BaseProcess)
    return process.pid or 0


DISPLACED: dict[str, Any] = {"mode": "displaced", "warmup": 0, "cfg_split": "off"}
WAYS: list[dict[str, Any]] = [
    {},
    {"cfg_split": "off", "text": "split"},
    {"mode": "naive"},
    *(DISPLACED | {"norms": NormOptions(mode)} for mode in get_args(NormMode)),
]


@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_ranks_of_one_machine_listen_on_loopback_only(backend: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", tiny_sd3())
    before = listening(os.getpid())
    with closing(process_ranks(folder, "2", backend=backend)) as group:
        own, other = listening(os.getpid()), listening(pid_of(group, 1))
    found = [socket for inode, socket in own.items() if inode not in before]
    assert found, "the store, where ranks meet"
    assert all(address.is_loopback for address, _ in [*found, *other.values()]), (found, other)


@pytest.mark.exhaustive
def test_processes_are_bit_equal_to_virtual_ranks(folder: Path) -> None:
    """This holds in every mode and GroupNorm mode: four ranks with uneven shares, then three and two after losses."""
    model = rank_models(folder).denoiser
    size = (34, 20) if hasattr(model, "conv_in") else (22, 12)
    rows = draw_rows(model, [size, size], num_each=2)
    with closing(process_ranks(folder, "4")) as group:
        processes = [pid_of(group, rank) for rank in group.processes]
        for count, shares in ((4, "1,3,2,1"), (3, None), (2, None)):
            while len(group.processes) >= count:
                group.processes[len(group.processes)].kill()
                predict_together(group, rows)
            for way in WAYS:
                options = ParallelOptions(str(count), shares=shares, **way)
                group.use(options)
                found = [predict_together(group, rows, call) for call in range(3)]
                with closing(VirtualRanks(model, replace(options, ranks=f"virtual:{count}"))) as virtual:
                    for call, each in enumerate(found):
                        assert torch.equal(predict_together(virtual, rows, call), each)
            found_whole = draw_together(group, rows)
            with closing(VirtualRanks(model, ParallelOptions(f"virtual:{count}", shares=shares))) as virtual:
                assert all(map(torch.equal, draw_together(virtual, rows), found_whole))
    assert not any(map(is_alive, processes))


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["sync", "displaced"])
def test_work_of_a_lost_rank_is_taken_over(tmp_path: Path, mode: str, capfd: pytest.CaptureFixture[str]) -> None:
    """One rank is killed while idle and another stops answering; the results stay those of plain diffusers."""
    folder = save_tiny(tmp_path / "model", tiny_sdxl())
    model = rank_models(folder).denoiser
    rows = draw_rows(model, [(20, 12)], num_each=2)
    wanted = torch.stack(run_plain(model, rows))
    with closing(process_ranks(folder, "3", mode=mode, warmup=0, timeout_s=2)) as ranks:
        predict_together(ranks, rows)
        # Being idle for longer than the timeout between ranks is no fault.
        time.sleep(2.5)
        predict_together(ranks, rows)
        ranks.processes[1].kill()
        # A repeated call is synchronous, whatever came before it.
        assert relative(predict_together(ranks, rows), wanted) <= 1e-5
        assert list(ranks.processes) == [2]
        os.kill(pid_of(ranks, 2), signal.SIGSTOP)
        start_s = time.monotonic()
        assert relative(predict_together(ranks, rows), wanted) <= 1e-5
        assert time.monotonic() - start_s < 15
        assert not ranks.processes
        said = capfd.readouterr().err
        assert "Warning: rank 1 has ended with code -9: " in said
        assert "Warning: rank 2 does not answer: " in said
        assert relative(predict_together(ranks, rows), wanted) <= 1e-5


def test_rank_killed_during_a_call(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", tiny_sdxl())
    model = rank_models(folder).denoiser
    rows = draw_rows(model, [(256, 128)], num_each=2)
    wanted = torch.stack(run_plain(model, rows))
    with closing(process_ranks(folder, "4")) as ranks:
        modes: list[tuple[Mode, int]] = [("sync", 1), ("displaced", 2)]
        for mode, victim in modes:
            # Four ranks, then three. With guidance and an even number of ranks, split halves would be exact.
            ranks.use(ParallelOptions("4", mode=mode, warmup=0, cfg_split="off"))
            start_s = time.monotonic()
            predict_together(ranks, rows)
            call_s = time.monotonic() - start_s
            killer = threading.Timer(call_s / 2, ranks.processes[victim].kill)
            killer.start()
            while victim in ranks.processes:
                found = predict_together(ranks, rows)
            killer.join()
            assert relative(found, wanted) <= 1e-5


def test_rank_error_is_reported_and_the_group_recovers(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", tiny_sdxl())
    model = rank_models(folder).denoiser
    rows = draw_rows(model, [(20, 12)], num_each=2)

    def ask_too_much(ranks: Ranks) -> Tensor:
        names = [(0, 0), (0, 1)]
        ranks.learn(names, flat(stack_conditions(rows)))
        # The other ranks keep one row fewer than the call names.
        ranks._broadcast(Message("keep", {"rows": names[:1]}))
        return ranks.predict(names, torch.stack([row.latents for row in rows]), torch.tensor([1.0, 1.0]))

    with closing(process_ranks(folder, "3")) as ranks, torch.inference_mode():
        wanted = predict_together(ranks, rows)
        with pytest.raises(RankError, match=r"rank 1: KeyError: \(0, 1\)"):
            call_with_recovery(ranks, ask_too_much)
        assert torch.equal(predict_together(ranks, rows), wanted)
        assert not ranks.losses


_RANK_0 = """
import sys, time
from patchedserve.serving.models.parts import load_rank
from patchedserve.serving.parallel.launch import ProcessRanks
from patchedserve.serving.parallel.options import NormMode, NormOptions, ParallelOptions
from patchedserve.serving.parallel.worker import RankSettings

models = load_rank(RankSettings(0, sys.argv[1], "cpu", "float32", 1, 60.0))
ranks = ProcessRanks(models.denoiser, models.fingerprint, sys.argv[1], ParallelOptions("3"))
print(*(process.pid for process in ranks.processes.values()), flush=True)
time.sleep(600)
"""


@pytest.mark.exhaustive
def test_no_rank_outlives_rank_0(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", tiny_sdxl())
    assert len(kill_parent(_RANK_0, str(folder))) == 2


def test_differing_settings_are_named(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", tiny_sdxl())
    models = rank_models(folder)
    with pytest.raises(UsageError, match=r"rank 1 has model \w+, but rank 0 has another"):
        ProcessRanks(models.denoiser, "another", str(folder), ParallelOptions("2"))
    other = rank_models(save_tiny(tmp_path / "other", tiny_sd3())).denoiser
    with pytest.raises(UsageError, match="rank 1 has class UNet2DConditionModel, but rank 0 has SD3Transformer2DModel"):
        ProcessRanks(other, models.fingerprint, str(folder), ParallelOptions("2"))


def test_rank_that_does_not_start_is_reported(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", tiny_sdxl())
    models = rank_models(folder)
    with pytest.raises(RunError, match=r"rank 1: .*model_index\.json"):
        ProcessRanks(models.denoiser, models.fingerprint, str(tmp_path / "nowhere"), ParallelOptions("2"))


def test_images_are_decoded_by_the_remaining_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = str(save_tiny(tmp_path / "model", tiny_sdxl()))
    request = Request(0, "a hat", Resolution(48, 64), 2, guidance_scale=3.0)
    parallel = ParallelOptions("3", decode="strips", may_use_fewer=True)
    with closing(load_model(folder, "cpu", "float32", EngineOptions("parallel", parallel=parallel))) as model:
        group = cast(ParallelStepper, model.stepper).group
        assert isinstance(group, ProcessRanks)
        latents = model.prepare(request).latents
        with torch.inference_mode():
            wanted = model.pipe.vae.decode(latents, return_dict=False)[0]
        assert group.decoder is not None
        for _ in range(2):
            assert relative(group.decoder(latents), wanted) <= 1e-5
        assert "Warning" not in capfd.readouterr().err
        group.processes[2].kill()
        assert relative(group.decoder(latents), wanted) <= 1e-5
        # The next step notices the loss as well, and the remaining two decode together again.
        assert group.decoder._end is None
        assert model.stepper.step([model.prepare(request)]) == {}
        assert list(group.processes) == [1]
        assert group.decoder._end is not None
        assert relative(group.decoder(latents), wanted) <= 1e-5
        assert group.decoder._end is not None
        assert "Warning: images are decoded by rank 0 until the ranks meet again: rank" in capfd.readouterr().err


@pytest.mark.exhaustive
def test_ranks_of_torchrun(run_psctl: RunPsctl, tmp_path: Path) -> None:
    """All ranks run the same command: it writes each image once, over gloo as between machines, and exits cleanly."""
    folder = save_tiny(tmp_path / "model", tiny_sdxl(), num_inference_steps=2, guidance_scale=3.0)
    psctl = str(Path(sys.executable).with_name("psctl"))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", psctl]
    drawing = ["generate", "a hat", "-r", "64", "--model", str(folder), "--dtype", "float32", "--overwrite"]
    ranks = ["--parallel", "2", "--parallel-backend", "gloo", "-o", "two.png"]
    done = subprocess.run([*command, *drawing, *ranks], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("two.png") == 1
    alone = run_psctl(*drawing, "--parallel", "virtual:2", "-o", "one.png")
    assert alone.returncode == 0, alone.stderr
    assert (tmp_path / "two.png").read_bytes() == (tmp_path / "one.png").read_bytes()


def test_number_of_ranks_is_that_of_torchrun(run_psctl: RunPsctl, tmp_path: Path) -> None:
    """The process has the environment of torchrun's rank 0."""
    folder = save_tiny(tmp_path / "model", tiny_sdxl(), num_inference_steps=2, guidance_scale=3.0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"TORCHELASTIC_RUN_ID": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    numbers = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    wrong = run_psctl("generate", "a hat", "-r", "64", "--model", folder, "--parallel", "3", **place, **numbers)
    assert wrong.returncode == 2
    assert "torchrun has started 2 processes, but --parallel is 3" in wrong.stderr.splitlines()[-1]


_ENDS = """
import os, sys, time
from datetime import timedelta
import torch.distributed as dist
from patchedserve.serving.parallel import worker

worker._LOOK_EVERY_S = 0.0  # it is nearly always within a call of torch
port = int(sys.argv[1])
for _ in range(3):
    child = os.fork()
    if not child:
        store = lambda: dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        watch = worker._Watch(lambda: True, store)
        watch.follow(0, [])
        time.sleep(0.05)
        watch.end()
        sys.exit()
    # Flushed, or the next child would print what its buffer has inherited.
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.exhaustive
def test_rank_ends_cleanly_during_a_watch_check() -> None:
    """Its process belongs to torchrun and ends like any Python process, which kills threads wherever they are."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    done = subprocess.run([sys.executable, "-c", _ENDS, str(store.port)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0"] * 3, done.stderr
