"""Requests, a policy and a predictor for tests of the scheduler, and shorthands for the steps of a driver."""

from collections.abc import Sequence
from typing import Any

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.core.request_state import RequestState, RequestView
from patchedserve.serving.scheduling.policies import Decision
from patchedserve.serving.scheduling.scheduler import Scheduler

from .function_policy import FunctionPolicy

S, L = Resolution(128, 128), Resolution(256, 256)


class Learning:
    """Predicts 1 s a step for each image, and records its observations."""

    def __init__(self) -> None:
        self.seen: list[tuple[tuple[Resolution, ...], float]] = []
        self.between_s: list[float] = []

    def step_latency_s(self, active: Sequence[Any]) -> float:
        return float(len(active))

    def observe(
        self, active: Sequence[Any], measured_s: float, *, is_first: bool = False, between_s: float = 0.0
    ) -> None:
        self.seen.append((tuple(active), measured_s))
        self.between_s.append(between_s)

    def after_steps_s(self, resolution: Resolution) -> float | None:
        return None

    def observe_end(self, resolution: Resolution, after_s: float) -> None:
        self.seen.append(((resolution,), after_s))


def request(request_id: int, steps: int = 2, size: Resolution = S, **fields: Any) -> Request:
    return Request(request_id, "", size, steps, **fields)


def admitting(*orders: Sequence[int]) -> FunctionPolicy:
    """Return a policy that admits at each decision only the waiting requests of the next of these lists of ids."""
    left = list(orders)

    def choose(now_s: float, waiting: Sequence[RequestView], active: Sequence[RequestView]) -> Decision:
        return Decision(admit=tuple(left.pop(0)) if left else ())

    return FunctionPolicy(choose)


def prepare(scheduler: Scheduler, now_s: float = 0.0) -> int:
    """Prepare the next request at once."""
    state = scheduler.next_to_prepare(now_s)
    assert state is not None
    assert scheduler.prepared(state.request.request_id, now_s) is state
    return state.request.request_id


def ids(states: Sequence[RequestState]) -> list[int]:
    return [state.request.request_id for state in states]


def whole_scheduler() -> Scheduler:
    """Return a scheduler with a request in each stage.

    0 is decoding, 1 and 2 are active, 4 and 5 joining (4 is ready), 3 and 6 waiting (3 is prepared ahead).
    """
    scheduler = Scheduler(admitting([0, 1, 2], [4, 5]), max_batch_size=4, max_prepared_ahead=3)
    for request_id, steps in enumerate((1, 2, 4, 2, 2, 2, 2)):
        scheduler.add(request(request_id, steps, L if request_id == 2 else S))
    for request_id in range(3):
        assert prepare(scheduler) == request_id
    scheduler.decide(0.0)
    scheduler.stepped(1.0, 1.0)
    assert prepare(scheduler) == 3
    scheduler.decide(1.0)
    assert prepare(scheduler) == 4
    return scheduler
