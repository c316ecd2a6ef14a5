"""Routers: which of several workers a request is sent to. No torch.

InstGenIE (section 4.4) compares the number of requests and of tokens with its mask-aware costs; PatchedServe (section
8.1) counts pixels times steps.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from ...data.errors import UsageError
from ..core.request_state import RequestView
from .policies.base import StepLatencyPredictor


class WorkerView(Protocol):
    """What a router may know of a worker. Requests count until their last step.

    Attributes:
        num_requests: that were sent to it.
        pixel_steps: pixels times remaining steps of them.
        max_batch_size: of its batch.
    """

    @property
    def num_requests(self) -> int: ...
    @property
    def pixel_steps(self) -> float: ...
    @property
    def max_batch_size(self) -> int: ...

    def requests(self) -> Sequence[RequestView]:
        """These requests: first those in the batch or about to join it, then the others in order of arrival."""
        ...

    def load_s(self, view: RequestView) -> float:
        """Seconds that a request would wait here for the record that it reads."""
        ...


class Router(Protocol):
    """Chooses a worker for each request, in order of arrival, who keeps it.

    Attributes:
        name: what the user calls it (`--router`).
    """

    name: ClassVar[str]

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> int:
        """The place of its worker in `workers`, which holds at least one: the first of equals."""
        ...


class RoundRobin:
    """One worker after the other."""

    name: ClassVar[str] = "round-robin"

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> int:
        """See `Router`."""
        place = self._next % len(workers)
        self._next = place + 1
        return place


class LeastRequests:
    """Where the fewest requests are (InstGenIE's request-granularity balance)."""

    name: ClassVar[str] = "least-requests"

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> int:
        """See `Router`."""
        return _least([worker.num_requests for worker in workers])


class LeastTokens:
    """Where the requests have the fewest tokens that are computed (InstGenIE's token-granularity balance): pixels times
    active share, as all tokens of a model are of as many pixels.
    """

    name: ClassVar[str] = "least-tokens"

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> int:
        """See `Router`."""
        return _least(
            [sum(each.resolution.pixels * each.active_share for each in worker.requests()) for worker in workers]
        )


class FewestPixels:
    """Where the fewest pixels times steps are left to do (PatchedServe section 8.1)."""

    name: ClassVar[str] = "fewest-pixels"

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> int:
        """See `Router`."""
        return _least([worker.pixel_steps for worker in workers])


@dataclass(frozen=True, slots=True)
class MaskAware:
    """Where the request costs least (after InstGenIE's algorithm 2): when it ends, and what others end later for it.

    The paper's cost of a worker is the latency of one step of its running batch with the request in it, asked of
    workers with room in their batch. That forgets how many steps are left, who waits, and records that a worker lacks.
    Here the worker's requests and the new one are taken through all their steps: the batch steps as long as predicted,
    loses who is done, and is filled up in order of arrival; who reads a record joins when it is there. The cost is what
    the request adds to the sum of the times in which the worker's requests end.

    Attributes:
        predictor: of steps, with the active shares of edits.
    """

    predictor: StepLatencyPredictor

    name: ClassVar[str] = "mask-aware"

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> int:
        """See `Router`."""
        return _least([self._cost_s(request, worker) for worker in workers])

    def _cost_s(self, request: RequestView, worker: WorkerView) -> float:
        here = list(worker.requests())
        after, before = self._ends([*here, request], worker), self._ends(here, worker)
        return math.fsum(after.values()) - math.fsum(before.values())

    def _ends(self, views: Sequence[RequestView], worker: WorkerView) -> dict[int, float]:
        """Seconds from now until each of them has taken its last step."""
        ends: dict[int, float] = {}
        queue = [(view, worker.load_s(view)) for view in views]
        running: list[tuple[int, RequestView]] = []
        now_s, steps = 0.0, 0
        while queue or running:
            # Whose record is not there yet is overtaken.
            late = []
            for view, ready_s in queue:
                if len(running) < worker.max_batch_size and ready_s <= now_s:
                    running.append((steps + view.num_steps - view.steps_done, view))
                else:
                    late.append((view, ready_s))
            queue = late
            if not running:
                now_s = min(ready_s for _, ready_s in queue)
                continue
            step_s = self.predictor.step_latency_s(tuple(sorted(view.work for _, view in running)))
            next_steps = min(last for last, _ in running)
            if len(running) < worker.max_batch_size:
                waits = [ready_s for _, ready_s in queue if ready_s > now_s]
                if waits:
                    next_steps = min(next_steps, steps + max(1, -int(-(min(waits) - now_s) // step_s)))
            now_s += (next_steps - steps) * step_s
            steps = next_steps
            for last, view in running:
                if last <= steps:
                    ends[view.request_id] = now_s
            running = [(last, view) for last, view in running if last > steps]
        return ends


@dataclass(frozen=True, slots=True)
class MaskAwareStep:
    """InstGenIE's algorithm 2 to the letter: the least latency of one step of the running batch with the request in it,
    among workers whose batch has room; if none has, among all.

    Attributes:
        predictor: as of `MaskAware`.
    """

    predictor: StepLatencyPredictor

    name: ClassVar[str] = "mask-aware-step"

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> int:
        """See `Router`."""
        costs = []
        for worker in workers:
            batch = [*worker.requests()[: worker.max_batch_size], request]
            step_s = self.predictor.step_latency_s(tuple(sorted(view.work for view in batch)))
            costs.append((worker.num_requests >= worker.max_batch_size, step_s))
        return _least(costs)


DEFAULT_ROUTER = FewestPixels.name
_COUNTING = (RoundRobin, LeastRequests, LeastTokens, FewestPixels)
_PREDICTING = (MaskAware, MaskAwareStep)
PREDICTING_ROUTERS = tuple(each.name for each in _PREDICTING)
"""Those that ask how long steps take."""
ROUTERS = (*(each.name for each in _COUNTING), *PREDICTING_ROUTERS)


def check_router(name: str) -> None:
    """Raise UsageError unless there is such a router."""
    if name not in ROUTERS:
        raise UsageError(f"router is {name!r}, but it must be one of {', '.join(ROUTERS)}")


def make_router(name: str, predictor: StepLatencyPredictor | None) -> Router:
    """A router by its name, new each time; of `PREDICTING_ROUTERS` with a predictor.

    Raises UsageError: there is no such router, or it needs a predictor.
    """
    check_router(name)
    counting: dict[str, Callable[[], Router]] = {each.name: each for each in _COUNTING}
    if name in counting:
        return counting[name]()
    if predictor is None:
        raise UsageError(f"router {name} asks how long steps take, and there is no predictor to tell it")
    predicting: dict[str, Callable[[StepLatencyPredictor], Router]] = {each.name: each for each in _PREDICTING}
    return predicting[name](predictor)


def _least(costs: Sequence[float] | Sequence[tuple[bool, float]]) -> int:
    return min(range(len(costs)), key=costs.__getitem__)
