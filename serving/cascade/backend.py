"""The backend of a cascade, which serves HTTP requests with a light and a heavy model in worker processes.

The dispatcher runs in a thread of the server process that waits for both workers and clients. Plans are made in this
thread, so that no response waits for them. No torch.
"""

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.errors import PsctlError
from ...data.requests import Request
from ..core.request_state import RequestRecord
from ..core.step_row import StepRow
from ..fleet import processes
from ..server.backend import Follower, Health, Load, ReplicaState
from ..server.drain_rate import DrainRate
from ..server.errors import invalid, not_ready
from .dispatcher import Dispatcher
from .fleet import cascade_fleet
from .legs import LEGS, Leg
from .result import CascadeResult
from .slots import WorkerSlot
from .worker import WorkerSettings, image_file

if TYPE_CHECKING:
    from PIL.Image import Image


class CascadeBackend:
    """Implementation of `server.backend.Backend` by a cascade. It has no partial images.

    Args:
        worker: settings of each worker, except its image folder. Requests must have one of the sizes of its models.
        num_workers: number of workers.
        names: names of both models for clients.
        make: builds the dispatcher from a callback for each final record, and the result that collects records.
        on_note: called with a one-line message when a worker dies, is killed or is restarted.

    Attributes:
        on_stopped, on_row: callbacks of `Backend`; `on_row` is never called.
    """

    def __init__(
        self,
        worker: WorkerSettings,
        num_workers: int,
        names: Mapping[Leg, str],
        make: Callable[[Callable[[RequestRecord], None], CascadeResult], Dispatcher],
        *,
        on_note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.on_stopped: Callable[[str], None] = lambda reason: None
        self.on_row: Callable[[StepRow], None] = lambda row: None
        self._names, self._health = names, Health.STARTING
        self._folder = tempfile.TemporaryDirectory(prefix="psctl-cascade-", ignore_cleanup_errors=True)
        self._settings = replace(worker, image_dir=Path(self._folder.name), reports_steps=True)
        # Final records go to clients; none are kept.
        self._dispatcher = make(partial(self._post, self._ended), CascadeResult.keeping_last(0))
        steps = partial(self._post, self._stepped)
        self._fleet = cascade_fleet(self._settings, num_workers, self._dispatcher, on_note=on_note, on_steps=steps)
        self._open: dict[int, tuple[Request, Follower]] = {}
        self._trouble = ""
        self._rate = DrainRate()
        self._busy_from_s, self._drawn = 0.0, 0
        self._thread = threading.Thread(target=self._run, name="psctl-cascade", daemon=True)

    @property
    def health(self) -> Health:
        """Health of the cascade: while it serves, `restarting` if no worker is running, and `stalled` if none of those
        that are sends anything, or if the dispatcher hangs. Requests that arrive meanwhile wait.
        """
        if self._health is not Health.READY:
            return self._health
        if self._fleet.is_stuck:
            return Health.STALLED
        running = {slot.index for slot in self._dispatcher.slots if slot.worker is not None}
        if not running:
            return Health.RESTARTING
        return Health.STALLED if running <= self._fleet.stalled else Health.READY

    @property
    def trouble(self) -> str:
        """Reason why the cascade has stopped, or why no worker draws; empty otherwise."""
        match self.health:
            case Health.RESTARTING:
                return "no worker is running"
            case Health.STALLED if self._fleet.is_stuck:
                return f"the dispatcher has hung for {processes.STUCK_S:g} s"
            case Health.STALLED:
                return f"no worker has sent anything for {processes.STALLED_S:g} s"
        return self._trouble

    @property
    def load(self) -> Load:
        """Load over all workers, with the requests that wait in the dispatcher."""
        slots = self._dispatcher.slots
        waiting = sum(slot.num_waiting for slot in slots) + self._dispatcher.num_queued
        is_open = self._dispatcher.num_open
        pending = float(sum(slot.work.pixel_steps for slot in slots))
        return Load(max(0, is_open - waiting), min(waiting, is_open), pending, self._rate.value)

    @property
    def replicas(self) -> Sequence[ReplicaState]:
        """State of each worker, labelled with the model that it serves."""
        pids, stalled = self._fleet.pids, self._fleet.stalled

        def health_of(slot: WorkerSlot) -> Health:
            if not slot.is_accepting:
                return Health.RESTARTING
            return Health.STALLED if slot.index in stalled else Health.READY

        return tuple(
            ReplicaState(
                f"{slot.index} ({slot.leg or 'light, heavy'})",
                pids.get(slot.index, 0),
                health_of(slot),
                Load(max(0, slot.work.num_requests - slot.num_waiting), slot.num_waiting, float(slot.work.pixel_steps)),
            )
            for slot in self._dispatcher.slots
        )

    @property
    def plan(self) -> str:
        """The current plan, in words."""
        plan, heavy = self._dispatcher.plan, self._names["heavy"]
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
            raise not_ready(f"the cascade is {self._health.value}")
        if num_partials:
            raise invalid(f"partial_images is {num_partials}, but a cascade has none", "partial_images")
        if request.edit is not None:
            raise invalid("an image is given, but a cascade draws new ones only", "image")
        sizes = self._settings.models["light"].batches.latency_s
        if str(request.resolution) not in sizes:
            raise invalid(f"size is {request.resolution}, but a cascade draws {', '.join(sizes)} only", "size")
        if not self._open:
            self._busy_from_s, self._drawn = self._loop.time(), 0
        self._open[request.request_id] = request, follower
        # The fleet's clock has another origin but the same rate.
        arrival_s = max(0.0, self._fleet.now_s() - (self._loop.time() - request.arrival_s))
        self._fleet.post(partial(self._dispatcher.arrive, replace(request, arrival_s=arrival_s)))

    def cancel(self, request_id: int, reason: str) -> None:
        """Cancel a request; ids of requests that are not open are ignored."""
        self._fleet.post(lambda now_s: self._dispatcher.cancel(request_id, now_s, reason))

    async def stop(self) -> None:
        """Stop the workers, wait for the dispatcher's thread, and delete the image folder."""
        self._health = Health.STOPPED
        self._fleet.end()
        if self._thread.is_alive():
            await self._loop.run_in_executor(None, self._thread.join)
        self._folder.cleanup()

    def _run(self) -> None:
        reason = "all workers have gone"
        try:
            self._fleet.run(on_start=partial(self._post, self._has_started))
        except BaseException as error:  # noqa: BLE001  clients must get an answer whatever fails
            reason = str(error) if isinstance(error, PsctlError) else f"the dispatcher has crashed: {error!r}"
            self._post(self._has_started, error)
        self._post(self._has_stopped, reason)

    def _has_started(self, error: BaseException | None = None) -> None:
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
            own = replace(record, image_path=None, served_by=self._names[leg] if leg in LEGS else None)
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
            with contextlib.suppress(OSError):  # the client must get an answer; `stop` deletes the folder
                image_file(self._settings, record.request_id, leg).unlink(missing_ok=True)
        return image

    def _note_rate(self, record: RequestRecord) -> None:
        """Update the drain rate with a completed image, which counts with the heavy model's steps, as in admission."""
        self._drawn += record.resolution.pixels * self._settings.models["heavy"].num_steps
        busy_s = self._loop.time() - self._busy_from_s
        if busy_s > 1.0:
            self._rate.note(self._drawn, busy_s)
            self._busy_from_s, self._drawn = self._loop.time(), 0
