"""What a cascade leaves: records of requests, what each model did for them, and the plans. No torch."""

from collections import deque
from collections.abc import MutableSequence
from dataclasses import dataclass, field
from typing import cast

from ..core.request_state import RequestRecord
from .allocators import Seen
from .legs import Leg, Side
from .problem import Plan


@dataclass(frozen=True, slots=True)
class LegRow:
    """What one model did for a request.

    Attributes:
        request_id, leg, worker: which one, by which model, where.
        start_s, end_s: when it came there, and left.
        status: how that ended; see `RequestRecord`.
        confidence, threshold: of a light image, and what it was compared with; None where nobody looked.
        is_deferred: whether the request went on to the heavy model.
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
    """A plan.

    Attributes:
        start_s: from when on it held.
        plan, seen: what it says, and what it was made from.
        solve_s: what making it took, on the real clock: the only field that differs between equal runs.
    """

    start_s: float
    plan: Plan
    seen: Seen
    solve_s: float = field(compare=False)


@dataclass(slots=True)
class CascadeResult:
    """What a cascade leaves.

    Attributes:
        records: of every request, in the order in which they ended, all in a final status.
        legs: what models did, as it ended.
        plans: as they were made.
        num_switches: of workers from one model to the other.
        num_lost: workers that died.
        wasted_s: seconds of light images that were not the answer.
    """

    records: MutableSequence[RequestRecord] = field(default_factory=list)
    legs: MutableSequence[LegRow] = field(default_factory=list)
    plans: MutableSequence[PlanRow] = field(default_factory=list)
    num_switches: int = 0
    num_lost: int = 0
    wasted_s: float = 0.0

    @classmethod
    def of_the_last(cls, count: int) -> "CascadeResult":
        """One that keeps so many of each, for those who serve for ever."""
        return cls(deque(maxlen=count), deque(maxlen=count), deque(maxlen=count))

    def served_by(self) -> dict[int, Leg]:
        """The model whose image a completed request has, by id: made from all records at every call."""
        return {record.request_id: cast(Leg, record.served_by) for record in self.records if record.served_by}

    def sides(self) -> dict[int, Side]:
        """The same, but heavy images that start from light ones are told apart."""
        started = {record.request_id for record in self.records if record.strength is not None}
        return {number: "reused" if number in started else leg for number, leg in self.served_by().items()}
