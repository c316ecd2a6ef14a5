"""Backends with one engine, requests for them, and faults of their engines and models."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.core.request_state import RequestRecord, RequestState
from patchedserve.serving.engine.engine import Engine
from patchedserve.serving.models.defaults import ModelDefaults
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.scheduling.scheduler import Scheduler
from patchedserve.serving.scheduling.systems import get_system
from patchedserve.serving.server.app import make_app
from patchedserve.serving.server.backend import FIRST_ID, Follower
from patchedserve.serving.server.batches.store import Batches
from patchedserve.serving.server.edit_processes import EditProcesses
from patchedserve.serving.server.errors import ApiError
from patchedserve.serving.server.front_end import FrontEnd, Pricing
from patchedserve.serving.server.limits import Limits
from patchedserve.serving.server.live import Live
from patchedserve.serving.server.local import LocalBackend, LocalSetup
from patchedserve.serving.server.metrics import Metrics
from patchedserve.serving.server.protocol import ModelFacts

SIZE = Resolution(32, 32)


CrashCondition = Callable[[Sequence[RequestState]], bool]


class EndFollower(Follower):
    """Waits for the end of a request."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[tuple[RequestRecord, Any]] = asyncio.get_running_loop().create_future()

    def on_end(self, record: RequestRecord, image: Any) -> None:
        self.ended.set_result((record, image))


class ConstantSteps:
    """Constant step latencies, for policies that need a predictor."""

    def step_latency_s(self, active: Sequence[Any]) -> float:
        return 1e-3


def request(number: int, steps: int = 6, size: Resolution = SIZE) -> Request:
    return Request(FIRST_ID + number, "a cat", size, steps, 3.0, arrival_s=time.monotonic())


async def try_submit(backend: LocalBackend, asked: Request, ending: EndFollower) -> bool:
    """Submit a request; returns False if there is no engine at the moment."""
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


def app_of(front_end: FrontEnd, folder: Path) -> FastAPI:
    """Return the application of a server with this front end, whose batches are stored in a folder."""
    edits = EditProcesses(front_end.model, front_end.limits)
    metrics = Metrics((SIZE,), front_end.backend)
    return make_app(front_end, metrics, Live(front_end), Batches(folder, front_end, 1), edits)


async def answers(backend: LocalBackend, folder: Path) -> dict[str, httpx.Response]:
    """Return the responses of the probes of a server with this backend."""
    app = app_of(front_end_of(backend, Limits()), folder)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://psctl") as client:
        return {path: await client.get(path) for path in ("/livez", "/readyz", "/health")}


async def probes(backend: LocalBackend, folder: Path) -> dict[str, int]:
    """Return the status codes of the probes of a server with this backend."""
    return {path: answer.status_code for path, answer in (await answers(backend, folder)).items()}


def run(
    work: Callable[[LocalBackend], Coroutine[Any, Any, None]], model: ServedModel, *, max_batch_size: int = 16
) -> None:
    async def whole() -> None:
        setup = LocalSetup(model, get_system("patched-fcfs"), max_batch_size=max_batch_size, warm_up=[[request(0, 1)]])
        backend = LocalBackend(setup)
        await backend.start()
        try:
            await asyncio.wait_for(work(backend), 60)
        finally:
            await backend.stop()

    asyncio.run(whole())


def crash_when(monkeypatch: pytest.MonkeyPatch, condition: CrashCondition) -> list[str]:
    """Make the engine's loop crash when `condition` is true of the open requests.

    Returns a list of the crashes' threads, which grows with each crash.
    """
    crashes: list[str] = []
    decide, serve = Scheduler.decide, Engine._serve_stages

    def look(scheduler: Scheduler) -> None:
        # The warm-up, which has a single step, is exempt.
        states = [state for state in list(scheduler._open.values()) if state.num_iterations > 1]
        if states and condition(states):
            crashes.append(threading.current_thread().name)
            raise RuntimeError("a fault in the loop")

    def looking_decide(scheduler: Scheduler, now_s: float) -> Sequence[RequestState]:
        look(scheduler)
        return decide(scheduler, now_s)

    def looking_serve(engine: Engine) -> None:
        look(engine._scheduler)
        serve(engine)

    monkeypatch.setattr(Scheduler, "decide", looking_decide)
    # With stages between the steps, no request is ever in the decoder at a decision.
    monkeypatch.setattr(Engine, "_serve_stages", looking_serve)
    return crashes


def first_time_at(stage: str) -> CrashCondition:
    """Return a condition that is true the first time that a request is at this stage."""
    has_gone = False

    def condition(states: Sequence[RequestState]) -> bool:
        nonlocal has_gone
        if has_gone or all(state.stage != stage for state in states):
            return False
        has_gone = True
        return True

    return condition


def fail_stage(monkeypatch: pytest.MonkeyPatch, model: ServedModel, stage: str, fails: Callable[[], bool]) -> None:
    """Make a stage's part of the model fail, as after a CUDA error, whenever `fails` returns True."""
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
    monkeypatch.setattr(model, "prompts", None)  # texts that are known would not be encoded


async def status_of(backend: LocalBackend, number: int) -> str | None:
    """Submit a request and return its final status; None if it is refused."""
    ending = EndFollower()
    if not await try_submit(backend, request(number), ending):
        return None
    return (await ending.ended)[0].status


def pause_engine(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Make the engine wait while requests are active.

    Returns an event that is set once it waits, and one that lets it continue.
    """
    is_held, goes_on = threading.Event(), threading.Event()

    def waits(states: Sequence[RequestState]) -> bool:
        if any(state.stage == "active" for state in states):
            is_held.set()
            assert goes_on.wait(30)
        return False

    crash_when(monkeypatch, waits)
    return is_held, goes_on
