"""An engine and its backend without a model: a real scheduler on any event loop's clock, with random faults."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from PIL import Image

from patchedserve.data.errors import RunError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import parse
from patchedserve.serving.core.request_state import RequestState, RequestView
from patchedserve.serving.core.step_row import StepRow
from patchedserve.serving.scheduling.policies import get_policy
from patchedserve.serving.scheduling.scheduler import Scheduler
from patchedserve.serving.server.backend import Backend, Follower, Health, Load, ReplicaState
from patchedserve.serving.server.drain_rate import DrainRate
from patchedserve.serving.server.errors import not_ready
from patchedserve.training.latency.online_correction import OnlineCorrection

STEP_S = 0.05
"""Seconds of a step of one image; each further image adds a quarter."""


class TableOfSteps:
    """Step latencies without faults."""

    def step_latency_s(self, active: Sequence[Any]) -> float:
        return STEP_S * (1 + 0.25 * (len(active) - 1))


class MachineState:
    """State that outlives a process: the machine's faults, and counts of events.

    Attributes:
        rng: random numbers of the run.
        slow: factor of all durations.
        broken: share of the calls of each stage that fail.
        event_counts: counts of events.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.slow = 1.0
        self.broken = {"preparing": 0.0, "denoising": 0.0, "decoding": 0.0}
        self.event_counts = Counter[str]()

    def heal(self) -> None:
        self.slow = 1.0
        self.broken = dict.fromkeys(self.broken, 0.0)

    def fails(self, stage: str) -> bool:
        return self.rng.random() < self.broken[stage]


class RandomEngine:
    """The loop of an engine over a real scheduler, without a model."""

    def __init__(
        self, machine: MachineState, policy: str, predictor: OnlineCorrection, backend: "RandomBackend"
    ) -> None:
        self.scheduler = Scheduler(get_policy(policy), predictor, max_batch_size=machine.rng.randint(1, 6))
        self.followers: dict[int, Follower] = {}
        self.crashes_with: Exception | None = None
        self._machine, self._backend = machine, backend
        self._cancelled: list[tuple[RequestState, str]] = []
        self._wake_event = asyncio.Event()
        self._decoder: asyncio.Queue[RequestState] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._begin(self._decode())

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def add(self, request: Request, follower: Follower) -> None:
        self.followers[request.request_id] = follower
        self.scheduler.add(request, RequestView.of(request))
        self._changed()

    def cancel(self, request_id: int, reason: str) -> None:
        state = self.scheduler._open.get(request_id)
        if state is not None:
            self._cancelled.append((state, reason))
            self._changed()

    def withdraw_and_add_again(self) -> None:
        """Withdraw the waiting requests from the scheduler and add them again."""
        taken = self.scheduler.withdraw_waiting()
        self._machine.event_counts["taken back"] += len(taken)
        for request in taken:
            self.scheduler.add(request, RequestView.of(request))
        self._changed()

    def crash(self, error: Exception) -> None:
        self.crashes_with = error
        self._wake_event.set()

    def _changed(self) -> None:
        self._prepare_next()
        self._wake_event.set()

    def _prepare_next(self) -> None:
        state = self.scheduler.next_to_prepare(self.now_s)
        if state is not None:
            self._begin(self._prepare(state))

    async def _prepare(self, state: RequestState) -> None:
        await asyncio.sleep(0.02 * self._machine.slow)
        failure = "broken" if self._machine.fails("preparing") else None
        known = self.scheduler.prepared(state.request.request_id, self.now_s, failure=failure)
        if known is not None and failure is not None:
            self._notify(known)
        self._changed()

    async def _decode(self) -> None:
        while True:
            state = await self._decoder.get()
            await asyncio.sleep(0.03 * self._machine.slow)
            if state.record.status != "pending":
                continue
            failure = "broken" if self._machine.fails("decoding") else None
            self.scheduler.end(state.request.request_id, "failed" if failure else "completed", self.now_s, failure)
            self._notify(state)
            self._wake_event.set()

    def _notify(self, state: RequestState) -> None:
        record = state.record
        # An image that identifies its request.
        image = Image.new("RGB", (1, 1), colour_of(state.request)) if record.status == "completed" else None
        self.followers.pop(state.request.request_id).on_end(record, image)

    async def run(self) -> None:
        """Run until the engine crashes, end all open requests, and raise the error of the crash."""
        try:
            while True:
                await self._turn()
        finally:
            for task in list(self._tasks):
                task.cancel()
            reason = "the run was stopped before it had finished"
            for state in self.scheduler.end_all("cancelled", self.now_s, reason):
                self._notify(state)
            assert not self.followers, "somebody was forgotten"

    async def _turn(self) -> None:
        scheduler = self.scheduler
        if self.crashes_with is not None:
            raise self.crashes_with
        cancelled, self._cancelled = self._cancelled, []
        for state, reason in cancelled:
            number = state.request.request_id
            if state.record.status == "pending" and scheduler._open.get(number) is state:
                scheduler.end(number, "cancelled", self.now_s, reason)
                self._notify(state)
        for state in scheduler.decide(self.now_s):
            self._notify(state)
        self._prepare_next()
        if not scheduler.can_step:
            self._wake_event.clear()
            if not (scheduler.is_due or self._cancelled):
                await self._wake_event.wait()
            return
        start_s, batch = self.now_s, list(scheduler.active)
        await asyncio.sleep(TableOfSteps().step_latency_s(batch) * self._machine.slow)
        if self.crashes_with is not None:
            raise self.crashes_with
        failures = {each.request.request_id: "broken" for each in batch if self._machine.fails("denoising")}
        took_s = self.now_s - start_s
        row = StepRow.of(scheduler.num_steps, start_s, took_s, scheduler.batch, scheduler.num_waiting, 0.0)
        left = scheduler.stepped(self.now_s, took_s, failures)
        self._backend.stepped(row)
        for state in batch:
            if state.request.request_id in self.followers and state.record.status == "pending":
                done = scheduler.num_steps - state.first_step
                self.followers[state.request.request_id].on_step(state.request.request_id, done)
        for state in left:
            if state.stage == "decoding" and state.record.status == "pending":
                self._decoder.put_nowait(state)
            else:
                self._notify(state)


