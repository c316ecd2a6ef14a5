"""Requests that wait for the batch, and the progress of their preparation. No torch."""

from ...data.requests import Request
from ..core.request_state import RequestView
from .policies import WaitingQueue


class WaitingRoom:
    """Waiting requests of the `Scheduler`: all that yield, or all that do not.

    Of the requests of one owner, only those with the lowest `Request.priority` are in `queue`. The others are held back
    until none of these waits. A request is held back at most until its deadline: policies that discard late requests
    then discard it, and the others treat it like any other, so that it is served even if more urgent ones never end.

    Attributes:
        queue: views of the requests that the policy may choose from.
        held: views of the requests that are held back, by id.
        untouched: ids of requests whose preparation has not begun, in order of arrival (a dict as an ordered set).
        num_ahead: number of other requests: those that are prepared or being prepared.
    """

    __slots__ = ("_by_owner", "_classes", "held", "num_ahead", "queue", "untouched")

    def __init__(self) -> None:
        self.queue = WaitingQueue()
        self.held: dict[int, RequestView] = {}
        self.untouched: dict[int, None] = {}
        self.num_ahead = 0
        # Views of all requests: by owner, priority and id.
        self._classes: dict[str, dict[int, dict[int, RequestView]]] = {}
        # Parts of `queue` that `queue_of` has returned.
        self._by_owner: dict[str, WaitingQueue] = {}

    def add(self, request: Request, view: RequestView, *, is_ahead: bool = False) -> None:
        """Add a request that is not waiting yet."""
        classes = self._classes.setdefault(request.owner, {})
        lowest = min(classes, default=request.priority)
        if request.priority > lowest:
            self.held[view.request_id] = view
        else:
            self._offer(request.owner, view)
            if request.priority < lowest:
                for request_id in classes[lowest].keys() - self.held.keys():
                    self.held[request_id] = self._withhold(request.owner, request_id)
        classes.setdefault(request.priority, {})[view.request_id] = view
        if is_ahead:
            self.num_ahead += 1
        else:
            self.untouched[view.request_id] = None

    def remove(self, request: Request) -> None:
        """Remove a request. Raises KeyError if it is not waiting."""
        request_id, classes = request.request_id, self._classes[request.owner]
        if self.held.pop(request_id, None) is None:
            self._withhold(request.owner, request_id)
        del classes[request.priority][request_id]
        if not classes[request.priority]:
            del classes[request.priority]
            if classes:
                for each in classes[min(classes)]:
                    if (view := self.held.pop(each, None)) is not None:
                        self._offer(request.owner, view)
            else:
                del self._classes[request.owner]
                self._by_owner.pop(request.owner, None)
        if request_id in self.untouched:
            del self.untouched[request_id]
        else:
            self.num_ahead -= 1

    def release_overdue(self, now_s: float) -> None:
        """Let the policy see the requests that are held back although their deadline has passed."""
        if self.held:
            due = ((each, view.deadline_s) for each, view in self.held.items())
            for request_id in [each for each, deadline_s in due if deadline_s is not None and deadline_s < now_s]:
                self.queue.add(self.held.pop(request_id))
                self._by_owner.clear()

    def next_ahead(self, max_ahead: int) -> int | None:
        """Return the request to prepare next and count it as ahead; None if there is none, or enough are ahead."""
        if self.num_ahead >= max_ahead:
            return None
        request_id = next((each for each in self.untouched if each not in self.held), None)
        if request_id is not None:
            del self.untouched[request_id]
            self.num_ahead += 1
        return request_id

    @property
    def views(self) -> list[RequestView]:
        """Views of all requests in order of arrival."""
        if not self.held:
            return list(self.queue)
        return sorted((*self.queue, *self.held.values()), key=lambda view: (view.arrival_s, view.request_id))

    @property
    def owners(self) -> list[str]:
        """Owners of waiting requests, in the order in which each came to have one."""
        return list(self._classes)

    def queue_of(self, owner: str) -> WaitingQueue:
        """Return the requests of one owner that the policy may choose from."""
        if owner not in self._by_owner:
            found = (view for views in self._classes[owner].values() for view in views.values())
            self._by_owner[owner] = WaitingQueue([view for view in found if view.request_id not in self.held])
        return self._by_owner[owner]

    def _offer(self, owner: str, view: RequestView) -> None:
        self.queue.add(view)
        if (own := self._by_owner.get(owner)) is not None:
            own.add(view)

    def _withhold(self, owner: str, request_id: int) -> RequestView:
        if (own := self._by_owner.get(owner)) is not None:
            own.remove(request_id)
        return self.queue.remove(request_id)

    def __len__(self) -> int:
        return len(self.queue) + len(self.held)
