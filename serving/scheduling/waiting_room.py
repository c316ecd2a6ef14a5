"""Requests that wait for the batch, and how far they are with being prepared. No torch."""

from ..core.request_state import RequestView
from .policies import WaitingQueue


class WaitingRoom:
    """What the `Scheduler` knows of requests that wait, of one kind.

    Attributes:
        queue: their views, for the policy.
        untouched: ids of those that are not being prepared yet, in order of arrival (a dict as an ordered set).
        num_ahead: how many others there are: prepared, or being prepared.
    """

    __slots__ = ("num_ahead", "queue", "untouched")

    def __init__(self) -> None:
        self.queue = WaitingQueue()
        self.untouched: dict[int, None] = {}
        self.num_ahead = 0

    def add(self, view: RequestView, *, is_ahead: bool = False) -> None:
        """A request waits from now on. Raises ValueError: it does already."""
        self.queue.add(view)
        if is_ahead:
            self.num_ahead += 1
        else:
            self.untouched[view.request_id] = None

    def remove(self, request_id: int) -> None:
        """A request does not wait any more. Raises KeyError: it has not."""
        self.queue.remove(request_id)
        if request_id in self.untouched:
            del self.untouched[request_id]
        else:
            self.num_ahead -= 1

    def next_ahead(self, max_ahead: int) -> int | None:
        """The request to prepare next, which is untouched no more; None where there is none, or enough are ahead."""
        if not self.untouched or self.num_ahead >= max_ahead:
            return None
        request_id = next(iter(self.untouched))
        del self.untouched[request_id]
        self.num_ahead += 1
        return request_id

    def __len__(self) -> int:
        return len(self.queue)
