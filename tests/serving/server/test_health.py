"""Probes of an engine that is stalled, fails every request, or restarts."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from patchedserve.data.requests import Request
from patchedserve.serving.core.failures import MAX_FAILURES
from patchedserve.serving.core.retries import MAX_RESTARTS
from patchedserve.serving.engine import stages
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.models.stage_process import Part
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.scheduling.systems import get_system
from patchedserve.serving.server import local
from patchedserve.serving.server.backend import Health
from patchedserve.serving.server.batches.file import BatchOutput
from patchedserve.serving.server.errors import ApiError
from patchedserve.serving.server.local import LocalBackend, LocalSetup

from ...support.http_server import READY
from ...support.local_backends import (
    EndFollower,
    answers,
    fail_stage,
    pause_engine,
    probes,
    request,
    run,
    status_of,
)


@pytest.mark.parametrize("stage", ["preparing", "denoising", "postprocessing"])
def test_engine_with_an_always_failing_model_accepts_no_requests(
    stage: str,
    model: ServedModel,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def work(backend: LocalBackend) -> None:
        told: list[str] = []
        backend.on_stopped = told.append
        fail_stage(monkeypatch, model, stage, lambda: True)
        statuses = [await status_of(backend, number) for number in range(MAX_FAILURES)]
        assert statuses == ["failed"] * MAX_FAILURES
        while backend.health is Health.READY:
            await asyncio.sleep(0.01)
        # From here on no client receives an error of the model, not even from the engines that are tried in its place.
        while not told:
            with pytest.raises(ApiError) as refused:
                await backend.submit(request(100), EndFollower())
            assert (refused.value.status, refused.value.code) == (503, "not_ready")
            await asyncio.sleep(0.001)  # without a pause, the engine's thread would hardly run
        assert f"has crashed {MAX_RESTARTS + 1} times" in told[0]
        assert "CUDA error" in told[0]
        assert await probes(backend, tmp_path) == {"/livez": 200, "/readyz": 503, "/health": 503}
        assert "CUDA error" in backend.trouble

    run(work, model)
    said = capsys.readouterr().err
    assert said.count("The engine has stopped: 8 tries in a row have failed") == 1
    assert stage in said


@pytest.mark.product(most=1)
@pytest.mark.parametrize("engine", ["patched", "plain"])
def test_too_large_batches_are_reported(
    engine: Literal["patched", "plain"], folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = load_model(folder, "cpu", "float32", EngineOptions(engine=engine))

    async def work(backend: LocalBackend) -> None:
        has_failed = False

        def fails() -> bool:
            nonlocal has_failed
            is_first = not has_failed and backend.load.num_running > 1
            has_failed = has_failed or is_first
            return is_first

        fail_stage(monkeypatch, model, "denoising", fails)
        endings = [EndFollower(), EndFollower()]
        for number, ending in enumerate(endings):
            await backend.submit(request(number, 100), ending)
        assert [(await ending.ended)[0].status for ending in endings] == ["completed"] * 2
        assert has_failed
        assert await probes(backend, tmp_path) == {"/livez": 200, "/readyz": 200, "/health": 200}
        assert backend.trouble.startswith("steps of batches fail and are repeated in halves: 1 so far, the first by")
        assert "illegal memory access" in backend.trouble
        monkeypatch.setattr(local, "FAILURES_REPORTED_S", 0.0)
        assert backend.trouble == ""

    run(work, model)


def test_probes_give_the_reason_during_an_engine_restart(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def work(backend: LocalBackend) -> None:
        goes_on = threading.Event()
        prove = LocalBackend._prove

        async def waiting_prove(self: LocalBackend, engine: Any) -> None:
            await asyncio.to_thread(goes_on.wait, 30)
            await prove(self, engine)

        monkeypatch.setattr(LocalBackend, "_prove", waiting_prove)
        is_broken = True
        fail_stage(monkeypatch, model, "denoising", lambda: is_broken)
        for number in range(MAX_FAILURES):
            assert await status_of(backend, number) == "failed"
        while backend.health is Health.READY:
            await asyncio.sleep(0.01)
        is_broken = False
        found = await answers(backend, tmp_path)
        for path in ("/readyz", "/health"):
            assert found[path].status_code == 503
            assert found[path].json()["status"] == "restarting"
            assert "tries in a row have failed" in found[path].json()["reason"]
        goes_on.set()
        while backend.health is not Health.READY:
            await asyncio.sleep(0.01)
        assert await status_of(backend, 50) == "completed"
        assert backend.trouble == ""

    run(work, model)


def test_individual_request_failures_do_not_end_the_service(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_poison = False

    async def work(backend: LocalBackend) -> None:
        nonlocal is_poison
        told: list[str] = []
        backend.on_stopped = told.append
        fail_stage(monkeypatch, model, "denoising", lambda: is_poison)
        # A request that completes in between resets the count.
        for number in range(2 * MAX_FAILURES + 1):
            is_poison = number % MAX_FAILURES != 0
            assert await status_of(backend, number) == ("failed" if is_poison else "completed")
        assert not backend._restarts.ended_s
        # The next engine serves again, whatever failed before, without a limit on such restarts.
        for round_number in range(MAX_RESTARTS + 2):
            is_poison = True
            for number in range(MAX_FAILURES):
                assert await status_of(backend, number) == "failed"
                is_poison = number < MAX_FAILURES - 1
            while await status_of(backend, 100 + round_number) != "completed":
                await asyncio.sleep(0.01)
        assert not told

    run(work, model)


def test_loading_model_is_alive_but_not_ready(model: ServedModel, tmp_path: Path) -> None:
    async def whole() -> None:
        backend = LocalBackend(LocalSetup(model, get_system("patched-fcfs")))
        assert await probes(backend, tmp_path) == {"/livez": 200, "/readyz": 503, "/health": 200}
        await backend.start()
        assert await probes(backend, tmp_path) == {"/livez": 200, "/readyz": 200, "/health": 200}
        await backend.stop()

    asyncio.run(whole())


def test_stall_is_reported(model: ServedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    is_held, goes_on = pause_engine(monkeypatch)

    async def work(backend: LocalBackend) -> None:
        ending = EndFollower()
        await backend.submit(request(0), ending)
        await asyncio.to_thread(is_held.wait, 30)
        assert backend.health is Health.READY
        assert backend._engine is not None
        backend._engine._progress_s -= 1000
        assert backend.health is Health.STALLED
        assert await probes(backend, tmp_path) == {"/livez": 200, "/readyz": 503, "/health": 503}
        goes_on.set()
        assert (await ending.ended)[0].status == "completed"
        assert backend.health is Health.READY

    run(work, model)


def test_engine_is_given_up_after_a_long_stall(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    is_held, goes_on = pause_engine(monkeypatch)
    monkeypatch.setattr(local, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(local, "HUNG_AFTER_S", 0.1)

    async def work(backend: LocalBackend) -> None:
        told: list[str] = []
        backend.on_stopped = told.append
        ending = EndFollower()
        await backend.submit(request(0), ending)
        await asyncio.to_thread(is_held.wait, 30)
        await asyncio.sleep(0.3)
        assert not told, "a step that takes its time is no stall"
        assert backend._engine is not None
        backend._engine._progress_s -= 1000
        while not told:
            await asyncio.sleep(0.01)
        assert "has made no progress" in told[0]
        assert backend.health is Health.STALLED
        goes_on.set()
        await ending.ended

    run(work, model)


HANGS_ON_ONE_PROMPT = """
import sys, threading
from patchedserve.psctl.app import main
from patchedserve.serving.engine import stages
from patchedserve.serving.patched.stepper import PatchedStepper
from patchedserve.serving.server import local

