"""The multi-process backend: replicas that Ray Serve places, starts and restarts, on one machine or a cluster.

Ray does not retry a request that a replica has accepted. When the replica's process dies, the front end submits the
request again from its first step; the same seed gives the same image.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...data.errors import RunError, UsageError
from ...data.requests import Request
from ..core.request_state import RequestRecord, RequestView, Status
from ..core.retries import MAX_DEATHS
from ..core.step_row import StepRow
from ..server.backend import Follower, Health, Load, ReplicaState
from ..server.errors import not_ready
from .book import LoadBook
from .deployment import Deployment, ReplicaPlan, last_line_of
from .messages import Accepted, Ended, PartialImage, Refused, ReplicaStatus, Stepped

if TYPE_CHECKING:
    from ..server.local import LocalSetup

MAX_ATTEMPTS = 3
"""Replicas that a request is sent to, of which `MAX_DEATHS` may die."""
_STATUS_EVERY_S = 0.5
_BUSY_RETRY_S = 0.5
_REASSIGN_AFTER_S = 10.0
"""Requests of a replica that has not answered for this long are sent to another one."""
_UNREADY_AFTER_S = 10.0
"""After this long without any replica, the server reports that it is not ready."""
_REFUSED_AFTER_S = 60.0
"""After this long without any replica, new requests are refused; until then, they wait."""


class ReplicaBackend:
    """A `server.backend.Backend` whose requests are drawn by replicas on Ray Serve. Call `deploy` before `start`.

    Args:
        plan: number and size of the replicas.
        build: builds the parts of an engine and their description in a replica's process; it is pickled.
        book: pending work of each replica, and the router that reads it; None for a book with the default router.

    Attributes:
        on_stopped: called with the reason when the backend has given up, as in `Backend`.
        on_row: called on the event loop with every step of every replica, with some delay.
    """

    def __init__(
        self, plan: ReplicaPlan, build: "Callable[[], tuple[LocalSetup, object]]", *, book: LoadBook | None = None
    ) -> None:
        self._book = book or LoadBook()
        self._deployment = Deployment(plan, build, self._book)
        self.on_stopped: Callable[[str], None] = lambda reason: None
        self.on_row: Callable[[StepRow], None] = lambda row: None
        self._replicas: tuple[ReplicaState, ...] = ()
        self._trouble = ""
        self._answered_s: dict[str, float] = {}
        self._is_stopped = False
        self._last_answer_s = 0.0
        self._open: dict[int, _OpenRequest] = {}
        self._watching: asyncio.Task[None] | None = None

    def deploy(self) -> Any:
        """Start the replicas, wait until they are warm, and return `build`'s description of them.

        Raises as `Deployment.start`.
        """
        return self._deployment.start()

    @property
    def health(self) -> Health:
        """State of the backend; one replica that answers makes it ready, as the others are being started."""
        if self._is_stopped:
            return Health.STOPPED
        if self._watching is None:
            return Health.STARTING
        return Health.READY if self._silent_s < _UNREADY_AFTER_S else Health.RESTARTING

    @property
    def _silent_s(self) -> float:
        """Seconds since any replica answered."""
        return asyncio.get_running_loop().time() - self._last_answer_s

    @property
    def trouble(self) -> str:
        """Reason why no replica draws, or why one of them does not draw as it should; "" if there is none."""
        return (
            f"no replica has answered for {_UNREADY_AFTER_S:g} s" if self.health is Health.RESTARTING else self._trouble
        )

    @property
    def load(self) -> Load:
        """Open requests and pending work; the rate is that of all replicas together."""
        running = sum(entry.steps_done > 0 for entry in self._open.values())
        drawing = [each for each in self._replicas if each.health is not Health.STALLED]
        rates = [each.load.rate for each in drawing if each.load.rate]
        rate = sum(rates) / len(rates) * len(drawing) if rates else None
        return Load(running, len(self._open) - running, self._book.pending(), rate)

    @property
    def plan(self) -> str:
        """Always "": there is no plan to report."""
        return ""

    @property
    def replicas(self) -> Sequence[ReplicaState]:
        """All replicas; those that do not answer are marked as stalled."""
        return self._replicas

    async def start(self) -> None:
        """Start to poll the replicas."""
        self._last_answer_s = asyncio.get_running_loop().time()
        self._watching = asyncio.ensure_future(self._watch())

    async def submit(
        self, request: Request, follower: Follower, *, num_partials: int = 0, follows_steps: bool = False
    ) -> None:
        """Submit a request, as in `Backend`, and wait until a replica has accepted it."""
        if self._is_stopped or self._silent_s > _REFUSED_AFTER_S:
            raise not_ready("no replica is there now")
        loop = asyncio.get_running_loop()
        view = await loop.run_in_executor(None, self._book.view_of, request)
        entry = self._open[request.request_id] = _OpenRequest(
            request, view, follower, num_partials, follows_steps, loop.create_future()
        )
        entry.task = loop.create_task(self._follow(entry))
        try:
            await entry.accepted
        except BaseException:
            # The request was refused, or the submitting task was cancelled: its follower receives nothing.
            entry.is_detached = True
            entry.task.cancel()
            raise

    def cancel(self, request_id: int, reason: str) -> None:
        """Cancel a request, with a reason for its record; does nothing if it is not open."""
        entry = self._open.get(request_id)
        if entry is not None and entry.reason is None and entry.task is not None:
            entry.reason = reason
            entry.task.cancel()

    async def stop(self) -> None:
        """Cancel all open requests and shut the replicas down."""
        self._is_stopped = True
        for number in list(self._open):
            self.cancel(number, "the server is shutting down")
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.gather(*(entry.task for entry in self._open.values() if entry.task), return_exceptions=True)
        await asyncio.get_running_loop().run_in_executor(None, self._deployment.end)

    async def _follow(self, entry: "_OpenRequest") -> None:
        """Have a request drawn, retrying when its replica dies, and report its end to the follower."""
        request, end = entry.request, None
        try:
            for _ in range(MAX_ATTEMPTS):
                # Regardless of its deadline: the next replica's policy drops a request that is late, or serves it late.
                end = await self._attempt(entry)
                if end is None and entry.num_deaths == MAX_DEATHS:
                    end = _end_with(request, "failed", f"{MAX_DEATHS} replicas have died while they drew it")
                if end is not None:
                    break
        except asyncio.CancelledError:
            end = _end_with(request, "cancelled", entry.reason or "the server is shutting down")
        except Exception as error:  # noqa: BLE001  on any error of Ray the client must get an end
            end = _end_with(request, "failed", last_line_of(error))
        finally:
            self._book.release(request.request_id)
            self._open.pop(request.request_id, None)
        if end is None:
            # Not "failed": the request is not the cause.
            end = _end_with(request, "cancelled", f"none of {MAX_ATTEMPTS} replicas in a row has drawn it")
        if not entry.accepted.done():
            if entry.refused is not None:
                entry.accepted.set_exception(entry.refused)
                return
            entry.accepted.set_result(None)
        if not entry.is_detached:
            entry.follower.on_end(end.record, end.image)

    async def _attempt(self, entry: "_OpenRequest") -> Ended | None:
        """Have one replica draw a request; returns None if it died, does not answer, or has no engine now."""
        from ray.exceptions import RayError, RayTaskError

        request, number = entry.request, entry.request.request_id
        waited_s = max(0.0, asyncio.get_running_loop().time() - request.arrival_s)
        self._book.begin(entry.view)
        events = self._deployment.draw(request, waited_s, entry.num_partials, entry.follows_steps)
        entry.steps_done, entry.refused, entry.is_reassigned = 0, None, False
        has_it = False
        try:
            async for message in events:
                self._last_answer_s = asyncio.get_running_loop().time()
                if isinstance(message, Accepted):
                    has_it = True
                    if not entry.accepted.done():
                        entry.accepted.set_result(None)
                elif isinstance(message, Refused):
                    if message.is_busy:
                        entry.refused = not_ready(message.reason)
                        await asyncio.sleep(_BUSY_RETRY_S)
                        break
                    entry.refused = UsageError(message.reason)
                    return _end_with(request, "failed", message.reason)
                elif isinstance(message, Stepped):
                    entry.steps_done = message.steps_done
                    self._book.stepped(number, min(message.steps_done, request.num_steps), request.num_steps)
                    # Steps that another replica has reported already are not reported again.
                    if message.steps_done > entry.most_steps:
                        entry.most_steps = message.steps_done
                        entry.follower.on_step(number, message.steps_done)
                elif isinstance(message, PartialImage):
                    if message.index >= entry.next_partial:
                        entry.next_partial = message.index + 1
                        entry.follower.on_partial(number, message.index, message.image)
                elif message.record.status == "cancelled" and entry.reason is None:
                    entry.num_deaths += 1  # its engine has crashed
                    break
                else:
                    # The request ends now on this process's clock, and arrived when the front end received it.
                    own = message.record.shifted(asyncio.get_running_loop().time() - (message.record.finish_s or 0.0))
                    own.arrival_s, own.slo_s = request.arrival_s, request.slo_s
                    return Ended(own, message.image)
        except asyncio.CancelledError:
            events.cancel()
            if not entry.is_reassigned or entry.reason is not None or entry.task is None:
                raise
            entry.task.uncancel()
        except RayTaskError as error:
            raise RunError(str(error)) from error
        except RayError:
            # The replica, its node or its output is lost.
            entry.num_deaths += has_it
        self._book.release(number)
        return None

    async def _watch(self) -> None:
        """Poll the status of the replicas until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_STATUS_EVERY_S)
            if lost := await loop.run_in_executor(None, self._deployment.lost_part):
                self._give_up(f"Ray's {lost} has ended, and all replicas with it")
                return
            try:
                found, num_silent = await loop.run_in_executor(None, self._deployment.statuses)
            except Exception:  # noqa: BLE001  no replica is running; there may be some at the next poll
                found, num_silent = (), 0
            self._update_states(found, num_silent)
            for each in found:
                for row in each.rows:
                    self.on_row(row)

    def _give_up(self, reason: str) -> None:
        """Cancel all open requests, and report that the backend has stopped for good."""
        self._is_stopped, self._trouble = True, reason
        for number in list(self._open):
            self.cancel(number, reason)
        self.on_stopped(reason)

    def _update_states(self, found: Sequence[ReplicaStatus], num_silent: int) -> None:
        """Update the replicas' states after a poll.

        The `num_silent` replicas that did not answer are taken to be those of the earlier ones that answered last.
        """
        now_s = asyncio.get_running_loop().time()
        answering = {each.state.name for each in found}
        if answering:
            self._last_answer_s = now_s
        self._book.set_answering(answering)
        before = [each for each in self._replicas if each.name not in answering]
        before.sort(key=lambda each: self._answered_s[each.name], reverse=True)
        silent = [replace(each, health=Health.STALLED) for each in before[:num_silent]]
        self._replicas = (*(each.state for each in found), *silent)
        self._trouble = next((f"replica {each.state.name}: {each.trouble}" for each in found if each.trouble), "")
        kept_s = {each.name: self._answered_s[each.name] for each in silent}
        self._answered_s = kept_s | dict.fromkeys(answering, now_s)
        lost = {each.name for each in silent if now_s - self._answered_s[each.name] > _REASSIGN_AFTER_S}
        for number, entry in self._open.items():
            is_lost = self._book.replica_of(number) in lost
            if is_lost and answering and entry.task is not None and not entry.is_reassigned:
                entry.is_reassigned = True
                entry.task.cancel()


@dataclass(eq=False, slots=True)
class _OpenRequest:
    """An open request.

    Attributes:
        view: the router's view of it.
        accepted: done when a replica has accepted the request, or all have refused it.
        reason: why it is cancelled; None if it is not.
        refused: error of the last replica that refused it.
        is_detached: its end is not reported to the follower.
        is_reassigned: its replica does not answer, and the request is sent to another one.
        num_deaths: replicas that have died while they drew it.
        steps_done, most_steps: steps taken by the current replica, and the most that any replica has reported.
        next_partial: index of the first partial image that was not shown yet.
    """

    request: Request
    view: RequestView
    follower: Follower
    num_partials: int
    follows_steps: bool
    accepted: "asyncio.Future[None]"
    task: "asyncio.Task[None] | None" = None
    reason: str | None = None
    refused: Exception | None = None
    is_detached: bool = False
    is_reassigned: bool = False
    num_deaths: int = 0
    steps_done: int = 0
    most_steps: int = 0
    next_partial: int = 0


def _end_with(request: Request, status: Status, reason: str) -> Ended:
    record = RequestRecord.of(request)
    record.close(status, asyncio.get_running_loop().time(), reason)
    return Ended(record, None)
