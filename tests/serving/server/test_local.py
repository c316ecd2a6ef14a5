"""The engine behind the server: crashes, disconnecting clients, and requests that it cannot serve."""

import asyncio
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.core.request_state import FINAL_STATUSES, RequestRecord, Stage
from patchedserve.serving.core.retries import MAX_RESTARTS
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.scheduling.systems import get_system
from patchedserve.serving.server import tickets
from patchedserve.serving.server.backend import FIRST_ID, Health
from patchedserve.serving.server.errors import ApiError
from patchedserve.serving.server.guards import Guards, Keys
from patchedserve.serving.server.limits import Limits
from patchedserve.serving.server.local import LocalBackend, LocalSetup
from patchedserve.serving.server.protocol import parse_generation
from patchedserve.serving.server.tickets import metrics_of

from ...support.local_backends import (
    ConstantSteps,
    EndFollower,
    app_of,
    crash_when,
    fail_stage,
    first_time_at,
    front_end_of,
    probes,
    request,
    run,
    status_of,
    try_submit,
)


# Inline stages prepare a request between steps, before the policy sees it, so no request is ever "joining".
@pytest.mark.product(most=3)
@pytest.mark.parametrize(
    ("stages", "stage"),
    [
        (stages, stage)
        for stages in ("inline", "threads")
        for stage in get_args(Stage)
        if (stages, stage) != ("inline", "joining")
    ],
)
def test_next_engine_serves_after_a_crash(
    stages: Literal["inline", "threads"], stage: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(folder, "cpu", "float32", EngineOptions(stages=stages))
    crashes = crash_when(monkeypatch, first_time_at(stage))

    async def work(backend: LocalBackend) -> None:
        endings = []
        for number, steps in enumerate((3, 6, 30)):
            ending = EndFollower()
            if await try_submit(backend, request(number, steps), ending):
                endings.append(ending)
        records = [(await ending.ended)[0] for ending in endings]
        assert len(crashes) == 1, "or the test shows nothing"
        # Each request ends: with an image if it had finished before, otherwise without one.
        assert {record.status for record in records} <= {"completed", "cancelled"}
        assert "cancelled" in {record.status for record in records}
        start_s = time.monotonic()
        again = EndFollower()
        while not await try_submit(backend, request(9), again):
            await asyncio.sleep(0.02)
        record, image = await again.ended
        assert record.status == "completed"
        assert image.size == (32, 32)
        assert time.monotonic() - start_s < 5
        assert backend.health is Health.READY

    run(work, model)


@pytest.mark.product(most=1)
@pytest.mark.parametrize("stages", ["inline", "threads"])
def test_request_times_are_consistent_for_every_end(
    stages: Literal["inline", "threads"], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests fail at any stage, are cancelled at any moment, cannot be in time, or complete."""
    model, random = load_model(folder, "cpu", "float32", EngineOptions(stages=stages)), Random(7)
    records: list[RequestRecord] = []

    async def one(backend: LocalBackend, number: int) -> None:
        asked, ending = request(number, random.randint(1, 8)), EndFollower()
        if is_late := number % 4 == 0:
            asked = replace(asked, slo_s=1e-9)
        if not await try_submit(backend, asked, ending):
            return
        if not is_late and random.random() < 0.4:
            await asyncio.sleep(random.expovariate(50))
            backend.cancel(asked.request_id, "its client has left")
        records.append((await ending.ended)[0])

    async def whole() -> None:
        system = replace(get_system("patched-fcfs"), policy="continuous-drop")
        backend = LocalBackend(LocalSetup(model, system, ConstantSteps()))
        await backend.start()
        try:
            for stage in ("preparing", "denoising", "postprocessing"):
                with monkeypatch.context() as broken:
                    fail_stage(broken, model, stage, lambda: random.random() < 0.05)
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


def test_disconnect_during_submission_cancels_the_request(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, is_at_it = threading.Event(), threading.Event()
    check = ServedModel.check_request

    def slow_check(served: ServedModel, asked: Request) -> None:
        is_at_it.set()
        goes_on.wait(30)
        check(served, asked)

    async def work(backend: LocalBackend) -> None:
        monkeypatch.setattr(ServedModel, "check_request", slow_check)
        long, waiting = EndFollower(), EndFollower()
        # The first takes longer than the test waits; the second has not reached the thread that submits requests.
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
        # The same thread submits this one after them.
        assert await status_of(backend, 3) == "completed"
        while backend.load.num_running or backend.load.num_waiting:
            await asyncio.sleep(0.01)
        assert not long.ended.done()
        assert not waiting.ended.done()

    run(work, model)


def test_priorities_order_the_waiting_requests_of_a_key(model: ServedModel) -> None:
    async def work(backend: LocalBackend) -> None:
        front_end = front_end_of(backend, Limits(max_steps=1_000_000))

        async def send(key: str, **fields: Any) -> tickets.Ticket:
            asked = parse_generation({"prompt": "a cat", **fields}, front_end.model, front_end.limits)
            return await front_end.generate(asked, key=key, arrival_s=time.monotonic())

        first = await send("red", num_inference_steps=1_000_000)
        while not backend.load.num_running:
            await asyncio.sleep(0.01)
        sent = [("red", 1), ("red", 0), ("blue", 5), ("red", -1)]
        found = [await send(key, priority=priority) for key, priority in sent]
        first.cancel("its client has cancelled it")
        for ticket in found:
            await front_end.wait(ticket)
        admitted = sorted(zip(found, sent, strict=True), key=lambda each: each[0].records[0].admitted_s or 0.0)
        assert [each for _, each in admitted] == [("blue", 5), ("red", -1), ("red", 0), ("red", 1)]

    run(work, model, max_batch_size=1)


def test_disconnect_before_a_stream_starts_cancels_the_request(model: ServedModel, tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        front_end = front_end_of(backend, Limits())
        guards = Guards(app_of(front_end, tmp_path), keys=Keys(()), hosts=None, max_body=1000)
        has_left = asyncio.Event()
        body = json.dumps({"prompt": "a cat", "stream": True, "num_inference_steps": 200}).encode()
        told = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if told:
                return told.pop()
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            # The connection accepts no more data.
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


def test_too_many_crashes_end_the_service(model: ServedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    crashes = crash_when(monkeypatch, lambda states: True)

    async def work(backend: LocalBackend) -> None:
        told: list[str] = []
        backend.on_stopped = told.append
        while not told:
            ending = EndFollower()
            if await try_submit(backend, request(len(crashes)), ending):
                assert (await ending.ended)[0].status == "cancelled"
            else:
                await asyncio.sleep(0.02)
        assert len(crashes) == MAX_RESTARTS + 1
        assert "has crashed 4 times" in told[0]
        assert backend.health is Health.STOPPED
        assert await probes(backend, tmp_path) == {"/livez": 200, "/readyz": 503, "/health": 503}

    run(work, model)


def test_ticket_ends_for_any_backend_behaviour(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    is_held, goes_on, step = threading.Event(), threading.Event(), model.stepper.step

    def waiting_step(batch: Any) -> Any:
        is_held.set()
        assert goes_on.wait(60)
        return step(batch)

    monkeypatch.setattr(tickets, "CANCEL_TIMEOUT_S", 0.2)

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
        # Its places are free, and later reports from the engine change nothing.
        again = await front_end.generate(wanted, arrival_s=time.monotonic())
        goes_on.set()
        await again.over.wait()
        assert len(ticket.drawn) == len(ticket.records) == 0

    run(work, model)


def test_unsupported_requests_are_refused_immediately(model: ServedModel) -> None:
    async def work(backend: LocalBackend) -> None:
        with pytest.raises(UsageError, match="it may have at most"):
            await backend.submit(request(0, size=Resolution(8000, 8000)), EndFollower())
        ending = EndFollower()
        await backend.submit(request(1, steps=200), ending)
        backend.cancel(FIRST_ID + 1, "its client has left")
        record, image = await ending.ended
        assert (record.status, record.reason, image) == ("cancelled", "its client has left", None)
        assert (backend.load.num_running, backend.load.num_waiting, backend.load.pixel_steps) == (0, 0, 0)
        assert await status_of(backend, 2) == "completed"
        assert backend.load.rate is not None

    run(work, model)


def test_engine_and_server_share_a_clock(model: ServedModel, tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        early, ending = request(0), EndFollower()
        await asyncio.sleep(0.3)
        await backend.submit(early, ending)
        record, _ = await ending.ended
        assert record.latency_s is not None
        assert record.latency_s >= 0.3, "the time before it was handed in counts"

    run(work, model)