stages.STALLED_S, local.HUNG_AFTER_S = 1.0, 3.0
take_step = PatchedStepper.step

def step(stepper, active):
    if any(prepared.request.prompt == "hang" for prepared in active):
        threading.Event().wait()
    return take_step(stepper, active)

PatchedStepper.step = step
sys.exit(main(sys.argv[1:]))
"""
RUNS = "import sys; from patchedserve.psctl.app import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_server_ends_after_a_long_stall(folder: str, tmp_path: Path) -> None:
    options = ["--model", folder, "--workspace", str(tmp_path), "--dtype", "float32", "--system", "patched-fcfs"]
    options += ["--slo", "600"]  # nothing is measured
    server = subprocess.Popen(
        [sys.executable, "-c", HANGS_ON_ONE_PROMPT, "serve", "--http", "--port", "0", *options],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert server.stderr is not None
        ready = next(found for line in server.stderr if (found := READY.search(line)))
        with pytest.raises(httpx.HTTPError):
            httpx.post(f"{ready[1]}/v1/images/generations", json={"prompt": "hang", "size": "64x64"}, timeout=120)
        assert server.wait(60) == 1
        assert "Error: the engine has made no progress for 0.05 min; open requests are lost" in server.stderr.read()
    finally:
        server.kill()
        server.communicate()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_batch_ends_after_a_long_stall_and_goes_on(folder: str, tmp_path: Path) -> None:
    """The line that was drawn before is kept."""
    lines = tmp_path / "lines.jsonl"
    bodies = [{"prompt": prompt, "size": "64x64"} for prompt in ("a cat", "hang")]
    lines.write_text("".join(json.dumps({"custom_id": each["prompt"], "body": each}) + "\n" for each in bodies))
    drawn = tmp_path / "drawn"
    options = ("--model", folder, "--dtype", "float32", "--output-dir", str(drawn), "--max-batch-size", "1")
    command = ["batch", "run", str(lines), *options, "--workspace", str(tmp_path / "workspace")]
    hung = subprocess.run(
        [sys.executable, "-c", HANGS_ON_ONE_PROMPT, *command], capture_output=True, text=True, timeout=120, check=False
    )
    assert hung.returncode == 1
    assert hung.stderr.splitlines()[-1] == (
        "Error: the engine has made no progress for 0.05 min; the same command goes on where it was"
    )
    with closing(BatchOutput(drawn)) as output:
        assert output.done == {"a cat": True}
    again = subprocess.run(
        [sys.executable, "-c", RUNS, *command], capture_output=True, text=True, timeout=120, check=False
    )
    assert again.returncode == 0, again.stderr
    with closing(BatchOutput(drawn)) as output:
        assert output.done == {"a cat": True, "hang": True}


@pytest.mark.parametrize("part", ["prepare", "postprocess"])
def test_hanging_stage_is_a_stall(part: Part, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(folder, "cpu", "float32", EngineOptions(stages="processes"))
    assert model.stages is not None
    process = model.stages.of[part].process_id

    async def work(backend: LocalBackend) -> None:
        monkeypatch.setattr(stages, "STALLED_S", 0.2)
        os.kill(process, signal.SIGSTOP)
        ending = EndFollower()
        await backend.submit(request(0), ending)
        while backend.health is not Health.STALLED:
            await asyncio.sleep(0.02)
        assert not ending.ended.done()
        os.kill(process, signal.SIGCONT)
        assert (await ending.ended)[0].status == "completed"
        assert backend.health is Health.READY

    run(work, model)


def test_hanging_submission_is_a_stall(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    is_held, goes_on = threading.Event(), threading.Event()

    def wait(_: Request) -> None:
        is_held.set()
        assert goes_on.wait(30)

    async def whole() -> None:
        backend = LocalBackend(LocalSetup(model, get_system("patched-fcfs"), standalone_s=wait))
        await backend.start()
        monkeypatch.setattr(stages, "STALLED_S", 0.0)
        ending = EndFollower()
        submitting = asyncio.ensure_future(backend.submit(request(0), ending))
        await asyncio.to_thread(is_held.wait, 30)
        assert backend.health is Health.STALLED
        goes_on.set()
        await submitting
        assert (await ending.ended)[0].status == "completed"
        assert backend.health is Health.READY
        await backend.stop()

    asyncio.run(whole())


def test_idling_is_not_a_stall(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    is_held, goes_on = pause_engine(monkeypatch)

    async def work(backend: LocalBackend) -> None:
        assert backend._engine is not None
        backend._engine._progress_s -= 1000
        ending = EndFollower()
        await backend.submit(request(0, 2), ending)
        await asyncio.to_thread(is_held.wait, 30)
        assert backend.health is Health.READY
        goes_on.set()
        assert (await ending.ended)[0].status == "completed"

    run(work, model)
