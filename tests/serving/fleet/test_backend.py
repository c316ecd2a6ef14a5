"""Requests whose replica dies, is busy or refuses them: the backend, with scripted replicas."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.core.request_state import RequestRecord, RequestView, Status
from patchedserve.serving.core.retries import MAX_DEATHS
from patchedserve.serving.fleet import backend as backend_module
from patchedserve.serving.fleet.backend import MAX_ATTEMPTS, ReplicaBackend
from patchedserve.serving.fleet.book import LoadBook
from patchedserve.serving.fleet.deployment import ReplicaPlan
from patchedserve.serving.fleet.messages import (
    Accepted,
    Ended,
    PartialImage,
    Refused,
    ReplicaMessage,
    ReplicaStatus,
    Stepped,
)
from patchedserve.serving.scheduling.policies import StepLatencyPredictor
from patchedserve.serving.scheduling.routers import DEFAULT_ROUTER
from patchedserve.serving.scheduling.step_latency import TableLatency
from patchedserve.serving.server.backend import Follower, Health, Load, ReplicaState
from patchedserve.serving.server.errors import ApiError
from patchedserve.serving.server.tickets import error_of

exceptions = pytest.importorskip("ray.exceptions", reason="the extra `ray` is not installed")
Script = list["ReplicaMessage | BaseException | Status"]
STANDS_STILL: Any = object()
"""Item of a script after which the replica sends nothing more."""


class Scripted:
    """Stand-in for a `Deployment`: each attempt to draw sends the messages of its script; a status ends it."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts, self.num_asked = list(scripts), 0
        self.answers: tuple[Sequence[ReplicaStatus], int] = (), 0
        self.lost = ""

    def draw(self, request: Request, waited_s: float, num_partials: int, follows_steps: bool) -> "Scripted._Events":
        self.num_asked += 1
        return self._Events(request, self.scripts.pop(0))

    def statuses(self) -> tuple[Sequence[ReplicaStatus], int]:
        return self.answers

    def lost_part(self) -> str:
        return self.lost

    def end(self) -> None:
        pass

    class _Events:
        def __init__(self, request: Request, script: Script) -> None:
            self.request, self.script = request, script

        async def __aiter__(self) -> AsyncIterator[ReplicaMessage]:
            for events in self.script:
                await asyncio.sleep(0)
                if isinstance(events, BaseException):
                    raise events
                if events is STANDS_STILL:
                    await asyncio.Event().wait()
                if isinstance(events, str):
                    record = RequestRecord.of(self.request)
                    record.close(events, 1.0, "as is said")
                    events = Ended(record, None)
                yield events

        def cancel(self) -> None:
            pass


