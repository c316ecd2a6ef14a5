"""The backend of one process: an engine in a thread of its own, made anew when it crashes."""

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
from ...data.resolution import parse
from ..core.request_state import RequestRecord
from ..core.step_row import StepRow
from ..core.threads import compute_alone
from ..engine.collectors import Collector
from ..engine.engine import Engine
from ..engine.preview import Preview
from ..engine.side_stages import MAX_FAILURES
from ..engine.watch import Watch
from ..scheduling.policies import StepLatencyPredictor, get_policy
from ..scheduling.systems import System
from .backend import Follower, Health, Load, ReplicaState
from .drain_rate import DrainRate
from .errors import ApiError, invalid

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..models.served import ServedModel

MAX_RESTARTS, RESTARTS_WITHIN_S = 3, 600.0
TOLD_FOR_S = 600.0
"""How long probes report that steps of batches have failed, as where memory is full."""
_LOOK_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class LocalSetup:
    """What an engine of the server is made of.

    Attributes:
        model: loaded and tuned.
        system: whose policy and share of steps requests get.
        predictor: step latencies, for policies that look ahead.
        max_batch_size: largest number of requests in the batch.
        standalone_s: latency of a request alone, for policies that ask for it; called where requests are handed in.
        records_templates: as of `Engine`.
        warm_up: served before the backend is ready, one batch after the other. The first of them proves that an engine
            can draw, after one for which everything failed.
    """

    model: "ServedModel"
    system: System
    predictor: StepLatencyPredictor | None = None
    max_batch_size: int = 16
    standalone_s: Callable[[Request], float | None] = lambda request: None
    warm_up: Sequence[Sequence[Request]] = ()
    records_templates: bool = False


