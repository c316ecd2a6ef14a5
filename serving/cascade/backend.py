"""The backend of a cascade, which serves HTTP requests with a light and a heavy model in worker processes.

The dispatcher runs in a thread of the server process that waits for both workers and clients. Plans are made in this
thread, so that no response waits for them. No torch.
"""

import asyncio
import contextlib
import math
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.errors import PsctlError
from ...data.requests import Request
from ..core.request_state import RequestRecord
from ..core.step_row import StepRow
from ..server.backend import Follower, Health, Load, ReplicaState
from ..server.drain_rate import DrainRate
from ..server.errors import ApiError, invalid
from .cluster import CascadeCluster, Source, settings_for
from .dispatcher import Dispatcher
from .leg_model import LegModel
from .legs import LEGS, Leg
from .result import CascadeResult
from .worker import WorkerSettings, image_file

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class CascadeSetup:
    """Settings of the server's cascade.

    Attributes:
        worker: settings of each worker, except its image folder.
        num_workers, num_cores: number of workers, and of cores for them.
        models: light and heavy model; requests must have one of their sizes.
        names: names of both models for clients.
        make: builds the dispatcher from a callback for each final record, and the result that collects records.
    """

    worker: WorkerSettings
    num_workers: int
    num_cores: int
    models: Mapping[Leg, LegModel]
    names: Mapping[Leg, str]
    make: Callable[[Callable[[RequestRecord], None], CascadeResult], Dispatcher]


class _Clients(Source):
    """Requests of clients, passed to the dispatcher's thread as calls."""

    def __init__(self) -> None:
        self._wake_reader, self._wake_writer = Pipe(duplex=False)
        self.wake_connection = self._wake_reader
        self._calls: deque[Callable[[Dispatcher, float], None]] = deque()

    @property
    def is_exhausted(self) -> bool:
        return False

    @property
    def next_s(self) -> float:
        return math.inf

    def post(self, call: Callable[[Dispatcher, float], None]) -> None:
        """Run a call in the dispatcher's thread."""
        self._calls.append(call)
        self._wake_writer.send_bytes(b"1")

    def take(self, dispatcher: Dispatcher, now_s: float) -> None:
        while self._wake_reader.poll():
            self._wake_reader.recv_bytes()
        while self._calls:
            self._calls.popleft()(dispatcher, now_s)


