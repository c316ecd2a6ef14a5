"""Routers, which choose the worker that a request is sent to. No torch.

InstGenIE (section 4.4) compares its mask-aware costs with balancing by requests and by tokens; PatchedServe (section
8.1) counts pixels times steps.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from ...data.errors import UsageError
from ..core.request_state import RequestView
from .policies.base import StepLatencyPredictor


class WorkerView(Protocol):
    """State of a worker that a router may read. A request counts until its last step.

    Attributes:
        num_requests: requests that were sent to the worker.
        pixel_steps: pixels times remaining steps, summed over these requests.
        max_batch_size: largest number of requests in its batch.
    """

    @property
    def num_requests(self) -> int: ...
    @property
    def pixel_steps(self) -> float: ...
    @property
    def max_batch_size(self) -> int: ...

    def requests(self) -> Sequence[RequestView]:
        """Return these requests: those in the batch or about to join it first, then the others in order of arrival."""
        ...

    def load_s(self, view: RequestView) -> float:
        """Return the seconds that a request would wait on this worker for the record that it reads."""
        ...


class Router(Protocol):
    """Chooses a worker for each request, in order of arrival. The request stays on that worker.

    Attributes:
        name: name of the router on the command line (`--router`).
    """

    name: ClassVar[str]

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> int:
        """Return the index of the chosen worker in `workers`, which is not empty; of equal workers, the first."""
        ...


class RoundRobin:
    """Takes the workers in turn."""

    name: ClassVar[str] = "round-robin"

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> int:
        """Choose the worker after the one chosen last."""
        place = self._next % len(workers)
        self._next = place + 1
        return place


class LeastRequests:
    """Balances the number of requests (InstGenIE's request-granularity balance)."""

    name: ClassVar[str] = "least-requests"

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> int:
        """Choose the worker with the fewest requests."""
        return _least([worker.num_requests for worker in workers])


class LeastTokens:
    """Balances the number of computed tokens (InstGenIE's token-granularity balance).

    Tokens are counted as pixels times active share, since every token of a model covers the same number of pixels.
    """

    name: ClassVar[str] = "least-tokens"

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> int:
        """Choose the worker whose requests have the fewest computed tokens."""
        return _least(
            [sum(each.resolution.pixels * each.active_share for each in worker.requests()) for worker in workers]
        )


class FewestPixels:
    """Balances the remaining pixels times steps (PatchedServe section 8.1)."""

    name: ClassVar[str] = "fewest-pixels"

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> int:
        """Choose the worker with the fewest remaining pixels times steps."""
        return _least([worker.pixel_steps for worker in workers])


class RandomWorker:
    """Takes any worker with equal probability: a baseline of cascades, which the other deployments do not offer."""

    name: ClassVar[str] = "random"

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> int:
        """Choose a worker at random."""
        return self._chance.randrange(len(workers))


@dataclass(frozen=True, slots=True)
class MaskAware:
    """Minimises the time until the request ends plus the delay that it causes to others (after InstGenIE, algorithm 2).

    The paper's cost of a worker is the latency of one step of its running batch with the request in it, and only
    workers with room in their batch are considered. That cost ignores the number of remaining steps, the waiting
    requests, and records that the worker lacks. Here the worker's requests and the new one are simulated through all
    their steps: each step lasts as long as predicted, requests leave when they are done, and waiting requests fill the
    free places in order of arrival; a request that reads a record joins once the record has been loaded. The cost is
    the amount by which the new request increases the sum of the end times of the worker's requests, its own included.

    Attributes:
        predictor: step latencies, which account for the active shares of edits.
    """

    predictor: StepLatencyPredictor

    name: ClassVar[str] = "mask-aware"

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> int:
        """Choose the worker on which the request costs least."""
        return _least([self._cost_s(request, worker) for worker in workers])

    def _cost_s(self, request: RequestView, worker: WorkerView) -> float:
        here = list(worker.requests())
        after, before = self._ends([*here, request], worker), self._ends(here, worker)
        return math.fsum(after.values()) - math.fsum(before.values())

    def _ends(self, views: Sequence[RequestView], worker: WorkerView) -> dict[int, float]:
        """Return, by request id, the seconds from now until each request has taken its last step."""
        ends: dict[int, float] = {}
        queue = [(view, worker.load_s(view)) for view in views]
        running: list[tuple[int, RequestView]] = []
        now_s, steps = 0.0, 0
        while queue or running:
            # A request whose record has not been loaded yet is overtaken.
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
    """InstGenIE's algorithm 2 to the letter: minimises the latency of one step of the running batch with the request
    in it, among the workers whose batch has room, or among all workers if none has.

    Attributes:
        predictor: step latencies, as in `MaskAware`.
    """

    predictor: StepLatencyPredictor

    name: ClassVar[str] = "mask-aware-step"

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> int:
        """Choose the worker with the shortest next step, preferring workers with room in their batch."""
        costs = []
        for worker in workers:
            batch = [*worker.requests()[: worker.max_batch_size], request]
            step_s = self.predictor.step_latency_s(tuple(sorted(view.work for view in batch)))
            costs.append((worker.num_requests >= worker.max_batch_size, step_s))
        return _least(costs)


DEFAULT_ROUTER = FewestPixels.name
_COUNTING = (RoundRobin, LeastRequests, LeastTokens, FewestPixels)
_PREDICTING = (MaskAware, MaskAwareStep)
COUNTING_ROUTERS = tuple(each.name for each in _COUNTING)
PREDICTING_ROUTERS = tuple(each.name for each in _PREDICTING)
"""Names of the routers that need a step latency predictor."""
ROUTERS = (*COUNTING_ROUTERS, *PREDICTING_ROUTERS)


def check_router(name: str) -> None:
    """Raise UsageError if no router has this name."""
    if name not in ROUTERS:
        raise UsageError(f"router is {name!r}, but it must be one of {', '.join(ROUTERS)}")


def make_router(name: str, predictor: StepLatencyPredictor | None) -> Router:
    """Create a router by its name. The predictor is used only by the routers in `PREDICTING_ROUTERS`.

    Raises UsageError: no router has this name, or it needs a predictor and none is given.
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
