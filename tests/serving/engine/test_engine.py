"""The engine: stages, failures, drops, Ctrl-C and threads. `test_exact.py` checks the images."""

import os
import signal
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.core.prepared import PreparedRequest
from patchedserve.serving.engine.collectors import InMemory
from patchedserve.serving.engine.engine import Engine
from patchedserve.serving.engine.stages import StageThread
from patchedserve.serving.engine.watch import Watch
from patchedserve.serving.models.build import build_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.plain.stepper import group_by_shape
from patchedserve.serving.scheduling.policies import Decision, get_policy

from ...support.engine_runs import LARGE, SMALL, requests_of, serve
from ...support.function_policy import FunctionPolicy
from ...support.plain import plain_latents
from ...support.tiny_models import largest_error, tiny_sd3, tiny_sdxl


@pytest.mark.slow
def test_record_times_are_in_order(model: ServedModel, tmp_path: Path) -> None:
    finished: list[int] = []
    result = serve(
        model,
        requests_of(4),
        image_path=lambda request: tmp_path / "images" / f"{request.request_id}.png",
        on_finish=lambda record: finished.append(record.request_id),
    )
    assert sorted(finished) == [0, 1, 2, 3]
    assert not result.was_interrupted
    for record in result.records:
        assert record.status == "completed"
        times = (
            record.arrival_s,
            record.prepare_start_s,
            record.prepare_end_s,
            record.admitted_s,
            record.denoise_end_s,
            record.finish_s,
        )
        assert all(time_s is not None for time_s in times)
        assert list(times) == sorted(times)  # type: ignore[type-var]
        assert record.image_path is not None
        assert Image.open(record.image_path).size == record.resolution
    assert result.duration_s == max(record.finish_s or 0 for record in result.records)
    assert [file.name for file in sorted((tmp_path / "images").iterdir())] == ["0.png", "1.png", "2.png", "3.png"]


def test_steps_count_every_request_step(model: ServedModel) -> None:
    requests = [Request(0, "a", SMALL, 5), Request(1, "b", LARGE, 2), Request(2, "c", SMALL, 3)]
    result = serve(model, requests)
    assert [row.step for row in result.steps] == list(range(len(result.steps)))
    assert sum(row.active for row in result.steps) == 5 + 2 + 3
    assert sum(row.resolutions.get("32x32", 0) for row in result.steps) == 5 + 3
    assert sum(row.resolutions.get("64x32", 0) for row in result.steps) == 2
    assert all(after.start_s >= row.start_s + row.duration_s for row, after in pairwise(result.steps))


def test_requests_can_be_submitted_during_a_run(model: ServedModel) -> None:
    engine = Engine(model, get_policy("continuous"))
    engine.submit(Request(0, "first", SMALL, 3))

    def submit_later() -> None:
        time.sleep(0.3)
        engine.submit(Request(1, "second", SMALL, 3, arrival_s=0.3))
        engine.close()

    thread = threading.Thread(target=submit_later)
    thread.start()
    cpu_before = time.thread_time()
    result = engine.run()
    thread.join()
    assert [record.status for record in result.records] == ["completed", "completed"]
    idle_s = (result.records[1].prepare_start_s or 0) - (result.records[0].finish_s or 0)
    # The loop sleeps while it has nothing to do, so it must not have used the CPU all the time.
    assert time.thread_time() - cpu_before < result.duration_s - idle_s / 2


def _fail_to_step(*_: Any, **__: Any) -> None:
    raise IndexError("step failed")


class _FailingModel(ServedModel):
    """The real model, except that requests fail in the stage that their prompt names."""

    def prepare(self, request: Request) -> PreparedRequest:
        if request.prompt == "fail in prepare":
            raise RuntimeError("no words for it\nsecond line")
        prepared = super().prepare(request)
        if request.prompt == "not finite":
            prepared.latents = prepared.latents * float("nan")
        if request.prompt == "fail in forward":
            prepared.conditioning["text"] = prepared.conditioning["text"][..., :5]
        if request.prompt == "fail in step":
            prepared.state.scheduler.step = _fail_to_step  # the request's own copy
            prepared.state.coefficients = None  # there are none for a scheduler that the batched sampler does not know
        return prepared

    def decode(self, latents: torch.Tensor) -> Any:
        if latents.shape[-1] == 12:
            raise RuntimeError("decode failed")
        return super().decode(latents)