class RecordingFollower(Follower):
    """Follower that records its notifications."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self.ended: asyncio.Future[RequestRecord] = asyncio.get_running_loop().create_future()

    def on_step(self, request_id: int, steps_done: int) -> None:
        self.events.append(steps_done)

    def on_partial(self, request_id: int, index: int, image: Any) -> None:
        self.events.append(f"partial {index}")

    def on_end(self, record: RequestRecord, image: Any) -> None:
        self.ended.set_result(record)


def run(
    work: Callable[[ReplicaBackend, Scripted, LoadBook], Coroutine[Any, Any, None]],
    *scripts: Script,
    router: str = DEFAULT_ROUTER,
    predictor: StepLatencyPredictor | None = None,
) -> None:
    async def whole() -> None:
        book, deployment = LoadBook(router, predictor), Scripted(*scripts)
        backend = ReplicaBackend(ReplicaPlan(1, 1, False, 4), lambda: None, book=book)  # type: ignore[arg-type,return-value]
        backend._deployment = deployment  # type: ignore[assignment]
        await backend.start()
        try:
            await asyncio.wait_for(work(backend, deployment, book), 20)
            assert book.pending() == 0
        finally:
            await backend.stop()

    asyncio.run(whole())


def request(slo_s: float | None = None) -> Request:
    return Request(1, "a cat", Resolution(32, 32), 4, arrival_s=asyncio.get_running_loop().time(), slo_s=slo_s)


def died() -> BaseException:
    return exceptions.ActorDiedError()


def test_retried_request_sends_no_event_twice() -> None:
    async def work(backend: ReplicaBackend, deployment: Scripted, book: LoadBook) -> None:
        follower = RecordingFollower()
        await backend.submit(request(), follower, num_partials=2, follows_steps=True)
        record = await follower.ended
        assert record.status == "completed"
        assert follower.events == [1, "partial 0", 2, 3, "partial 1", 4]
        assert deployment.num_asked == 3

    image: Any = None
    first: Script = [Accepted(), Stepped(1, 1), PartialImage(1, 0, image), Stepped(1, 2), died()]
    lost: Script = [exceptions.ObjectLostError("0", None, "")]
    last: Script = [Accepted(), Stepped(1, 1), PartialImage(1, 0, image), Stepped(1, 2), Stepped(1, 3)]
    run(work, first, lost, [*last, PartialImage(1, 1, image), Stepped(1, 4), "completed"])


def test_request_that_kills_replicas_is_tried_on_two_at_most() -> None:
    async def work(backend: ReplicaBackend, deployment: Scripted, book: LoadBook) -> None:
        for num_asked in (2, 5, 8):
            follower = RecordingFollower()
            await backend.submit(request(), follower)
            record = await follower.ended
            assert deployment.num_asked == num_asked
            assert (record.status, record.reason) == ("failed", "2 replicas have died while they drew it")
            error = error_of(record)
            assert (error.status, error.code, error.headers) == (500, "generation_failed", {"x-should-retry": "false"})
            assert "2 replicas have died while they drew it" in error.message
        # The policy of the next replica decides whether it is too late.
        late = RecordingFollower()
        await backend.submit(request(slo_s=1e-9), late)
        assert (await late.ended).status == "completed"

    dies: Script = [Accepted(), Stepped(1, 1), died()]
    crashes: Script = [Accepted(), "cancelled"]
    # A replica that was dead before it received the request did not die of it.
    runs = [[dies] * MAX_DEATHS, [dies, [died()], crashes], [crashes, [Refused("it restarts", is_busy=True)], dies]]
    run(work, *(script for each in runs for script in each), dies, [Accepted(), "completed"])


def test_request_that_no_replica_accepts_may_be_retried() -> None:
    async def work(backend: ReplicaBackend, deployment: Scripted, book: LoadBook) -> None:
        follower = RecordingFollower()
        await backend.submit(request(), follower)
        record = await follower.ended
        # The request is cancelled, not failed, as it did not cause this.
        assert (record.status, deployment.num_asked) == ("cancelled", MAX_ATTEMPTS)
        assert record.reason == "none of 3 replicas in a row has drawn it"
        assert error_of(record).code == "engine_error"

    dead: Script = [died()]
    run(work, *[dead] * MAX_ATTEMPTS)


def test_requests_of_a_hanging_replica_are_rerouted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "_STATUS_EVERY_S", 0.01)
    monkeypatch.setattr(backend_module, "_REASSIGN_AFTER_S", 0.05)

    def status(name: str) -> ReplicaStatus:
        return ReplicaStatus(ReplicaState(name, 1, Health.READY, Load(rate=100.0)), ())

    async def work(backend: ReplicaBackend, deployment: Scripted, book: LoadBook) -> None:
        deployment.answers = (status("a"), status("b")), 0
        while len(backend.replicas) < 2:
            await asyncio.sleep(0.01)
        assert (backend.health, backend.load.rate, backend.trouble) == (Health.READY, 200.0, "")
        follower = RecordingFollower()
        await backend.submit(request(), follower, follows_steps=True)
        book.confirm(1, "a")
        deployment.answers = (status("b"),), 1
        assert (await follower.ended).status == "completed"
        assert (follower.events, deployment.num_asked) == ([1, 2], 2)
        assert {each.name: each.health for each in backend.replicas} == {"a": Health.STALLED, "b": Health.READY}
        assert (backend.health, backend.load.rate) == (Health.READY, 100.0)
        begun = RequestView.of(request(), None, 1.0)
        book.begin(begun)
        assert book.reserve(1, ["a", "b"]) == ["b", "a"]
        book.release(1)
        # If no replica answers, open requests stay where they are.
        deployment.answers = (), 2
        while any(each.health is Health.READY for each in backend.replicas):
            await asyncio.sleep(0.01)
        deployment.answers = (status("a"), status("b")), 0
        while any(each.health is not Health.READY for each in backend.replicas):
            await asyncio.sleep(0.01)
        deployment.answers = (status("a"), replace(status("b"), trouble="its batches fail")), 0
        while backend.trouble != "replica b: its batches fail":
            await asyncio.sleep(0.01)

    run(work, [Accepted(), Stepped(1, 1), STANDS_STILL], [Accepted(), Stepped(1, 1), Stepped(1, 2), "completed"])


def test_silence_of_all_replicas_is_reported_before_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "_STATUS_EVERY_S", 0.01)
    monkeypatch.setattr(backend_module, "_UNREADY_AFTER_S", 0.05)

    async def work(backend: ReplicaBackend, deployment: Scripted, book: LoadBook) -> None:
        async def is_silent() -> None:
            while backend.health is Health.READY:
                await asyncio.sleep(0.01)
            assert (backend.health, backend.trouble) == (Health.RESTARTING, "no replica has answered for 0.05 s")

        await is_silent()
        follower = RecordingFollower()
        await backend.submit(request(), follower)
        assert backend.health is Health.READY, "a replica has accepted it"
        assert (await follower.ended).status == "completed"
        await is_silent()
        monkeypatch.setattr(backend_module, "_REFUSED_AFTER_S", 0.0)
        with pytest.raises(ApiError, match="no replica is there now"):
            await backend.submit(request(), RecordingFollower())

    run(work, [Accepted(), "completed"])


def test_loss_of_ray_ends_requests_and_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "_STATUS_EVERY_S", 0.01)

    async def work(backend: ReplicaBackend, deployment: Scripted, book: LoadBook) -> None:
        reported: list[str] = []
        backend.on_stopped = reported.append
        follower = RecordingFollower()
        await backend.submit(request(), follower)
        deployment.lost = "raylet"
        record = await follower.ended
        assert (record.status, error_of(record).code) == ("cancelled", "engine_error")
        assert reported == ["Ray's raylet has ended, and all replicas with it"]
        assert (backend.health, backend.trouble) == (Health.STOPPED, *reported)
        with pytest.raises(ApiError, match="no replica is there now"):
            await backend.submit(request(), RecordingFollower())

    run(work, [Accepted(), STANDS_STILL])


def test_busy_replica_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchedserve.serving.fleet.backend._BUSY_RETRY_S", 0.01)

    async def work(backend: ReplicaBackend, deployment: Scripted, book: LoadBook) -> None:
        follower = RecordingFollower()
        await backend.submit(request(), follower)
        assert (await follower.ended).status == "completed"
        with pytest.raises(ApiError) as caught:
            await backend.submit(request(), RecordingFollower())
        assert (caught.value.status, caught.value.code) == (503, "not_ready")

    busy: Script = [Refused("the engine is restarting", is_busy=True)]
    crashed: Script = [Accepted(), Stepped(1, 1), "cancelled"]
    run(work, busy, crashed, [Accepted(), Stepped(1, 4), "completed"], busy, busy, busy)


def test_unsupported_request_is_refused_immediately() -> None:
    async def work(backend: ReplicaBackend, deployment: Scripted, book: LoadBook) -> None:
        follower = RecordingFollower()
        with pytest.raises(UsageError, match="too large"):
            await backend.submit(request(), follower)
        assert deployment.num_asked == 1
        assert not follower.ended.done()

    run(work, [Refused("it is too large", is_busy=False)])


def test_size_unknown_to_the_router_is_refused() -> None:
    async def work(backend: ReplicaBackend, deployment: Scripted, book: LoadBook) -> None:
        with pytest.raises(UsageError, match="32x32"):
            await backend.submit(request(), RecordingFollower())
        assert (deployment.num_asked, backend.load.num_waiting) == (0, 0)

    run(work, router="mask-aware", predictor=TableLatency({(Resolution(64, 64),): 1.0}))


def test_cancelled_request_is_not_retried() -> None:
    async def work(backend: ReplicaBackend, deployment: Scripted, book: LoadBook) -> None:
        follower = RecordingFollower()
        await backend.submit(request(), follower)
        backend.cancel(1, "its client has left")
        record = await follower.ended
        assert (record.status, record.reason) == ("cancelled", "its client has left")
        assert deployment.num_asked == 1

    run(work, [Accepted(), *[Stepped(1, 1)] * 1000, "completed"])
