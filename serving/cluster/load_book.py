"""What replicas have to do, as the front end that feeds them knows it: no statistics travel. No torch, no Ray.

The simulator's routers choose by it: to them, a replica is a worker.
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
class _Replica:
    """See `scheduling.routers.WorkerView`."""

    max_batch_size: int
    held: HeldRecords | None
    pixel_steps: int = 0
    views: dict[int, RequestView] = field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        return len(self.views)

    def requests(self) -> Sequence[RequestView]:
        # Those that have taken a step are in the batch; who joins it next is not told.
        return sorted(self.views.values(), key=lambda view: (not view.steps_done, view.arrival_s, view.request_id))

    def load_s(self, view: RequestView) -> float:
        return 0.0 if view.record is None or self.held is None else self.held.missing_s(view.record)

    def take(self, view: RequestView) -> None:
        """A request is sent here, or has taken steps. Once these are done it counts no more."""
        self.drop(view.request_id)
        if left := _pixel_steps(view):
            self.views[view.request_id] = view
            self.pixel_steps += left

    def drop(self, request_id: int) -> None:
        if (view := self.views.pop(request_id, None)) is not None:
            self.pixel_steps -= _pixel_steps(view)


@dataclass(slots=True)
class _Entry:
    """A request, and the replica that it is meant for, if one was chosen."""

    view: RequestView
    replica: str | None = None


class LoadBook:
    """Knows what every replica has to do, and chooses one for each request; any thread may ask and tell.

    A request is begun before anybody chooses for it, reserved when a replica is chosen, confirmed or moved when it is
    known where it really went, shrinks with every step, and is released once, however often that is said: an attempt
    that was rejected is released and begun anew. Ray chooses in a thread of its own; what it chooses for one that was
    released meanwhile is not kept.

    Args:
        router: name of what chooses (`scheduling.routers`).
        predictor: of steps, for routers that ask; it refuses sizes that it does not know.
        share_of: share of its image that an edit computes; None: all requests are computed whole.
        computed_of: how many of its steps are computed of a request; None: all of them.
        edits: what edits take over records; None: nobody asks.
        max_batch_size: of each replica.

    Raises:
        UsageError: as `make_router`.
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
        self._replicas: dict[str, _Replica] = {}
        self._answering: frozenset[str] = frozenset()
        self._lock = threading.Lock()

    def view_of(self, request: Request) -> RequestView:
        """What routers may know of a request. It looks at all pixels of an edit that reads a record.

        Raises UsageError: it is an edit that the model cannot serve, or of a size whose steps are not known.
        """
        share = 1.0 if self._share_of is None else self._share_of(request)
        num_computed = None if self._computed_of is None else self._computed_of(request)
        view = RequestView.of(request, None, share, num_computed)
        if self._predictor is not None:
            with self._lock:
                self._predictor.step_latency_s((view.work,))
        return view

    def begin(self, view: RequestView) -> None:
        """A request is about to be sent somewhere."""
        with self._lock:
            self._drop(view.request_id)
            self._entries[view.request_id] = _Entry(view)

    def note_answering(self, replicas: Iterable[str]) -> None:
        """Replicas that answer; while there are any, others are chosen only where these have no room."""
        with self._lock:
            self._answering = frozenset(replicas)

    def replica_of(self, request_id: int) -> str | None:
        """The replica that a request is meant for, if one was chosen."""
        with self._lock:
            entry = self._entries.get(request_id)
            return None if entry is None else entry.replica

    def reserve(self, request_id: int, replicas: Iterable[str]) -> list[str]:
        """Choose for a request: the replica that the router says, which is reserved, then the others for where it has
        no room, in the order of what they have to do. The same request again is chosen for without itself.

        Args:
            request_id: of a request that was begun; one that was released is chosen for, but not kept.
            replicas: all that there are; others are forgotten.
        """
        with self._lock:
            names = sorted(replicas)
            for gone in self._replicas.keys() - names:
                # What was open there begins anew, or has ended, as soon as that is noticed.
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
        """A request went to this replica, whichever was chosen."""
        with self._lock:
            entry = self._entries.get(request_id)
            if entry is None:
                return
            if entry.replica != replica:
                self._move(entry, replica)
            held, record = self._of(replica).held, entry.view.record
            if held is not None and record is not None:
                # Whoever comes next finds it there, or soon: it is read, or made, for this one.
                held.read(record)

    def stepped(self, request_id: int, steps_done: int, num_steps: int) -> None:
        """A request has passed so many of its steps, whether they were computed or skipped."""
        with self._lock:
            entry = self._entries.get(request_id)
            if entry is None:
                return
            view = entry.view
            entry.view = view._replace(steps_done=max(view.steps_done, steps_done * view.num_steps // num_steps))
            if entry.replica is not None:
                self._of(entry.replica).take(entry.view)

    def release(self, request_id: int) -> None:
        """A request has ended, or was rejected. Again does nothing."""
        with self._lock:
            self._drop(request_id)

    def pending(self, replica: str | None = None) -> int:
        """Pixels times steps that a replica has to do; without one, all that is open."""
        with self._lock:
            if replica is not None:
                return self._replicas[replica].pixel_steps if replica in self._replicas else 0
            return sum(_pixel_steps(entry.view) for entry in self._entries.values())

    def _of(self, name: str) -> _Replica:
        if name not in self._replicas:
            held = None if self._edits is None else HeldRecords(self._edits)
            self._replicas[name] = _Replica(self._max_batch_size, held)
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
    return view.resolution.pixels * (view.num_steps - view.steps_done)


BOOKS: dict[str, LoadBook] = {}
"""Of this process, by the names of their deployments: for the router that Ray runs beside the front end."""