@pytest.mark.parametrize("engine", ["patched", "plain"])
def test_failing_request_fails_alone(pipe: Any, engine: Any) -> None:
    good = [Request(i, f"good {i}", SMALL, 4, seed=i) for i in range(2)]
    bad = {
        10: ("fail in prepare", SMALL, "preparing: RuntimeError: no words for it"),
        11: ("not finite", SMALL, "denoising: latents are not finite"),
        12: ("fail in forward", SMALL, "denoising: RuntimeError: "),
        14: ("decode", Resolution(96, 32), "postprocessing: RuntimeError: decode failed"),
    }
    if engine == "plain":  # only the plain engine advances a single request, if its scheduler requires it
        bad[13] = ("fail in step", SMALL, "denoising: IndexError: step failed")
    requests = [*good, *(Request(i, prompt, size, 3) for i, (prompt, size, _) in bad.items())]
    made = build_model(pipe, name="tiny", options=EngineOptions(engine=engine))
    about: dict[str, Any] = {name: getattr(made, name) for name in ("name", "fingerprint", "defaults", "options")}
    failing = _FailingModel(pipe, made.family, made.stepper, **about)
    result = serve(failing, requests, collector=InMemory(keep_latents=True))
    assert sorted(result.latents) == [0, 1]
    found = [result.latents[request.request_id][0] for request in good]
    assert largest_error(found, [plain_latents(pipe, request) for request in good]) < 1e-3
    for record in result.records:
        if record.request_id in bad:
            assert record.status == "failed"
            assert (record.reason or "").startswith(bad[record.request_id][2])
            assert "\n" not in (record.reason or "")
        else:
            assert record.status == "completed"


def test_unsavable_image_fails_alone(model: ServedModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    folders = {0: tmp_path / "file" / "0.png", 1: tmp_path / "1.png"}
    result = serve(model, requests_of(2), image_path=lambda request: folders[request.request_id])
    assert [record.status for record in result.records] == ["failed", "completed"]
    assert result.records[0].image_path is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.png", "file"]


def test_policy_error_ends_the_run(model: ServedModel) -> None:
    faulty = FunctionPolicy(lambda now_s, waiting, active: Decision(admit=(99,)))
    with pytest.raises(RuntimeError, match="99"):
        serve(model, requests_of(2), faulty)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("psctl-")]