def engine_thread() -> ThreadPoolExecutor:
    """The one thread of a process that computes with torch: it loads the model, measures, and runs the engine.

    OpenMP keeps workers for each thread that computes. Where these are more than there are processors, they no longer
    spin from one parallel region to the next but sleep (libgomp): with a model loaded in the main thread, steps of a
    second one took 2.4 times as long on 2 cores.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="psctl-engine")


class LocalBackend:
    """See `Backend`. A crash of the engine ends the requests that are open; the next engine has the same model.

    Args:
        setup: what the engine is made of.
        thread: in which the model was loaded.
        on_row: told of every step, on the event loop.

    Attributes:
        on_stopped: see `Backend`.
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
        self._crashes: deque[float] = deque(maxlen=MAX_RESTARTS + 1)
        self._error: BaseException | None = None
        self._proving: asyncio.Task[None] | None = None
        self._rate = DrainRate()
        self._preview = Preview()
        self._num_failed, self._failed_s = 0, -math.inf
        # `check_request` may run torch: not on the event loop.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="psctl-submit", initializer=compute_alone)
        self._has_begun = threading.Event()
        self._followers: dict[int, Follower] = {}
        # Filled by the engine's thread, emptied by the event loop: see `_look`.
        self._rows: deque[StepRow] = deque()
        self._steps: dict[int, int] = {}
        self._looking: asyncio.Task[None] | None = None

    @property
    def health(self) -> Health:
        """See `Backend`."""
        engine = self._engine
        if self._health is not Health.READY or engine is None:
            return self._health
        return Health.STALLED if engine.is_stalled else Health.READY

    @property
    def trouble(self) -> str:
        """Error that has stopped the engine, or failures of batches in the last minutes; "" if there is none."""
        error = self._error
        if error is not None and self._health in (Health.RESTARTING, Health.STOPPED):
            return str(error) if isinstance(error, PsctlError) else f"{type(error).__name__}: {error}".splitlines()[0]
        if self._health is Health.READY and time.monotonic() - self._failed_s < TOLD_FOR_S:
            found = self._setup.model.stepper.batch_failures
            return f"steps of batches fail and are repeated in halves: {found.count} so far, the first by {found.first}"
        return ""

    @property
    def load(self) -> Load:
        """See `Backend`."""
        engine = self._engine
        if engine is None:
            return Load(rate=self._rate.value)
        return Load(engine.num_active, engine.num_waiting, engine.pixel_steps, self._rate.value)

    @property
    def plan(self) -> str:
        """See `Backend`."""
        return ""

    @property
    def replicas(self) -> Sequence[ReplicaState]:
        """See `Backend`: this process."""
        return (ReplicaState("local", os.getpid(), self.health, self.load),)

    async def start(self) -> None:
        """See `Backend`. Raises RunError if a request of the warm-up fails."""
        self._loop = asyncio.get_running_loop()
        self._begin()
        await self._loop.run_in_executor(None, self._has_begun.wait)
        await self._draw(self._setup.warm_up)
        self._health = Health.READY

    async def _draw(self, batches: Sequence[Sequence[Request]]) -> None:
        """Draw one batch after the other, and drop the images. Raises RunError: a request has no image."""
        numbers = itertools.count()
        for batch in batches:
            waiting = [_Awaited(self._loop) for _ in batch]
            for request, awaited in zip(batch, waiting, strict=True):
                own = replace(request, request_id=next(numbers), arrival_s=self._loop.time(), slo_s=None)
                await self._submit(own, awaited)
            for awaited in waiting:
                record = await awaited.ended
                if record.status != "completed":
                    raise RunError(f"warming up: {record.reason}")

    async def submit(
        self, request: Request, follower: Follower, *, num_partials: int = 0, follows_steps: bool = False
    ) -> None:
        """See `Backend`."""
        if self._health not in (Health.READY, Health.STALLED):
            reason = f"the engine is {self._health.value}" + (f": {self.trouble}" if self.trouble else "")
            raise ApiError(503, reason, code="not_ready", headers={"Retry-After": "5"})
        await self._submit(request, follower, num_partials, follows_steps)

    async def _submit(
        self, request: Request, follower: Follower, num_partials: int = 0, follows_steps: bool = False
    ) -> None:
        number = request.request_id
        self._followers[number] = follower
        if self._looking is None or self._looking.done():
            self._looking = self._loop.create_task(self._look())
        watch = Watch(
            num_partials=num_partials,
            on_step=partial(self._post if follows_steps else self._note, follower.on_step, number),
            may_lag=not follows_steps,
            on_partial=partial(self._post, follower.on_partial, number),
        )
        handing_in = self._pool.submit(self._hand_in, request, watch)
        try:
            await asyncio.wrap_future(handing_in)
        except BaseException as error:
            self._followers.pop(number, None)
            if isinstance(error, asyncio.CancelledError):
                # The thread goes on: only once the engine has it can the engine give it up.
                handing_in.add_done_callback(lambda _: self.cancel(number, "its client has left"))
            raise

    def _hand_in(self, request: Request, watch: Watch | None) -> None:
        engine, setup = self._engine, self._setup
        if engine is None:
            raise ApiError(503, "the engine is restarting", code="not_ready", headers={"Retry-After": "5"})
        if setup.predictor is not None:
            # A size that it does not know would end the engine where the policy asks about it.
            try:
                setup.predictor.step_latency_s((request.resolution,))
            except UsageError as error:
                raise invalid(str(error), "size") from error
        # The engine's clock is another one; both run alike.
        arrival_s = max(0.0, engine.now_s() - (time.monotonic() - request.arrival_s))
        own = setup.system.adapt(replace(request, arrival_s=arrival_s))
        try:
            engine.submit(own, standalone_s=setup.standalone_s(request), watch=watch)
        except RuntimeError:
            raise ApiError(503, "the engine is restarting", code="not_ready", headers={"Retry-After": "5"}) from None

    def cancel(self, request_id: int, reason: str) -> None:
        """See `Backend`."""
        if self._engine is not None:
            self._engine.cancel(request_id, reason)

    async def stop(self) -> None:
        """See `Backend`."""
        self._is_stopping = True
        self._health = Health.STOPPED
        if self._engine is not None:
            self._engine.abort()
        # One that stands still would be waited for.
        self._setup.model.abort_stages()
        if self._running is not None:
            await asyncio.wait([asyncio.wrap_future(self._running)])
        self._setup.model.close()
        self._thread.shutdown(wait=False)
        self._pool.shutdown(wait=False)

    def _begin(self) -> None:
        self._has_begun.clear()
        self._running = self._thread.submit(self._run)

    def _run(self) -> None:
        setup = self._setup
        try:
            engine = Engine(
                setup.model,
                get_policy(setup.system.policy),
                predictor=setup.predictor,
                max_batch_size=setup.max_batch_size,
                collector=_Posts(self),
                preview=self._preview,
                records_templates=setup.records_templates,
                max_failures=MAX_FAILURES,
            )
            engine.start()
            self._engine = engine
            if self._is_stopping:  # `stop` found no engine to abort
                engine.abort()
            self._has_begun.set()
            self._post(self._began)
            engine.run()
        except BaseException as error:  # noqa: BLE001  whatever it is, the server goes on
            self._error = error
            if isinstance(error, PsctlError):
                sys.stderr.write(f"The engine has stopped: {error}\n")
            else:
                traceback.print_exc()
        self._has_begun.set()
        if not self._is_stopping:
            self._post(self._crashed)

    def _crashed(self) -> None:
        """Begin anew, unless that has been tried too often."""
        now_s = time.monotonic()
        self._crashes.append(now_s)
        self._engine, self._health = None, Health.RESTARTING
        if len(self._crashes) > MAX_RESTARTS and now_s - self._crashes[0] < RESTARTS_WITHIN_S:
            self._health = Health.STOPPED
            times = f"{len(self._crashes)} times within {RESTARTS_WITHIN_S / 60:g} min"
            self.on_stopped(f"the engine has crashed {times}, the last time with {self.trouble}")
            return
        self._begin()

    def _began(self) -> None:
        if self._health is not Health.RESTARTING:
            return
        if isinstance(self._error, RunError):
            self._proving = self._loop.create_task(self._prove(self._engine))
        else:
            self._health = Health.READY

    async def _prove(self, engine: Engine | None) -> None:
        """Serve again if the engine can draw, as it has the model of the one before, for which everything failed; if it
        cannot, it has crashed, too.
        """
        assert engine is not None
        ended_by = self._error
        try:
            await self._draw(self._setup.warm_up[:1])
        except (RunError, ApiError) as error:
            if self._error is ended_by:
                self._error = error
            engine.abort()
            return
        if engine is not self._engine:
            return
        # It was the requests' own fault.
        self._crashes.pop()
        self._health = Health.READY

    def _post(self, call: Callable[..., None], *given: Any) -> None:
        """Have something called on the event loop, from any thread."""
        try:
            self._loop.call_soon_threadsafe(call, *given)
        except RuntimeError:  # the loop is closed: nobody listens any more
            return

    def _note(self, on_step: Callable[[int, int], None], number: int, steps_done: int) -> None:
        self._steps[number] = steps_done

    async def _look(self) -> None:
        """Take what steps have left, some times a second, while any request is open.

        Waking the event loop for each of them takes a core from a step: single requests took a fifth longer on 2 cores.
        """
        while self._followers:
            await asyncio.sleep(_LOOK_EVERY_S)
            self._take()

    def _take(self) -> None:
        while self._rows:
            self._stepped(self._rows.popleft())
        for number in list(self._steps):
            steps_done = self._steps.pop(number)
            if (follower := self._followers.get(number)) is not None:
                follower.on_step(number, steps_done)

    def _ended(self, record: RequestRecord, image: "Image | None") -> None:
        self._take()
        follower = self._followers.pop(record.request_id, None)
        if follower is not None:
            follower.on_end(record, image)

    def _stepped(self, row: StepRow) -> None:
        pixels = sum(parse(name).pixels * count for name, count in row.resolutions.items())
        self._rate.note(pixels, row.duration_s + row.schedule_s)
        self.on_row(row)


class _Posts(Collector):
    """Hands on what an engine tells, to the event loop."""

    def __init__(self, backend: LocalBackend) -> None:
        self._backend = backend

    def on_finish(self, record: RequestRecord, image: "Image | None", latents: Any) -> None:
        self._backend._post(self._backend._ended, record, image)

    def on_step(self, row: StepRow) -> None:
        backend = self._backend
        num_failed = backend._setup.model.stepper.batch_failures.count
        if num_failed != backend._num_failed:
            backend._num_failed, backend._failed_s = num_failed, time.monotonic()
        backend._rows.append(row)


class _Awaited(Follower):
    """Waits for the end of a request of the warm-up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ended: asyncio.Future[RequestRecord] = loop.create_future()

    def on_end(self, record: RequestRecord, image: "Image | None") -> None:
        self.ended.set_result(record)
