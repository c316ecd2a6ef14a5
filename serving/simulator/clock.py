"""What the GPUs of a simulation share: how they work, what will happen, and what is written down."""

from collections.abc import Callable
from dataclasses import dataclass, field

from ..core.request_state import RequestRecord
from ..scheduling.policies import LearningPredictor, Policy, StepLatencyPredictor
from .stage_times import StageTimes
from .step_durations import StepDurations

# What happens to a worker. At equal times all of it happens before the worker goes on.
PREPARED, STEPPED = 0, 1


@dataclass(slots=True)
class SimulationClock:
    """The events that are to come, and all that holds for every worker.

    Attributes:
        policy: asked between steps.
        latency: seconds of a step, as the policy is told.
        learner: the same, if it is to be told every step.
        durations: how long steps last.
        max_batch_size, times, max_prepared_ahead, on_finish: of `simulate`.
        events: a heap: time, what happens, index of the worker, id of the request (-1: of none).
        records: of the requests that have ended.
        num_decisions: how often the policy was asked.
        decision_s: how long it took in all, on the real clock.
    """

    policy: Policy
    latency: StepLatencyPredictor
    learner: LearningPredictor | None
    durations: StepDurations
    max_batch_size: int
    times: StageTimes
    max_prepared_ahead: int
    on_finish: Callable[[RequestRecord], None] | None
    events: list[tuple[float, int, int, int]] = field(default_factory=list)
    records: list[RequestRecord] = field(default_factory=list)
    num_decisions: int = 0
    decision_s: float = 0.0

    def close(self, record: RequestRecord) -> None:
        """Keep a record that is final."""
        self.records.append(record)
        if self.on_finish is not None:
            self.on_finish(record)