def colour_of(request: Request) -> tuple[int, int, int]:
    return request.seed % 256, request.seed // 256 % 256, request.resolution.width


class RandomBackend(Backend):
    """A backend that replaces its engine after a crash, as `LocalBackend` does."""

    def __init__(self, machine: MachineState, policy: str, predictor: OnlineCorrection) -> None:
        self.on_stopped = lambda reason: None
        self.on_row: Callable[[StepRow], None] = lambda row: None
        self._machine, self._policy, self._predictor = machine, policy, predictor
        self._health, self._rate = Health.STARTING, DrainRate()
        self.engine: RandomEngine | None = None
        self._running: asyncio.Task[None] | None = None

    @property
    def health(self) -> Health:
        return self._health

    @property
    def trouble(self) -> str:
        return ""

    @property
    def plan(self) -> str:
        return ""

    @property
    def load(self) -> Load:
        if self.engine is None:
            return Load(rate=self._rate.value)
        scheduler = self.engine.scheduler
        return Load(len(scheduler.active), scheduler.num_waiting, scheduler.pixel_steps, self._rate.value)

    @property
    def replicas(self) -> Sequence[ReplicaState]:
        return (ReplicaState("random", 1, self.health, self.load),)

    async def start(self) -> None:
        self._running = asyncio.ensure_future(self._run())
        await asyncio.sleep(0.1)

    async def _run(self) -> None:
        while True:
            self.engine, self._health = RandomEngine(self._machine, self._policy, self._predictor, self), Health.READY
            try:
                await self.engine.run()
            except (RunError, MemoryError):
                self._machine.event_counts["crashes"] += 1
                self.engine, self._health = None, Health.RESTARTING
            await asyncio.sleep(0.5)

    def stepped(self, row: StepRow) -> None:
        pixels = sum(parse(name).pixels * count for name, count in row.resolutions.items())
        self._rate.note(pixels, row.duration_s)
        self.on_row(row)

    async def submit(
        self, request: Request, follower: Follower, *, num_partials: int = 0, follows_steps: bool = False
    ) -> None:
        if self.engine is None:
            raise not_ready("the engine is restarting")
        await asyncio.sleep(self._machine.rng.choice((0.0, 0.001, 0.05)))
        if self.engine is None:
            raise not_ready("the engine is restarting")
        self.engine.add(request, follower)

    def cancel(self, request_id: int, reason: str) -> None:
        if self.engine is not None:
            self.engine.cancel(request_id, reason)

    async def stop(self) -> None:
        self._health = Health.STOPPED
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
