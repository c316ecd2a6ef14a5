"""Requests that wait for the batch, and the progress of their preparation. No torch."""

from ..core.request_state import RequestView
from .policies import WaitingQueue


class WaitingRoom:
    """Waiting requests of the `Scheduler`: all that yield, or all that do not.

    Attributes:
        queue: views of the requests, for the policy.
        untouched: ids of requests whose preparation has not begun, in order of arrival (a dict as an ordered set).
        num_ahead: number of other requests: those that are prepared or being prepared.
    """

    __slots__ = ("num_ahead", "queue", "untouched")

    def __init__(self) -> None:
        self.queue = WaitingQueue()
        self.untouched: dict[int, None] = {}
        self.num_ahead = 0

    def add(self, view: RequestView, *, is_ahead: bool = False) -> None:
        """Add a request. Raises ValueError if it is waiting already."""
        self.queue.add(view)
        if is_ahead:
            self.num_ahead += 1
        else:
            self.untouched[view.request_id] = None

    def remove(self, request_id: int) -> None:
        """Remove a request. Raises KeyError if it is not waiting."""
        self.queue.remove(request_id)
        if request_id in self.untouched:
            del self.untouched[request_id]
        else:
            self.num_ahead -= 1

    def next_ahead(self, max_ahead: int) -> int | None:
        """Return the request to prepare next and count it as ahead; None if there is none, or enough are ahead."""
        if not self.untouched or self.num_ahead >= max_ahead:
            return None
        request_id = next(iter(self.untouched))
        del self.untouched[request_id]
        self.num_ahead += 1
        return request_id

    def __len__(self) -> int:
        return len(self.queue)
