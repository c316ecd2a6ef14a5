"""Results of a cascade: records of requests, the work of each model for them, and the plans. No torch."""

from collections import deque
from collections.abc import MutableSequence
from dataclasses import dataclass, field
from typing import cast

from ..core.request_state import RequestRecord
from .allocators import Observations
from .legs import Leg, Side
from .problem import AllocationPlan


@dataclass(frozen=True, slots=True)
class LegRow:
    """Work of one model for a request.

    Attributes:
        request_id, leg, worker: the request, the model and the worker.
        start_s, end_s: when the request was sent to the worker, and when it ended there.
        status: final status on this worker; see `RequestRecord`.
        confidence, threshold: confidence of a light image, and the threshold that it was compared with; None if there
            was no comparison.
        is_deferred: whether the request was deferred to the heavy model.
    """

    request_id: int
    leg: Leg
    worker: int
    start_s: float
    end_s: float
    status: str
    confidence: float | None = None
    threshold: float | None = None
    is_deferred: bool = False


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A plan, with its time and its inputs.

    Attributes:
        start_s: time from which the plan holds.
        plan, observed: the plan, and the observations that it was made from.
        solve_s: wall-clock time that it took to make the plan: the only field that differs between equal runs.
    """

    start_s: float
    plan: AllocationPlan
    observed: Observations
    solve_s: float = field(compare=False)


@dataclass(slots=True)
class CascadeResult:
    """Results of a cascade.

    Attributes:
        records: final records of all requests, in the order in which they ended.
        legs: work of the models, in the order in which it ended.
        plans: plans, in the order in which they were made.
        num_switches: number of times that a worker switched models.
        num_lost: number of times that a worker died.
        wasted_s: seconds that deferred requests spent with the light model.
    """

    records: MutableSequence[RequestRecord] = field(default_factory=list)
    legs: MutableSequence[LegRow] = field(default_factory=list)
    plans: MutableSequence[PlanRow] = field(default_factory=list)
    num_switches: int = 0
    num_lost: int = 0
    wasted_s: float = 0.0

    @classmethod
    def keeping_last(cls, count: int) -> "CascadeResult":
        """Return a result that keeps only the last `count` entries of each list, for services without an end."""
        return cls(deque(maxlen=count), deque(maxlen=count), deque(maxlen=count))

    def served_by(self) -> dict[int, Leg]:
        """Return the model that drew the image of each completed request, by request id. Scans all records."""
        return {record.request_id: cast(Leg, record.served_by) for record in self.records if record.served_by}

    def sides(self) -> dict[int, Side]:
        """Return the same as `served_by`, with heavy images that start from light ones as a side of their own."""
        started = {record.request_id for record in self.records if record.strength is not None}
        return {number: "reused" if number in started else leg for number, leg in self.served_by().items()}
