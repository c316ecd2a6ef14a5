"""The engine behind the server: crashes at every stage, too many of them, a stall, and what it cannot serve."""

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

import httpx
import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.core.request_state import FINAL_STATUSES, RequestRecord, RequestState, Stage
from patchedserve.serving.engine import stages
from patchedserve.serving.engine.side_stages import MOST_FAILED, SideStages
from patchedserve.serving.models.defaults import ModelDefaults
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.models.stage_process import Part
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.scheduling.scheduler import Scheduler
from patchedserve.serving.scheduling.systems import get_system
from patchedserve.serving.server import local, tickets
from patchedserve.serving.server.app import make_app
from patchedserve.serving.server.backend import FIRST_ID, Follower, Health
from patchedserve.serving.server.batches.store import Batches
from patchedserve.serving.server.edit_processes import EditProcesses
from patchedserve.serving.server.errors import ApiError
from patchedserve.serving.server.front_end import FrontEnd, Pricing
from patchedserve.serving.server.guards import Guards, Keys
from patchedserve.serving.server.limits import Limits
from patchedserve.serving.server.live import Live
from patchedserve.serving.server.local import MAX_RESTARTS, LocalBackend, LocalSetup
from patchedserve.serving.server.metrics import Metrics
from patchedserve.serving.server.protocol import ModelFacts, parse_generation
from patchedserve.serving.server.tickets import metrics_of

from ...support.tiny_models import save_tiny, tiny_sdxl

SIZE = Resolution(32, 32)
Bomb = Callable[[Sequence[RequestState]], bool]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("model") / "tiny", tiny_sdxl(), guidance_scale=3.0))


@pytest.fixture(scope="module")
def model(folder: str) -> ServedModel:
    return load_model(folder, "cpu", "float32")


class Ending(Follower):
    """Waits for the end of a request."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[tuple[RequestRecord, Any]] = asyncio.get_running_loop().create_future()

    def on_end(self, record: RequestRecord, image: Any) -> None:
        self.ended.set_result((record, image))


class Quick:
    """Step latencies, for policies that ask."""

    def step_latency_s(self, active: Sequence[Any]) -> float:
        return 1e-3


def request(number: int, steps: int = 6, size: Resolution = SIZE) -> Request:
    return Request(FIRST_ID + number, "a cat", size, steps, 3.0, arrival_s=time.monotonic())


async def is_taken(backend: LocalBackend, asked: Request, ending: Ending) -> bool:
    """Hand a request in, unless there is no engine just now."""
    try:
        await backend.submit(asked, ending)
    except ApiError as error:
        if error.code != "not_ready":
            raise
        return False
    return True


def front_end_of(backend: LocalBackend, limits: Limits) -> FrontEnd:
    facts = ModelFacts("tiny", ModelDefaults(6, 3.0, SIZE, (SIZE,)))
    return FrontEnd(facts, limits, backend, Pricing(None, lambda _: None, lambda _: None))


async def probes(backend: LocalBackend, folder: Path) -> dict[str, int]:
    """Statuses of what a server over this backend answers to those who look after it."""
    front_end = front_end_of(backend, Limits())
    edits = EditProcesses(front_end.model, front_end.limits)
    app = make_app(front_end, Metrics((SIZE,), backend), Live(front_end), Batches(folder, front_end, 1), edits)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://psctl") as client:
        return {path: (await client.get(path)).status_code for path in ("/livez", "/readyz", "/health")}


def run(work: Callable[[LocalBackend], Coroutine[Any, Any, None]], model: ServedModel) -> None:
    async def whole() -> None:
        backend = LocalBackend(LocalSetup(model, get_system("patched-fcfs"), warm_up=[[request(0, 1)]]))
        await backend.start()
        try:
            await asyncio.wait_for(work(backend), 60)
        finally:
            await backend.stop()

    asyncio.run(whole())


def bombed(monkeypatch: pytest.MonkeyPatch, goes_off: Bomb) -> list[str]:
    """Let the engine's loop crash where `goes_off` says so of the requests that are open; returns when it did."""
    crashes: list[str] = []
    decide, serve = Scheduler.decide, SideStages.serve

    def look(scheduler: Scheduler) -> None:
        # The one step of the warm-up is left alone.
        states = [state for state in list(scheduler._open.values()) if state.num_iterations > 1]
        if states and goes_off(states):
            crashes.append(threading.current_thread().name)
            raise RuntimeError("a fault in the loop")

    def looking_decide(scheduler: Scheduler, now_s: float) -> Sequence[RequestState]:
        look(scheduler)
        return decide(scheduler, now_s)

    def looking_serve(stages: SideStages) -> None:
        look(stages._scheduler)
        serve(stages)

    monkeypatch.setattr(Scheduler, "decide", looking_decide)
    # With stages between the steps, a decision never finds a request that is decoded.
    monkeypatch.setattr(SideStages, "serve", looking_serve)
    return crashes


