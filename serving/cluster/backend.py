"""The backend of many processes: replicas that Ray Serve places, starts and starts again, on one machine or a cluster.

Ray does not repeat a request that a replica has accepted: where its process dies, the front end hands the request in
again, from its beginning. The same seed gives the same image.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...data.errors import RunError, UsageError
from ...data.requests import Request
from ..core.request_state import RequestRecord, RequestView, Status
from ..core.step_row import StepRow
from ..server.backend import Follower, Health, Load, ReplicaState
from ..server.errors import ApiError
from .deployment import Deployment, ReplicaPlan, last_line_of
from .load_book import LoadBook
from .messages import Accepted, Ended, PartialImage, Refused, ReplicaStatus, Stepped

if TYPE_CHECKING:
    from ..server.local import LocalSetup

MOST_TRIES, MOST_DEATHS = 3, 2
"""Replicas that a request is sent to, and of these such that die, or whose engine does, while they draw it: it may be
what kills them.
"""
_STATUS_EVERY_S = 0.5
_BUSY_S = 0.5
_SILENT_S = 10.0
"""What a replica was to draw that has not answered for so long goes to another one."""
_ALL_GONE_S = 60.0
"""Without any replica for so long, the server says that it is not ready; what comes in waits until then."""


class ClusterBackend:
    """See `server.backend.Backend`; `deploy` comes first.

    Args:
        plan: how many replicas.
        build: makes the parts of an engine, and what is to be known of them, in a replica's process: it is pickled.
        book: what is pending where, and what chooses by it; None: the default router does.

    Attributes:
        on_stopped: see `Backend`.
        on_row: told of every step of every replica, some time later, on the event loop.
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
        self._is_stopped = self._has_begun = False
        self._seen_s = 0.0
        self._open: dict[int, _Open] = {}
        self._watching: asyncio.Task[None] | None = None

    def deploy(self) -> Any:
        """Start the replicas and wait until they are warm; returns what `build` tells. Raises as `Deployment.start`."""
        return self._deployment.start()

    @property
    def health(self) -> Health:
        """See `Backend`. One replica is enough; the others are on their way."""
        if self._is_stopped:
            return Health.STOPPED
        if not self._has_begun:
            return Health.STARTING
        gone_s = asyncio.get_running_loop().time() - self._seen_s
        return Health.READY if gone_s < _ALL_GONE_S else Health.RESTARTING

    @property
    def trouble(self) -> str:
        """Reason why no replica draws, or why one draws slowly; "" if there is none."""
        return f"no replica has answered for {_ALL_GONE_S:g} s" if self.health is Health.RESTARTING else self._trouble

    @property
    def load(self) -> Load:
        """See `Backend`; the rate is that of all replicas together."""
        running = sum(entry.steps_done > 0 for entry in self._open.values())
        drawing = [each for each in self._replicas if each.health is not Health.STALLED]
        rates = [each.load.rate for each in drawing if each.load.rate]
        rate = sum(rates) / len(rates) * len(drawing) if rates else None
        return Load(running, len(self._open) - running, self._book.pending(), rate)

    @property
    def plan(self) -> str:
        """See `Backend`."""
        return ""

    @property
    def replicas(self) -> Sequence[ReplicaState]:
        """All replicas; those that do not answer are stalled."""
        return self._replicas

    async def start(self) -> None:
        """See `Backend`."""
        self._seen_s, self._has_begun = asyncio.get_running_loop().time(), True
        self._watching = asyncio.ensure_future(self._watch())

    async def submit(
        self, request: Request, follower: Follower, *, num_partials: int = 0, follows_steps: bool = False
    ) -> None:
        """See `Backend`. Waits until a replica has taken it."""
        if self._is_stopped or self.health is Health.RESTARTING:
            raise ApiError(503, "no replica is there now", code="not_ready", headers={"Retry-After": "5"})
        loop = asyncio.get_running_loop()
        view = await loop.run_in_executor(None, self._book.view_of, request)
        entry = self._open[request.request_id] = _Open(
            request, view, follower, num_partials, follows_steps, loop.create_future()
        )
        entry.task = loop.create_task(self._follow(entry))
        try:
            await entry.accepted
        except BaseException:
            # It was refused, or who hands it in has been cancelled: its follower hears nothing of it.
            entry.is_mute = True
            entry.task.cancel()
            raise

    def cancel(self, request_id: int, reason: str) -> None:
        """See `Backend`."""
        entry = self._open.get(request_id)
        if entry is not None and entry.reason is None and entry.task is not None:
            entry.reason = reason
            entry.task.cancel()

    async def stop(self) -> None:
        """See `Backend`."""
        self._is_stopped = True
        for number in list(self._open):
            self.cancel(number, "the server is shutting down")
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.gather(*(entry.task for entry in self._open.values() if entry.task), return_exceptions=True)
        await asyncio.get_running_loop().run_in_executor(None, self._deployment.end)

    async def _follow(self, entry: "_Open") -> None:
        """Have a request drawn, and again where its replica dies meanwhile; its follower is told how it ends."""
        request, end = entry.request, None
        try:
            for _ in range(MOST_TRIES):
                # Whatever its deadline: the policy of the next replica refuses what is too late, or serves it late.
                end = await self._attempt(entry)
                if end is None and entry.num_died == MOST_DEATHS:
                    end = _closed(request, "failed", f"{MOST_DEATHS} replicas have died while they drew it")
                if end is not None:
                    break
        except asyncio.CancelledError:
            end = _closed(request, "cancelled", entry.reason or "the server is shutting down")
        except Exception as error:  # noqa: BLE001  whatever Ray says, its client must not wait for ever
            end = _closed(request, "failed", last_line_of(error))
        finally:
            self._book.release(request.request_id)
            self._open.pop(request.request_id, None)
        if end is None:
            # Not "failed": it is nothing that the request has done.
            end = _closed(request, "cancelled", f"none of {MOST_TRIES} replicas in a row has drawn it")
        if not entry.accepted.done():
            if entry.refused is not None:
                entry.accepted.set_exception(entry.refused)
                return
            entry.accepted.set_result(None)
        if not entry.is_mute:
            entry.follower.on_end(end.record, end.image)

    async def _attempt(self, entry: "_Open") -> Ended | None:
        """One replica draws a request; None: it has died, does not answer, or has no engine now."""
        from ray.exceptions import RayError, RayTaskError

        request, number = entry.request, entry.request.request_id
        waited_s = max(0.0, asyncio.get_running_loop().time() - request.arrival_s)
        self._book.begin(entry.view)
        events = self._deployment.draw(request, waited_s, entry.num_partials, entry.follows_steps)
        entry.steps_done, entry.refused, entry.is_moving = 0, None, False
        has_it = False
        try:
            async for told in events:
                self._seen_s = asyncio.get_running_loop().time()
                if isinstance(told, Accepted):
                    has_it = True
                    if not entry.accepted.done():
                        entry.accepted.set_result(None)
                elif isinstance(told, Refused):
                    if told.is_busy:
                        entry.refused = ApiError(503, told.reason, code="not_ready", headers={"Retry-After": "5"})
                        await asyncio.sleep(_BUSY_S)
                        break
                    entry.refused = UsageError(told.reason)
                    return _closed(request, "failed", told.reason)
                elif isinstance(told, Stepped):
                    entry.steps_done = told.steps_done
                    self._book.stepped(number, min(told.steps_done, request.num_steps), request.num_steps)
                    # What another replica has shown already is not shown again.
                    if told.steps_done > entry.most_steps:
                        entry.most_steps = told.steps_done
                        entry.follower.on_step(number, told.steps_done)
                elif isinstance(told, PartialImage):
                    if told.index >= entry.next_partial:
                        entry.next_partial = told.index + 1
                        entry.follower.on_partial(number, told.index, told.image)
                elif told.record.status == "cancelled" and entry.reason is None:
                    entry.num_died += 1  # its engine has crashed
                    break
                else:
                    return _with_times_of(told, request)
        except asyncio.CancelledError:
            events.cancel()
            if not entry.is_moving or entry.reason is not None or entry.task is None:
                raise
            entry.task.uncancel()
        except RayTaskError as error:
            raise RunError(str(error)) from error
        except RayError:
            # The replica, its node or what it has sent is lost.
            entry.num_died += has_it
        self._book.release(number)
        return None

    async def _watch(self) -> None:
        """Ask the replicas how they are, again and again."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_STATUS_EVERY_S)
            try:
                found, num_silent = await loop.run_in_executor(None, self._deployment.statuses)
            except Exception:  # noqa: BLE001  none is there; the next time others may be
                found, num_silent = (), 0
            self._note(found, num_silent)
            for each in found:
                for row in each.rows:
                    self.on_row(row)

    def _note(self, found: Sequence[ReplicaStatus], num_silent: int) -> None:
        """These replicas have answered, and so many others have not: they are among those that had before."""
        now_s = asyncio.get_running_loop().time()
        answering = {each.state.name for each in found}
        if answering:
            self._seen_s = now_s
        self._book.note_answering(answering)
        before = [each for each in self._replicas if each.name not in answering]
        before.sort(key=lambda each: self._answered_s[each.name], reverse=True)
        silent = [replace(each, health=Health.STALLED) for each in before[:num_silent]]
        self._replicas = (*(each.state for each in found), *silent)
        self._trouble = next((f"replica {each.state.name}: {each.trouble}" for each in found if each.trouble), "")
        self._answered_s = {each.name: self._answered_s.get(each.name, now_s) for each in silent} | dict.fromkeys(
            answering, now_s
        )
        lost = {each.name for each in silent if now_s - self._answered_s[each.name] > _SILENT_S}
        for number, entry in self._open.items():
            is_lost = self._book.replica_of(number) in lost
            if is_lost and answering and entry.task is not None and not entry.is_moving:
                entry.is_moving = True
                entry.task.cancel()


@dataclass(eq=False, slots=True)
class _Open:
    """A request that is open.

    Attributes:
        view: what the router sees of it.
        accepted: done when a replica has it, or none will.
        reason: why it is cancelled.
        refused: why no replica takes it.
        is_mute: nobody wants to hear of it.
        is_moving: its replica does not answer: another one takes it.
        num_died: replicas that have died while they drew it.
        steps_done, most_steps: of the replica that draws it, and the most that any has told of.
        next_partial: of those that were shown.
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
    is_mute: bool = False
    is_moving: bool = False
    num_died: int = 0
    steps_done: int = 0
    most_steps: int = 0
    next_partial: int = 0


def _closed(request: Request, status: Status, reason: str) -> Ended:
    record = RequestRecord.of(request)
    record.close(status, asyncio.get_running_loop().time(), reason)
    return Ended(record, None)


def _with_times_of(told: Ended, request: Request) -> Ended:
    """Moved to the clock of this process: it ends now, and began when it came in."""
    record = told.record
    later_s = asyncio.get_running_loop().time() - (record.finish_s or 0.0)
    for name in ("prepare_start_s", "prepare_end_s", "admitted_s", "denoise_end_s", "finish_s"):
        if (time_s := getattr(record, name)) is not None:
            setattr(record, name, time_s + later_s)
    record.arrival_s, record.slo_s = request.arrival_s, request.slo_s
    return told
