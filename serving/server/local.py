"""Backend with one engine in this process, in a thread of its own. It replaces the engine after a crash."""

import asyncio
import itertools
import math
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ...data.errors import PsctlError, RunError, UsageError
from ...data.requests import Request
from ..core.failures import MAX_FAILURES
from ..core.request_state import RequestRecord
from ..core.retries import MAX_RESTARTS, RESTARTS_WITHIN_S, Restarts
from ..core.step_row import StepRow
from ..core.threads import compute_alone
from ..engine.collectors import Collector
from ..engine.engine import Engine
from ..engine.preview import Preview
from ..engine.stages import Pulse
from ..engine.watch import Watch
from ..scheduling.policies import StepLatencyPredictor, get_policy
from ..scheduling.systems import System
from .backend import Follower, Health, Load, ReplicaState
from .drain_rate import DrainRate
from .errors import ApiError, invalid, not_ready

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..models.served import ServedModel

FAILURES_REPORTED_S = 600.0
"""Seconds after the last failed step of a batch (e.g. out of memory) during which probes report it."""
HUNG_AFTER_S = 600.0
"""Seconds of a stall after which the engine is given up. Compiling a large model may take minutes."""
_LOOK_EVERY_S = 1.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class LocalSetup:
    """Parts from which the backend makes its engines.

    Attributes:
        model: the loaded and tuned model.
        system: system that sets the policy, and the share of their steps that requests take.
        predictor: step latencies, for policies that look ahead.
        max_batch_size: largest number of requests in the batch.
        standalone_s: returns the standalone latency of a request in seconds, for policies that use it; called in the
            thread that submits requests.
        records_templates: whether missing templates of edits are recorded, in free places of the batch.
        warm_up: batches that are served, one after the other, before the backend is ready. After an engine for which
            everything failed, the first batch also proves that the next engine can draw.
    """

    model: "ServedModel"
    system: System
    predictor: StepLatencyPredictor | None = None
    max_batch_size: int = 16
    standalone_s: Callable[[Request], float | None] = lambda request: None
    warm_up: Sequence[Sequence[Request]] = ()
    records_templates: bool = False


