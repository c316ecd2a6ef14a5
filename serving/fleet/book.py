"""The pending work of each worker, as the front end that feeds it knows it; workers send no statistics for it.

The simulator's routers choose by it. This module imports neither torch nor Ray.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ...data.requests import Request
from ..core.request_state import RequestView
from ..editing.costs import EditCosts, HeldRecords
from ..scheduling.policies import StepLatencyPredictor
from ..scheduling.routers import DEFAULT_ROUTER, make_router


@dataclass(slots=True)
class Workload:
    """Open requests of one worker, as a router sees them (`scheduling.routers.WorkerView`).

    Attributes:
        max_batch_size: largest batch of the worker; 0 before it has a limit.
        held: records that the worker has read; None if there are no records to consider.
        pixel_steps: pixels times remaining steps of the requests.
        views: the requests by id.
    """

    max_batch_size: int = 0
    held: HeldRecords | None = None
    pixel_steps: int = 0
    views: dict[int, RequestView] = field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        return len(self.views)

    def requests(self) -> Sequence[RequestView]:
        # Requests that have taken a step are in the batch; which of the others joins next is not known here.
        return sorted(self.views.values(), key=lambda view: (not view.steps_done, view.arrival_s, view.request_id))

    def load_s(self, view: RequestView) -> float:
        return 0.0 if view.record is None or self.held is None else self.held.missing_s(view.record)

    def take(self, view: RequestView) -> None:
        """Add a request, or update one that has taken steps; one without remaining steps no longer counts."""
        self.drop(view.request_id)
        if left := _pixel_steps(view):
            self.views[view.request_id] = view
            self.pixel_steps += left

    def drop(self, request_id: int) -> None:
        if (view := self.views.pop(request_id, None)) is not None:
            self.pixel_steps -= _pixel_steps(view)


@dataclass(slots=True)
class _Entry:
    """An open request, and the replica that it is assigned to, if one was chosen."""

    view: RequestView
    replica: str | None = None


class LoadBook:
    """Tracks the pending work of every replica and chooses one for each request. Any thread may call it.

    The life of a request: `begin` before a replica is chosen, `reserve` when one is chosen, `confirm` when Ray reports
    where the request went, which may be another replica, `stepped` as its work shrinks, and `release` at its end or
    when the attempt was rejected, after which it is begun anew. Releasing it again does nothing. Ray chooses in a
    thread of its own; its choice for a request that was released in the meantime is not recorded.

    Args:
        router: name of the router (`scheduling.routers`).
        predictor: step latencies, for routers that need them; it refuses resolutions that it does not know.
        share_of: share of its image that an edit computes; None if all requests are computed whole.
        computed_of: number of steps of a request that are computed; None for all of them.
        edits: costs of edits with records, for routers that need them; None if there are no records to consider.
        max_batch_size: largest batch of each replica.

    Raises:
        UsageError: the router is unknown or needs a predictor, as in `make_router`.
    """

    def __init__(
        self,
        router: str = DEFAULT_ROUTER,
        predictor: StepLatencyPredictor | None = None,
        *,
        share_of: Callable[[Request], float] | None = None,
        computed_of: Callable[[Request], int] | None = None,
        edits: EditCosts | None = None,
        max_batch_size: int = 16,
    ) -> None:
        self._router, self._predictor = make_router(router, predictor), predictor
        self._share_of, self._computed_of = share_of, computed_of
        self._edits, self._max_batch_size = edits, max_batch_size
        self._entries: dict[int, _Entry] = {}
        self._replicas: dict[str, Workload] = {}
        self._answering: frozenset[str] = frozenset()
        self._lock = threading.Lock()

    def view_of(self, request: Request) -> RequestView:
        """Return the routers' view of a request. Reads all pixels of an edit that uses a record.

        Raises UsageError: the model cannot serve the edit, or the predictor does not know the resolution.
        """
        share = 1.0 if self._share_of is None else self._share_of(request)
        num_computed = None if self._computed_of is None else self._computed_of(request)
        view = RequestView.of(request, None, share, num_computed)
        if self._predictor is not None:
            with self._lock:
                self._predictor.step_latency_s((view.work,))
        return view

    def begin(self, view: RequestView) -> None:
        """Register a request for which a replica will be chosen."""
        with self._lock:
            self._drop(view.request_id)
            self._entries[view.request_id] = _Entry(view)

    def set_answering(self, replicas: Iterable[str]) -> None:
        """Set the replicas that answer; while there are any, others are chosen only if these have no room."""
        with self._lock:
            self._answering = frozenset(replicas)

    def replica_of(self, request_id: int) -> str | None:
        """Return the replica that a request is assigned to; None if none was chosen."""
        with self._lock:
            entry = self._entries.get(request_id)
            return None if entry is None else entry.replica

    def reserve(self, request_id: int, replicas: Iterable[str]) -> list[str]:
        """Rank the replicas for a request and reserve the first.

        The first is the router's choice; the others follow in order of their pending work, in case it has no room. The
        request's own work does not count when it is ranked again.

        Args:
            request_id: a request that was begun; for one that was released nothing is reserved.
            replicas: all existing replicas; others are forgotten.
        """
        with self._lock:
            names = sorted(replicas)
            for gone in self._replicas.keys() - names:
                # Requests that are still open there are begun anew or released once the loss is noticed.
                if not self._replicas[gone].views:
                    del self._replicas[gone]
            entry = self._entries.get(request_id)
            if entry is not None:
                self._move(entry, None)
            answering = [name for name in names if name in self._answering] or names
            ranked = sorted(names, key=lambda name: (name not in answering, self._of(name).pixel_steps))
            if entry is not None and names:
                chosen = answering[self._router.choose(entry.view, [self._of(name) for name in answering])]
                self._move(entry, chosen)
                ranked.remove(chosen)
                ranked.insert(0, chosen)
            return ranked

    def confirm(self, request_id: int, replica: str) -> None:
        """Record the replica that a request went to, which may differ from the reserved one."""
        with self._lock:
            entry = self._entries.get(request_id)
            if entry is None:
                return
            if entry.replica != replica:
                self._move(entry, replica)
            held, record = self._of(replica).held, entry.view.record
            if held is not None and record is not None:
                # Later requests find the record there: it is read, or made, for this one.
                held.read(record)

    def stepped(self, request_id: int, steps_done: int, num_steps: int) -> None:
        """Record that `steps_done` of a request's steps are done, whether computed or skipped."""
        with self._lock:
            entry = self._entries.get(request_id)
            if entry is None:
                return
            view = entry.view
            entry.view = view._replace(steps_done=max(view.steps_done, steps_done * view.num_steps // num_steps))
            if entry.replica is not None:
                self._of(entry.replica).take(entry.view)

    def release(self, request_id: int) -> None:
        """Remove a request that has ended or was rejected. A second call does nothing."""
        with self._lock:
            self._drop(request_id)

    def pending(self, replica: str | None = None) -> int:
        """Return the pending pixel steps (pixels times steps) of one replica, or of all open requests."""
        with self._lock:
            if replica is not None:
                return self._replicas[replica].pixel_steps if replica in self._replicas else 0
            return sum(_pixel_steps(entry.view) for entry in self._entries.values())

    def _of(self, name: str) -> Workload:
        if name not in self._replicas:
            held = None if self._edits is None else HeldRecords(self._edits)
            self._replicas[name] = Workload(self._max_batch_size, held)
        return self._replicas[name]

    def _move(self, entry: _Entry, name: str | None) -> None:
        if entry.replica is not None:
            self._of(entry.replica).drop(entry.view.request_id)
        entry.replica = name
        if name is not None:
            self._of(name).take(entry.view)

    def _drop(self, request_id: int) -> None:
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._move(entry, None)


def _pixel_steps(view: RequestView) -> int:
    seen = view.resolution.pixels * max(1.0, view.active_share)  # of an edit that reads a record, the whole image
    return round(seen) * (view.num_steps - view.steps_done)


BOOKS: dict[str, LoadBook] = {}
"""Load books of this process by the name of their deployment, for the router that Ray runs beside the front end."""
