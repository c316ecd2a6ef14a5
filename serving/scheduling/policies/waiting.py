"""The waiting queue as policies see it, maintained in the orders that they need.

The engine and the simulator pass policies a `WaitingQueue`, which maintains its orders as requests come and go, so that
the cost of a decision depends on the requests that it names and not on all that wait. Any other sequence of views is
sorted at each decision.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import overload

from ....data.resolution import Resolution
from ....data.work import Work
from ...core.request_state import RequestView

Kind = tuple[Resolution | Work, int, float | None]
"""Work, number of steps and standalone latency. Requests of one kind differ only in their arrival and deadline."""
ByDeadline = tuple[float, float, int, RequestView]
"""Deadline (infinity without one), arrival, id, view. Tuples sort by the first three, as ids are unique."""


def kind_of(view: RequestView) -> Kind:
    """Return the kind of a request."""
    return view.work, view.num_steps, view.standalone_s


def by_deadline(view: RequestView) -> ByDeadline:
    """Return the view with its sort key."""
    return math.inf if view.deadline_s is None else view.deadline_s, view.arrival_s, view.request_id, view


class WaitingQueue(Sequence[RequestView]):
    """Views in order of arrival (equal arrivals: by id) and, within each kind, in order of deadline.

    `add` and `remove` cost a binary search and a move of pointers; only the owner of the queue calls them, never a
    policy.
    """

    __slots__ = ("_arrivals", "_by_id", "_by_kind", "_views")

    def __init__(self, views: Sequence[RequestView] = ()) -> None:
        self._arrivals: list[tuple[float, int]] = []
        self._views: list[RequestView] = []
        self._by_id: dict[int, RequestView] = {}
        self._by_kind: dict[Kind, list[ByDeadline]] = {}
        for view in views:
            self.add(view)

    def add(self, view: RequestView) -> None:
        """Add a request.

        Raises:
            ValueError: a request with this id is waiting already.
        """
        if view.request_id in self._by_id:
            raise ValueError(f"request {view.request_id} is waiting already")
        key = (view.arrival_s, view.request_id)
        place = bisect_left(self._arrivals, key)
        self._arrivals.insert(place, key)
        self._views.insert(place, view)
        self._by_id[view.request_id] = view
        insort(self._by_kind.setdefault(kind_of(view), []), by_deadline(view))

    def remove(self, request_id: int) -> RequestView:
        """Remove and return a request. Raises KeyError if it is not waiting."""
        view = self._by_id.pop(request_id)
        place = bisect_left(self._arrivals, (view.arrival_s, request_id))
        del self._arrivals[place], self._views[place]
        kind = kind_of(view)
        group = self._by_kind[kind]
        del group[bisect_left(group, by_deadline(view)[:3])]  # type: ignore[arg-type]  a shorter tuple sorts first
        if not group:
            del self._by_kind[kind]
        return view

    def get(self, request_id: int) -> RequestView | None:
        """Return the request with this id; None if it is not waiting."""
        return self._by_id.get(request_id)

    @property
    def groups(self) -> list[list[ByDeadline]]:
        """Requests of each kind in order of deadline; kinds in order of their first arrival. Do not modify."""
        return list(self._by_kind.values())

    def __len__(self) -> int:
        return len(self._views)

    def __iter__(self) -> Iterator[RequestView]:
        return iter(self._views)

    @overload
    def __getitem__(self, index: int) -> RequestView: ...
    @overload
    def __getitem__(self, index: slice) -> list[RequestView]: ...
    def __getitem__(self, index: int | slice) -> RequestView | list[RequestView]:
        return self._views[index]


def as_queue(waiting: Sequence[RequestView]) -> WaitingQueue:
    """Return `waiting` itself if it is a `WaitingQueue`, otherwise a new queue of its requests."""
    return waiting if isinstance(waiting, WaitingQueue) else WaitingQueue(waiting)