def engine_thread() -> ThreadPoolExecutor:
    """Return an executor of the one thread that computes with torch: it loads the model, measures, and runs the engine.

    OpenMP keeps workers for each thread that computes. If there are more workers than processors, they sleep between
    parallel regions instead of spinning (libgomp): with a model loaded in the main thread, steps of a second one took
    2.4 times as long on 2 cores.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="psctl-engine")


class LocalBackend:
    """`Backend` that runs an engine in this process. A crash of the engine ends its open requests; the next engine
    uses the same model.

    Args:
        setup: parts of the engine.
        thread: executor in whose thread the model was loaded; None makes a new one.
        on_row: called with every step, on the event loop.

    Attributes:
        on_stopped: called with the reason when the engine has crashed too often and is not restarted, or when it has
            been stalled for `HUNG_AFTER_S`.
    """

    def __init__(
        self,
        setup: LocalSetup,
        *,
        thread: ThreadPoolExecutor | None = None,
        on_row: Callable[[StepRow], None] = lambda row: None,
    ) -> None:
        self._setup, self.on_row = setup, on_row
        self.on_stopped: Callable[[str], None] = lambda reason: None
        self._health = Health.STARTING
        self._engine: Engine | None = None
        self._thread = thread or engine_thread()
        self._running: Future[None] | None = None
        self._is_stopping = False
        self._restarts = Restarts()
        self._error: BaseException | None = None
        self._proof: asyncio.Task[None] | None = None
        self._rate = DrainRate()
        self._preview = Preview()
        self._num_failed, self._failed_s = 0, -math.inf
        # `check_request` may run torch, which must not block the event loop.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="psctl-submit", initializer=compute_alone)
        self._submitting = Pulse()
        self._has_started = threading.Event()
        self._followers: dict[int, Follower] = {}
        # Filled by the engine's thread, emptied by the event loop in `_poll`.
        self._rows: deque[StepRow] = deque()
        self._steps: dict[int, int] = {}
        self._polling: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def health(self) -> Health:
        """State of the engine; `stalled` if it is ready but makes no progress."""
        engine = self._engine
        if self._health is not Health.READY or engine is None:
            return self._health
        return Health.STALLED if engine.is_stalled or self._submitting.is_stalled else Health.READY

    @property
    def trouble(self) -> str:
        """Error that stopped the engine, or failures of batches in the last minutes; "" if there are none."""
        error = self._error
        if error is not None and self._health in (Health.RESTARTING, Health.STOPPED):
            return str(error) if isinstance(error, PsctlError) else f"{type(error).__name__}: {error}".splitlines()[0]
        if self._health is Health.READY and time.monotonic() - self._failed_s < FAILURES_REPORTED_S:
            found = self._setup.model.stepper.batch_failures
            return f"steps of batches fail and are repeated in halves: {found.count} so far, the first by {found.first}"
        return ""

    @property
    def load(self) -> Load:
        """Current load of the engine."""
        engine = self._engine
        if engine is None:
            return Load(rate=self._rate.value)
        return Load(engine.num_active, engine.num_waiting, engine.pixel_steps, self._rate.value)

    @property
    def plan(self) -> str:
        """Empty, as nothing is routed."""
        return ""

    @property
    def replicas(self) -> Sequence[ReplicaState]:
        """State of the only replica, this process."""
        return (ReplicaState("local", os.getpid(), self.health, self.load),)

    async def start(self) -> None:
        """Start the engine and serve the warm-up. Raises RunError if a request of the warm-up fails."""
        self._loop = asyncio.get_running_loop()
        self._start_engine()
        await self._loop.run_in_executor(None, self._has_started.wait)
        await self._draw(self._setup.warm_up)
        self._health = Health.READY
        self._watching = self._loop.create_task(self._watch())

    async def _watch(self) -> None:
        """Call `on_stopped` after a long stall."""
        stalled_s = 0.0
        while stalled_s < HUNG_AFTER_S:
            await asyncio.sleep(_LOOK_EVERY_S)
            # Not by the clock: the whole process may have been stopped meanwhile.
            stalled_s = stalled_s + _LOOK_EVERY_S if self.health is Health.STALLED else 0.0
        self.on_stopped(f"the engine has made no progress for {HUNG_AFTER_S / 60:g} min")

    async def _draw(self, batches: Sequence[Sequence[Request]]) -> None:
        """Serve one batch after the other and discard the images. Raises RunError if a request has no image."""
        numbers = itertools.count()
        for batch in batches:
            waiting = [_EndFollower(self._loop) for _ in batch]
            for request, follower in zip(batch, waiting, strict=True):
                own = replace(request, request_id=next(numbers), arrival_s=self._loop.time(), slo_s=None)
                await self._submit(own, follower)
            for follower in waiting:
                record = await follower.ended
                if record.status != "completed":
                    raise RunError(f"warming up: {record.reason}")

    async def submit(
        self, request: Request, follower: Follower, *, num_partials: int = 0, follows_steps: bool = False
    ) -> None:
        """Submit a request to the engine. Raises ApiError (503) unless the engine runs."""
        if self._health not in (Health.READY, Health.STALLED):
            reason = f"the engine is {self._health.value}" + (f": {self.trouble}" if self.trouble else "")
            raise not_ready(reason)
        await self._submit(request, follower, num_partials, follows_steps)

    async def _submit(
        self, request: Request, follower: Follower, num_partials: int = 0, follows_steps: bool = False
    ) -> None:
        number = request.request_id
        self._followers[number] = follower
        if self._polling is None or self._polling.done():
            self._polling = self._loop.create_task(self._poll())
        watch = Watch(
            num_partials=num_partials,
            on_step=partial(self._post if follows_steps else self._note_steps, follower.on_step, number),
            may_lag=not follows_steps,
            on_partial=partial(self._post, follower.on_partial, number),
        )
        submitting = self._pool.submit(self._check_and_submit, request, watch)
        try:
            await asyncio.wrap_future(submitting)
        except BaseException as error:
            self._followers.pop(number, None)
            if isinstance(error, asyncio.CancelledError):
                # The thread continues, and the engine can cancel only a request that was submitted.
                submitting.add_done_callback(lambda _: self.cancel(number, "its client has left"))
            raise

    def _check_and_submit(self, request: Request, watch: Watch | None) -> None:
        with self._submitting:
            self._submit_to_engine(request, watch)

    def _submit_to_engine(self, request: Request, watch: Watch | None) -> None:
        engine, setup = self._engine, self._setup
        if engine is None:
            raise not_ready("the engine is restarting")
        if setup.predictor is not None:
            # A size that the predictor does not know would crash the engine when the policy asks for it.
            try:
                setup.predictor.step_latency_s((request.resolution,))
            except UsageError as error:
                raise invalid(str(error), "size") from error
        # The engine has a clock of its own, which runs at the same rate.
        arrival_s = max(0.0, engine.now_s() - (time.monotonic() - request.arrival_s))
        own = setup.system.adapt(replace(request, arrival_s=arrival_s))
        try:
            engine.submit(own, standalone_s=setup.standalone_s(request), watch=watch)
        except RuntimeError:
            raise not_ready("the engine is restarting") from None

    def cancel(self, request_id: int, reason: str) -> None:
        """Cancel an open request before the engine's next step."""
        if self._engine is not None:
            self._engine.cancel(request_id, reason)

    async def stop(self) -> None:
        """Abort the engine, wait for its end, and close the model."""
        self._is_stopping = True
        self._health = Health.STOPPED
        if self._watching is not None:
            self._watching.cancel()
        if self._engine is not None:
            self._engine.abort()
        # Otherwise we would wait for a stage that hangs.
        self._setup.model.abort_stages()
        if self._running is not None:
            await asyncio.wait([asyncio.wrap_future(self._running)])
        self._setup.model.close()
        self._thread.shutdown(wait=False)
        self._pool.shutdown(wait=False)

    def _start_engine(self) -> None:
        self._has_started.clear()
        self._running = self._thread.submit(self._run)

    def _run(self) -> None:
        setup = self._setup
        try:
            engine = Engine(
                setup.model,
                get_policy(setup.system.policy),
                predictor=setup.predictor,
                max_batch_size=setup.max_batch_size,
                collector=_LoopCollector(self),
                preview=self._preview,
                records_templates=setup.records_templates,
                max_failures=MAX_FAILURES,
            )
            engine.start()
            self._engine = engine
            if self._is_stopping:  # `stop` found no engine to abort
                engine.abort()
            self._has_started.set()
            self._post(self._on_started)
            engine.run()
        except BaseException as error:  # noqa: BLE001  whatever it is, the server goes on
            self._error = error
            if isinstance(error, PsctlError):
                sys.stderr.write(f"The engine has stopped: {error}\n")
            else:
                traceback.print_exc()
        self._has_started.set()
        if not self._is_stopping:
            self._post(self._on_crash)

    def _on_crash(self) -> None:
        """Restart the engine, unless it has crashed too often."""
        self._engine, self._health = None, Health.RESTARTING
        if not self._restarts.allow(time.monotonic()):
            self._health = Health.STOPPED
            times = f"{MAX_RESTARTS + 1} times within {RESTARTS_WITHIN_S / 60:g} min"
            self.on_stopped(f"the engine has crashed {times}, the last time with {self.trouble}")
            return
        self._start_engine()

    def _on_started(self) -> None:
        if self._health is not Health.RESTARTING:
            return
        if isinstance(self._error, RunError):
            self._proof = self._loop.create_task(self._prove(self._engine))
        else:
            self._health = Health.READY

    async def _prove(self, engine: Engine | None) -> None:
        """Become ready once the new engine has drawn the first batch of the warm-up.

        It uses the model of the previous engine, for which everything failed. If it cannot draw either, that is another
        crash.
        """
        assert engine is not None
        previous_error = self._error
        try:
            await self._draw(self._setup.warm_up[:1])
        except (RunError, ApiError) as error:
            if self._error is previous_error:
                self._error = error
            engine.abort()
            return
        if engine is not self._engine:
            return
        # The requests were at fault, so the crash does not count.
        self._restarts.ended_s.pop()
        self._health = Health.READY

    def _post(self, call: Callable[..., None], *args: Any) -> None:
        """Schedule a call on the event loop. Thread-safe; does nothing once the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the loop is closed
            return

    def _note_steps(self, on_step: Callable[[int, int], None], number: int, steps_done: int) -> None:
        self._steps[number] = steps_done

    async def _poll(self) -> None:
        """Process the steps of the engine several times a second, while any request is open.

        Waking the event loop for each step takes a core from it: single requests took a fifth longer on 2 cores.
        """
        while self._followers:
            await asyncio.sleep(_POLL_S)
            self._process_steps()

    def _process_steps(self) -> None:
        while self._rows:
            self._on_step_row(self._rows.popleft())
        for number in list(self._steps):
            steps_done = self._steps.pop(number)
            if (follower := self._followers.get(number)) is not None:
                follower.on_step(number, steps_done)

    def _on_end(self, record: RequestRecord, image: "Image | None") -> None:
        self._process_steps()
        follower = self._followers.pop(record.request_id, None)
        if follower is not None:
            follower.on_end(record, image)

    def _on_step_row(self, row: StepRow) -> None:
        self._rate.note(row.pixels, row.duration_s + row.schedule_s)
        self.on_row(row)


class _LoopCollector(Collector):
    """Collector that forwards records and steps of an engine to the event loop."""

    def __init__(self, backend: LocalBackend) -> None:
        self._backend = backend

    def on_finish(self, record: RequestRecord, image: "Image | None", latents: Any) -> None:
        self._backend._post(self._backend._on_end, record, image)

    def on_step(self, row: StepRow) -> None:
        backend = self._backend
        num_failed = backend._setup.model.stepper.batch_failures.count
        if num_failed != backend._num_failed:
            backend._num_failed, backend._failed_s = num_failed, time.monotonic()
        backend._rows.append(row)


class _EndFollower(Follower):
    """Follower that waits for the end of a request of the warm-up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ended: asyncio.Future[RequestRecord] = loop.create_future()

    def on_end(self, record: RequestRecord, image: "Image | None") -> None:
        self.ended.set_result(record)