def test_model_that_prepares_nothing_ends_the_run(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []

    def step(batch: Sequence[PreparedRequest]) -> dict[int, str]:
        steps.append(len(batch))
        if len(steps) == 10:
            raise RuntimeError("the engine takes steps of nothing for ever")
        return {}

    monkeypatch.setattr(model, "prepare", lambda request: None)
    monkeypatch.setattr(model.stepper, "step", step)
    with pytest.raises(AssertionError, match="the model has prepared nothing"):
        serve(model, requests_of(1))
    assert steps == []


def test_callback_error_does_not_end_the_run(model: ServedModel, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(*given: Any) -> None:
        raise ZeroDivisionError("callback")

    engine = Engine(model, get_policy("continuous"), on_finish=fail, on_step=fail)
    for request in requests_of(3):
        engine.submit(request, watch=Watch(num_partials=1, on_step=fail, on_partial=fail))
    engine.close()
    result = engine.run()
    assert [record.status for record in result.records] == ["completed"] * 3
    # One call per engine step and per end; the watches of three requests receive 3 steps and a partial image each.
    assert engine.callback_failures.count == len(result.steps) + 3 + 3 * (3 + 1)
    assert engine.callback_failures.first == "callback: ZeroDivisionError: callback"
    assert capfd.readouterr().err.count("Traceback") == 1


def test_interrupt_keeps_finished_requests(model: ServedModel, tmp_path: Path) -> None:
    # Ctrl-C while the second request denoises: the first has its image, the second and third are cancelled.
    engine = Engine(
        model,
        get_policy("fcfs"),
        image_path=lambda request: tmp_path / f"{request.request_id}.png",
        on_finish=lambda record: os.kill(os.getpid(), signal.SIGINT) if record.request_id == 0 else None,
    )
    for request in (Request(0, "a", SMALL, 2), Request(1, "b", SMALL, 900), Request(2, "c", SMALL, 2)):
        engine.submit(request)
    engine.close()
    result = engine.run()
    assert result.was_interrupted
    assert [record.status for record in result.records] == ["completed", "cancelled", "cancelled"]
    assert [path.name for path in tmp_path.iterdir()] == ["0.png"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("psctl-")]


@pytest.mark.slow
def test_stage_threads_do_not_change_the_thread_count_of_the_caller(model: ServedModel) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        serve(model, requests_of(2))
        inherited: list[int] = []
        thread = threading.Thread(target=lambda: inherited.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert torch.get_num_threads() == 2
        assert inherited == [2]
    finally:
        torch.set_num_threads(before)


def test_stages_use_one_thread(model: ServedModel) -> None:
    """Stages use one thread: a second OpenMP team would put the denoise loop's threads to sleep at every barrier."""
    before, seen = torch.get_num_threads(), []

    def work(side: int) -> None:
        # A thread's first operator that can run in parallel sets its number of threads to the process's.
        seen.append((int(torch.ones(side, side).add_(1).sum()), torch.get_num_threads()))

    torch.set_num_threads(2)
    try:
        stage = StageThread("psctl-test", work, device=model.device)
        stage.start()
        for side in (8, 2048):
            stage.put(side)
        stage.finish()
    finally:
        torch.set_num_threads(before)
    assert stage.error is None
    assert seen == [(2 * 64, 1), (2 * 2048**2, 1)]


@pytest.mark.parametrize(("engine", "expected"), [("plain", [6, 4]), ("patched", [])])
def test_forward_passes_of_the_plain_model(
    pipe: Any, engine: Any, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model(pipe, name="tiny", options=EngineOptions(engine=engine))
    prepared = [model.prepare(request) for request in requests_of(5)]
    assert [len(group) for group in group_by_shape(prepared)] == [3, 2]
    rows: list[int] = []
    forward = type(pipe.unet).forward

    def counting(unet: Any, sample: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        if unet is model.denoiser:
            rows.append(len(sample))
        return forward(unet, sample, *rest, **named)

    monkeypatch.setattr(type(pipe.unet), "forward", counting)
    assert model.stepper.step(prepared) == {}
    assert rows == expected  # guided requests have two rows; the patch engine runs its own copy of the model, once


def test_invalid_use_is_refused(model: ServedModel) -> None:
    with pytest.raises(UsageError, match="max batch size is 0"):
        Engine(model, get_policy("fcfs"), max_batch_size=0)
    engine = Engine(model, get_policy("fcfs"))
    engine.submit(Request(0, "a", SMALL, 1))
    with pytest.raises(UsageError, match="used twice"):
        engine.submit(Request(0, "b", SMALL, 1))
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(Request(1, "c", SMALL, 1))
    engine.run()
    with pytest.raises(RuntimeError, match="runs once"):
        engine.start()


@pytest.mark.slow
def test_unsupported_requests_are_refused(model: ServedModel) -> None:
    sd3 = build_model(tiny_sd3(), name="tiny-3")
    with pytest.raises(UsageError, match=r"40x32: .*multiples of 16 pixels"):
        sd3.check_request(Request(0, "a", Resolution(40, 32), 2))
    with pytest.raises(UsageError, match=r"208x32: .*at most 192 pixels"):
        sd3.check_request(Request(0, "a", Resolution(208, 32), 2))
    model.check_request(Request(0, "a", Resolution(40, 32), 2))
    from diffusers import DDIMScheduler

    pipe = tiny_sdxl()
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config)
    with pytest.raises(UsageError, match="DDIMScheduler cannot take 1001 steps"):
        build_model(pipe, name="ddim").check_request(Request(0, "a", SMALL, 1001))