def once_at(stage: str) -> Bomb:
    """The first time that a request is there."""
    has_gone = False

    def goes_off(states: Sequence[RequestState]) -> bool:
        nonlocal has_gone
        if has_gone or all(state.stage != stage for state in states):
            return False
        has_gone = True
        return True

    return goes_off


# Between steps a request is prepared before the policy is asked about it, so that none joins.
@pytest.mark.parametrize(
    ("stages", "stage"),
    [
        (stages, stage)
        for stages in ("inline", "threads")
        for stage in get_args(Stage)
        if (stages, stage) != ("inline", "joining")
    ],
)
def test_after_a_crash_the_next_engine_serves(
    stages: Literal["inline", "threads"], stage: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(folder, "cpu", "float32", EngineOptions(stages=stages))
    crashes = bombed(monkeypatch, once_at(stage))

    async def work(backend: LocalBackend) -> None:
        endings = []
        for number, steps in enumerate((3, 6, 30)):
            ending = Ending()
            if await is_taken(backend, request(number, steps), ending):
                endings.append(ending)
        records = [(await ending.ended)[0] for ending in endings]
        assert len(crashes) == 1, "or the test shows nothing"
        # Each has an end: an image that was finished before, or none.
        assert {record.status for record in records} <= {"completed", "cancelled"}
        assert "cancelled" in {record.status for record in records}
        start_s = time.monotonic()
        again = Ending()
        while not await is_taken(backend, request(9), again):
            await asyncio.sleep(0.02)
        record, image = await again.ended
        assert record.status == "completed"
        assert image.size == (32, 32)
        assert time.monotonic() - start_s < 5
        assert backend.health is Health.READY

    run(work, model)


@pytest.mark.parametrize("stages", ["inline", "threads"])
def test_however_a_request_ends_its_times_make_sense(
    stages: Literal["inline", "threads"], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that fail at any stage, are cancelled at any moment, cannot be in time, or are drawn."""
    model, random = load_model(folder, "cpu", "float32", EngineOptions(stages=stages)), Random(7)
    records: list[RequestRecord] = []

    async def one(backend: LocalBackend, number: int) -> None:
        asked, ending = request(number, random.randint(1, 8)), Ending()
        if is_late := number % 4 == 0:
            asked = replace(asked, slo_s=1e-9)
        if not await is_taken(backend, asked, ending):
            return
        if not is_late and random.random() < 0.4:
            await asyncio.sleep(random.expovariate(50))
            backend.cancel(asked.request_id, "its client has left")
        records.append((await ending.ended)[0])

    async def whole() -> None:
        system = replace(get_system("patched-fcfs"), policy="continuous-drop")
        backend = LocalBackend(LocalSetup(model, system, Quick()))
        await backend.start()
        try:
            for stage in ("preparing", "denoising", "postprocessing"):
                with monkeypatch.context() as broken:
                    failing(broken, model, stage, lambda: random.random() < 0.05)
                    await asyncio.gather(*(one(backend, number) for number in range(40)))
        finally:
            await backend.stop()

    asyncio.run(asyncio.wait_for(whole(), 120))
    assert {record.status for record in records} == set(FINAL_STATUSES)
    for record in records:
        told = metrics_of([record])
        assert told.keys() >= {"queue_s", "prepare_s", "denoise_s", "decode_s", "latency_s"}
        assert all(told[name] is None or 0 <= told[name] < 120 for name in told.keys() - {"slo_s", "slo_met"}), told
        times = record.arrival_s, record.prepare_start_s, record.prepare_end_s, record.admitted_s, record.denoise_end_s
        reached = [time_s is not None for time_s in times]
        assert reached == sorted(reached, reverse=True), "no stage is passed over"
        has = [told[name] is not None for name in ("prepare_s", "queue_s", "denoise_s", "decode_s")]
        assert has == [*reached[2:], reached[-1]]
        assert (told["latency_s"] is not None) == (record.status == "completed")


def test_who_leaves_while_a_request_is_handed_in_has_it_cancelled(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, is_at_it = threading.Event(), threading.Event()
    check = ServedModel.check_request

    def slow_check(served: ServedModel, asked: Request) -> None:
        is_at_it.set()
        goes_on.wait(30)
        check(served, asked)

    async def work(backend: LocalBackend) -> None:
        monkeypatch.setattr(ServedModel, "check_request", slow_check)
        long, waiting = Ending(), Ending()
        # Longer than anybody waits for; the other one has not come to the thread that hands in.
        handing_in = [
            asyncio.ensure_future(backend.submit(request(number, 1_000_000), ending))
            for number, ending in enumerate((long, waiting), 1)
        ]
        await asyncio.to_thread(is_at_it.wait, 30)
        for task in handing_in:
            task.cancel()
        assert [type(each) for each in await asyncio.gather(*handing_in, return_exceptions=True)] == [
            asyncio.CancelledError
        ] * 2
        goes_on.set()
        # Handed in after them, by the same thread.
        assert await status_of(backend, 3) == "completed"
        while backend.load.num_running or backend.load.num_waiting:
            await asyncio.sleep(0.01)
        assert not long.ended.done()
        assert not waiting.ended.done()

    run(work, model)


def test_who_leaves_before_a_stream_begins_has_it_cancelled(model: ServedModel, tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        front_end = front_end_of(backend, Limits())
        edits, batches = EditProcesses(front_end.model, front_end.limits), Batches(tmp_path, front_end, 1)
        app = make_app(front_end, Metrics((SIZE,), backend), Live(front_end), batches, edits)
        guards = Guards(app, keys=Keys(()), hosts=None, max_body=1000)
        has_left = asyncio.Event()
        body = json.dumps({"prompt": "a cat", "stream": True, "num_inference_steps": 200}).encode()
        told = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if told:
                return told.pop()
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            # The connection takes nothing more.
            has_left.set()
            await asyncio.Event().wait()

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/v1/images/generations",
            "raw_path": b"/v1/images/generations",
            "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        await guards(scope, receive, send)
        assert has_left.is_set()
        while front_end.open:
            await asyncio.sleep(0.01)
        [ticket] = front_end.ended.values()
        assert ticket.status == "cancelled"
        assert ticket.steps_done.get(0, 0) < 200

    run(work, model)


def test_too_many_crashes_are_the_end(model: ServedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    crashes = bombed(monkeypatch, lambda states: True)

    async def work(backend: LocalBackend) -> None:
        told: list[str] = []
        backend.on_stopped = told.append
        while not told:
            ending = Ending()
            if await is_taken(backend, request(len(crashes)), ending):
                assert (await ending.ended)[0].status == "cancelled"
            else:
                await asyncio.sleep(0.02)
        assert len(crashes) == MAX_RESTARTS + 1
        assert "has crashed 4 times" in told[0]
        assert backend.health is Health.STOPPED
        assert await probes(backend, tmp_path) == {"/livez": 200, "/readyz": 503, "/health": 503}

    run(work, model)


def failing(monkeypatch: pytest.MonkeyPatch, model: ServedModel, stage: str, fails: Callable[[], bool]) -> None:
    """Let a stage's part of the model fail, as it does after an error of CUDA, where `fails` says so."""
    parts = {
        "preparing": model.pipe.text_encoder,
        "denoising": model.denoiser,
        "postprocessing": model.pipe.vae.decoder,
    }
    kind = type(parts[stage])
    forward = kind.forward

    def may_fail(module: Any, *given: Any, **named: Any) -> Any:
        if fails():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return forward(module, *given, **named)

    monkeypatch.setattr(kind, "forward", may_fail)


async def status_of(backend: LocalBackend, number: int) -> str | None:
    """How a request ends; None where it is refused."""
    ending = Ending()
    if not await is_taken(backend, request(number), ending):
        return None
    return (await ending.ended)[0].status


@pytest.mark.parametrize("stage", ["preparing", "denoising", "postprocessing"])
def test_an_engine_whose_model_always_fails_takes_nothing_more(
    stage: str,
    model: ServedModel,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def work(backend: LocalBackend) -> None:
        told: list[str] = []
        backend.on_stopped = told.append
        failing(monkeypatch, model, stage, lambda: True)
        statuses = [await status_of(backend, number) for number in range(MOST_FAILED)]
        assert statuses == ["failed"] * MOST_FAILED
        while backend.health is Health.READY:
            await asyncio.sleep(0.01)
        # From here on nobody gets an error of the model: not from the engines that are tried in its place either.
        while not told:
            with pytest.raises(ApiError) as refused:
                await backend.submit(request(100), Ending())
            assert (refused.value.status, refused.value.code) == (503, "not_ready")
            await asyncio.sleep(0)
        assert f"has crashed {MAX_RESTARTS + 1} times" in told[0]
        assert "CUDA error" in told[0]
        assert await probes(backend, tmp_path) == {"/livez": 200, "/readyz": 503, "/health": 503}
        assert "CUDA error" in backend.trouble

    run(work, model)
    said = capsys.readouterr().err
    assert said.count("The engine has stopped: 8 tries in a row have failed") == 1
    assert stage in said


@pytest.mark.parametrize("engine", ["patched", "plain"])
def test_batches_that_are_too_large_are_told(
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

        failing(monkeypatch, model, "denoising", fails)
        endings = [Ending(), Ending()]
        for number, ending in enumerate(endings):
            await backend.submit(request(number, 100), ending)
        assert [(await ending.ended)[0].status for ending in endings] == ["completed"] * 2
        assert has_failed
        assert await probes(backend, tmp_path) == {"/livez": 200, "/readyz": 200, "/health": 200}
        assert backend.trouble.startswith("steps of batches fail and are repeated in halves: 1 so far, the first by")
        assert "illegal memory access" in backend.trouble
        monkeypatch.setattr(local, "TOLD_FOR_S", 0.0)
        assert backend.trouble == ""

    run(work, model)


def test_while_an_engine_is_restarted_probes_say_why(
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
        failing(monkeypatch, model, "denoising", lambda: is_broken)
        for number in range(MOST_FAILED):
            assert await status_of(backend, number) == "failed"
        while backend.health is Health.READY:
            await asyncio.sleep(0.01)
        is_broken = False
        front_end = front_end_of(backend, Limits())
        edits = EditProcesses(front_end.model, front_end.limits)
        batches = Batches(tmp_path, front_end, 1)
        app = make_app(front_end, Metrics((SIZE,), backend), Live(front_end), batches, edits)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://psctl") as client:
            for path in ("/readyz", "/health"):
                answer = await client.get(path)
                assert answer.status_code == 503
                assert answer.json()["status"] == "restarting"
                assert "tries in a row have failed" in answer.json()["reason"]
        goes_on.set()
        while backend.health is not Health.READY:
            await asyncio.sleep(0.01)
        assert await status_of(backend, 50) == "completed"
        assert backend.trouble == ""

    run(work, model)


def test_requests_that_fail_by_themselves_do_not_end_the_service(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_poison = False

    async def work(backend: LocalBackend) -> None:
        nonlocal is_poison
        told: list[str] = []
        backend.on_stopped = told.append
        failing(monkeypatch, model, "denoising", lambda: is_poison)
        # One that is drawn between them begins the count anew.
        for number in range(2 * MOST_FAILED + 1):
            is_poison = number % MOST_FAILED != 0
            assert await status_of(backend, number) == ("failed" if is_poison else "completed")
        assert not backend._crashes
        # The engine that follows draws again, whatever failed before; it may be so for ever.
        for round_number in range(MAX_RESTARTS + 2):
            is_poison = True
            for number in range(MOST_FAILED):
                assert await status_of(backend, number) == "failed"
                is_poison = number < MOST_FAILED - 1
            while await status_of(backend, 100 + round_number) != "completed":
                await asyncio.sleep(0.01)
        assert not told

    run(work, model)


def held(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """The engine waits where requests are active: the first is set when it does, and it goes on with the second."""
    is_held, goes_on = threading.Event(), threading.Event()

    def waits(states: Sequence[RequestState]) -> bool:
        if any(state.stage == "active" for state in states):
            is_held.set()
            assert goes_on.wait(30)
        return False

    bombed(monkeypatch, waits)
    return is_held, goes_on


def test_a_model_that_loads_is_alive_and_not_ready(model: ServedModel, tmp_path: Path) -> None:
    async def whole() -> None:
        backend = LocalBackend(LocalSetup(model, get_system("patched-fcfs")))
        assert await probes(backend, tmp_path) == {"/livez": 200, "/readyz": 503, "/health": 200}
        await backend.start()
        assert await probes(backend, tmp_path) == {"/livez": 200, "/readyz": 200, "/health": 200}
        await backend.stop()

    asyncio.run(whole())


def test_a_stall_is_told(model: ServedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    is_held, goes_on = held(monkeypatch)

    async def work(backend: LocalBackend) -> None:
        ending = Ending()
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


@pytest.mark.parametrize("part", ["prepare", "postprocess"])
def test_a_stage_that_stands_still_is_a_stall(part: Part, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(folder, "cpu", "float32", EngineOptions(stages="processes"))
    assert model.stages is not None
    process = model.stages.of[part].process_id

    async def work(backend: LocalBackend) -> None:
        monkeypatch.setattr(stages, "STALLED_S", 0.2)
        os.kill(process, signal.SIGSTOP)
        ending = Ending()
        await backend.submit(request(0), ending)
        while backend.health is not Health.STALLED:
            await asyncio.sleep(0.02)
        assert not ending.ended.done()
        os.kill(process, signal.SIGCONT)
        assert (await ending.ended)[0].status == "completed"
        assert backend.health is Health.READY

    run(work, model)


def test_a_ticket_ends_whatever_its_backend_does(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    is_held, goes_on, step = threading.Event(), threading.Event(), model.stepper.step

    def waiting_step(batch: Any) -> Any:
        is_held.set()
        assert goes_on.wait(60)
        return step(batch)

    monkeypatch.setattr(tickets, "GIVEN_UP_S", 0.2)

    async def work(backend: LocalBackend) -> None:
        monkeypatch.setattr(model.stepper, "step", waiting_step)
        limits = Limits(max_queue=2, request_timeout_s=1.0)
        front_end = front_end_of(backend, limits)
        wanted = parse_generation({"prompt": "a cat", "n": 2, "seed": 3}, front_end.model, limits)
        ticket = await front_end.generate(wanted, arrival_s=time.monotonic())
        await asyncio.to_thread(is_held.wait, 30)
        with pytest.raises(ApiError, match="it took more than 1 s"):
            await front_end.wait(ticket)
        await ticket.over.wait()
        assert (ticket.status, front_end.open) == ("failed", {})
        # Its places are free, and what the engine says of it later changes nothing.
        again = await front_end.generate(wanted, arrival_s=time.monotonic())
        goes_on.set()
        await again.over.wait()
        assert len(ticket.drawn) == len(ticket.records) == 0

    run(work, model)


def test_idling_is_no_stall(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    is_held, goes_on = held(monkeypatch)

    async def work(backend: LocalBackend) -> None:
        assert backend._engine is not None
        backend._engine._progress_s -= 1000
        ending = Ending()
        await backend.submit(request(0, 2), ending)
        await asyncio.to_thread(is_held.wait, 30)
        assert backend.health is Health.READY
        goes_on.set()
        assert (await ending.ended)[0].status == "completed"

    run(work, model)


def test_what_the_model_cannot_serve_is_refused_at_once(model: ServedModel) -> None:
    async def work(backend: LocalBackend) -> None:
        with pytest.raises(UsageError, match="it may have at most"):
            await backend.submit(request(0, size=Resolution(8000, 8000)), Ending())
        ending = Ending()
        await backend.submit(request(1, steps=200), ending)
        backend.cancel(FIRST_ID + 1, "its client has left")
        record, image = await ending.ended
        assert (record.status, record.reason, image) == ("cancelled", "its client has left", None)
        assert (backend.load.num_running, backend.load.num_waiting, backend.load.pixel_steps) == (0, 0, 0)
        assert await status_of(backend, 2) == "completed"
        assert backend.load.rate is not None

    run(work, model)


def test_the_unit_of_time_is_shared(model: ServedModel, tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        early, ending = request(0), Ending()
        await asyncio.sleep(0.3)
        await backend.submit(early, ending)
        record, _ = await ending.ended
        assert record.latency_s is not None
        assert record.latency_s >= 0.3, "the time before it was handed in counts"

    run(work, model)