class CascadeBackend:
    """Implementation of `server.backend.Backend` by a cascade. It has no partial images.

    Args:
        setup: settings of the cascade.
        on_note: called with a one-line message when a worker dies, is killed or is restarted.

    Attributes:
        on_stopped, on_row: callbacks of `Backend`; `on_row` is never called.
    """

    def __init__(self, setup: CascadeSetup, *, on_note: Callable[[str], None] = lambda text: None) -> None:
        self.on_stopped: Callable[[str], None] = lambda reason: None
        self.on_row: Callable[[StepRow], None] = lambda row: None
        self._setup, self._health = setup, Health.STARTING
        self._folder = tempfile.TemporaryDirectory(prefix="psctl-cascade-", ignore_cleanup_errors=True)
        self._settings = replace(setup.worker, image_dir=Path(self._folder.name), reports_steps=True)
        self._clients = _Clients()
        # Final records go to clients; none are kept.
        self._dispatcher = setup.make(partial(self._post, self._ended), CascadeResult.keeping_last(0))
        self._cluster = CascadeCluster(
            settings_for(self._settings, setup.num_workers, setup.num_cores),
            self._dispatcher,
            on_note=on_note,
            on_steps=partial(self._post, self._stepped),
        )
        self._open: dict[int, tuple[Request, Follower]] = {}
        self._trouble = ""
        self._rate = DrainRate()
        self._busy_from_s, self._drawn = 0.0, 0
        self._thread = threading.Thread(target=self._run, name="psctl-cascade", daemon=True)

    @property
    def health(self) -> Health:
        """Health of the cascade."""
        return self._health

    @property
    def trouble(self) -> str:
        """Reason why the cascade has stopped; empty otherwise."""
        return self._trouble

    @property
    def load(self) -> Load:
        """Load over all workers, with the requests that wait in the dispatcher."""
        slots = self._dispatcher.slots
        waiting = (
            sum(slot.worker.num_waiting for slot in slots if slot.worker is not None) + self._dispatcher.num_queued
        )
        is_open = self._dispatcher.num_open
        pending = float(sum(slot.pending_pixel_steps for slot in slots))
        return Load(max(0, is_open - waiting), min(waiting, is_open), pending, self._rate.value)

    @property
    def replicas(self) -> Sequence[ReplicaState]:
        """State of each worker, labelled with the model that it serves."""
        pids = self._cluster.pid_of
        return tuple(
            ReplicaState(
                f"{slot.index} ({slot.leg or 'light, heavy'})",
                pids.get(slot.index, 0),
                Health.READY if slot.is_accepting else Health.RESTARTING,
                Load(
                    max(0, len(slot.assignments) - (slot.worker.num_waiting if slot.worker else 0)),
                    slot.worker.num_waiting if slot.worker else 0,
                    float(slot.pending_pixel_steps),
                ),
            )
            for slot in self._dispatcher.slots
        )

    @property
    def plan(self) -> str:
        """The current plan, in words."""
        plan, heavy = self._dispatcher.plan, self._setup.names["heavy"]
        if plan.threshold is None:
            return f"{plan.share:.0%} of requests go to {heavy}, whatever their images are worth"
        return (
            f"images of a confidence below {plan.threshold:.2f} are drawn again by {heavy}: {plan.share:.0%} are "
            f"expected ({plan.status})"
        )

    async def start(self) -> None:
        """Start the workers, and return when they are ready. Raises RunError: a worker cannot load."""
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._thread.start()
        await self._started
        self._health = Health.READY

    async def submit(
        self, request: Request, follower: Follower, *, num_partials: int = 0, follows_steps: bool = False
    ) -> None:
        """Submit a request. The steps reported to the follower are those of the model that works on the request.

        Raises:
            ApiError: the cascade is not ready, or the request is an edit, wants partial images, or has a size that the
                models are not profiled for.
        """
        if self._health is not Health.READY:
            raise ApiError(503, f"the cascade is {self._health.value}", code="not_ready", headers={"Retry-After": "5"})
        if num_partials:
            raise invalid(f"partial_images is {num_partials}, but a cascade has none", "partial_images")
        if request.edit is not None:
            raise invalid("an image is given, but a cascade draws new ones only", "image")
        sizes = self._setup.models["light"].batches.latency_s
        if str(request.resolution) not in sizes:
            raise invalid(f"size is {request.resolution}, but a cascade draws {', '.join(sizes)} only", "size")
        if not self._open:
            self._busy_from_s, self._drawn = self._loop.time(), 0
        self._open[request.request_id] = request, follower
        # The cluster's clock has another origin but the same rate.
        arrival_s = max(0.0, self._cluster.now_s() - (self._loop.time() - request.arrival_s))
        own = replace(request, arrival_s=arrival_s)
        self._clients.post(lambda dispatcher, now_s: dispatcher.arrive(own, now_s))

    def cancel(self, request_id: int, reason: str) -> None:
        """Cancel a request; ids of requests that are not open are ignored."""
        self._clients.post(lambda dispatcher, now_s: dispatcher.cancel(request_id, now_s, reason))

    async def stop(self) -> None:
        """Stop the workers, wait for the dispatcher's thread, and delete the image folder."""
        self._health = Health.STOPPED
        self._cluster.end()
        if self._thread.is_alive():
            self._clients.post(lambda dispatcher, now_s: None)
            await self._loop.run_in_executor(None, self._thread.join)
        self._folder.cleanup()

    def _run(self) -> None:
        reason = "all workers have gone"
        try:
            self._cluster.run(self._clients, partial(self._post, self._has_started, None))
        except PsctlError as error:
            reason = str(error)
            self._post(self._has_started, error)
        except BaseException as error:  # noqa: BLE001  clients must get an answer whatever fails
            reason = f"the dispatcher has crashed: {error!r}"
            self._post(self._has_started, error)
        self._post(self._has_stopped, reason)

    def _has_started(self, error: BaseException | None) -> None:
        if self._started.done():
            return
        if error is None:
            self._started.set_result(None)
        else:
            self._started.set_exception(error)

    def _has_stopped(self, reason: str) -> None:
        given_up, self._open = self._open, {}
        for request, follower in given_up.values():
            record = RequestRecord.of(request)
            record.close("failed", request.arrival_s, reason)
            follower.on_end(record, None)
        if self._health is not Health.STOPPED:
            self._health, self._trouble = Health.STOPPED, reason
            self.on_stopped(reason)

    def _post(self, call: Callable[..., None], *given: Any) -> None:
        """Schedule a call on the event loop, from the dispatcher's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call, *given)

    def _stepped(self, request_id: int, steps_done: int) -> None:
        if request_id in self._open:
            self._open[request_id][1].on_step(request_id, steps_done)

    def _ended(self, record: RequestRecord) -> None:
        work = self._loop.run_in_executor(None, self._read_image, record)
        work.add_done_callback(lambda done: self._deliver(record, done.result()))

    def _deliver(self, record: RequestRecord, image: "Image | None") -> None:
        _, follower = self._open.pop(record.request_id, (None, None))
        if record.status == "completed":
            self._note_rate(record)
        if follower is not None:
            leg = record.served_by
            own = replace(record, image_path=None, served_by=self._setup.names[leg] if leg in LEGS else None)
            follower.on_end(own, image)

    def _read_image(self, record: RequestRecord) -> "Image | None":
        """Read the image of a request and delete its files; a request whose image cannot be read fails."""
        from PIL import Image

        image = None
        try:
            if record.status == "completed" and record.image_path is not None:
                with Image.open(record.image_path) as file:
                    image = file.convert("RGB")
        except Exception as error:  # noqa: BLE001  the client must get an answer whatever fails
            record.status, record.reason = "failed", f"its image cannot be read: {error}"
        for leg in LEGS:
            image_file(self._settings, record.request_id, leg).unlink(missing_ok=True)
        return image

    def _note_rate(self, record: RequestRecord) -> None:
        """Update the drain rate with a completed image, which counts with the heavy model's steps, as in admission."""
        self._drawn += record.resolution.pixels * self._setup.models["heavy"].num_steps
        busy_s = self._loop.time() - self._busy_from_s
        if busy_s > 1.0:
            self._rate.note(self._drawn, busy_s)
            self._busy_from_s, self._drawn = self._loop.time(), 0
