"""Policies that fill free places in a fixed order without predictions. None of them drops a request."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from heapq import merge
from itertools import islice
from typing import ClassVar

from ...core.request_state import RequestView
from .base import Decision, Policy, Snapshot
from .waiting import as_queue


class InOrderPolicy(Policy):
    """Admits requests from `queue` to all free places; only to an empty batch if it requires one resolution."""

    requires_one_resolution: ClassVar[bool] = False
    requires_predictor: ClassVar[bool] = False

    def decide(self, snapshot: Snapshot) -> Decision:
        """Admit requests in the order of `queue` while there are free places."""
        num_free = snapshot.num_free
        if not num_free or not snapshot.waiting or (snapshot.active and self.requires_one_resolution):
            return Decision()
        return Decision(admit=tuple(islice(self.queue(snapshot.waiting), num_free)))

    @abstractmethod
    def queue(self, waiting: Sequence[RequestView]) -> Iterable[int]:
        """Return the ids of the requests that may be admitted now, in order of admission; `waiting` is not empty."""


class FcfsPolicy(InOrderPolicy):
    """First come, first served, one at a time: what plain diffusers does with a queue of single calls."""

    name: ClassVar[str] = "fcfs"
    requires_one_resolution: ClassVar[bool] = True

    def queue(self, waiting: Sequence[RequestView]) -> Iterable[int]:
        return (waiting[0].request_id,)


class StaticPolicy(InOrderPolicy):
    """Static batching: what one diffusers call with a list of prompts does, which can generate only one resolution.

    A batch starts as soon as nothing is active, without waiting to fill up, and no request joins until all of it has
    left. The request that arrived first always leads the next batch, so no request starves; the waiting requests of
    its resolution and number of steps join it, in order of arrival.
    """

    name: ClassVar[str] = "static"
    requires_one_resolution: ClassVar[bool] = True

    def queue(self, waiting: Sequence[RequestView]) -> Iterable[int]:
        kind = waiting[0].resolution, waiting[0].num_steps
        return (view.request_id for view in waiting if (view.resolution, view.num_steps) == kind)


class ContinuousPolicy(InOrderPolicy):
    """Continuous batching: fills places in order of arrival, at any step, as ORCA does (Yu et al., OSDI 2022).

    Resolutions may mix in the active queue: the patch engine runs them in one forward pass, the plain engine in one
    pass for each resolution. No request is overtaken, so none starves.
    """

    name: ClassVar[str] = "continuous"

    def queue(self, waiting: Sequence[RequestView]) -> Iterable[int]:
        return (view.request_id for view in waiting)


class EdfPolicy(InOrderPolicy):
    """Continuous batching by deadline: the earliest deadline first (Liu & Layland 1973).

    Ties are broken by arrival; requests without a deadline come last. EDF is known to do badly under overload: it
    spends its time on requests that are about to miss their deadlines.
    """

    name: ClassVar[str] = "edf"

    def queue(self, waiting: Sequence[RequestView]) -> Iterable[int]:
        return (request_id for _, _, request_id, _ in merge(*as_queue(waiting).groups))
