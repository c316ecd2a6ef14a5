"""What an engine writes down about its steps and decisions. No torch."""

from collections import Counter
from collections.abc import Callable, Sequence

from ...data.resolution import Resolution
from ..core.step_row import StepRow
from ..scheduling.policies import LearningPredictor


class StepLog:
    """Steps and decisions of one run, noted in the order in which they happen by one thread.

    Args:
        learner: is told how long every step has taken; None: nobody is.
        on_step: called with the row of each step.

    Attributes:
        rows: one per step.
        decision_times_s: how long each decision of the policy took, in seconds.
    """

    def __init__(self, learner: LearningPredictor | None, on_step: Callable[[StepRow], None] | None) -> None:
        self.rows: list[StepRow] = []
        self.decision_times_s: list[float] = []
        self._learner = learner
        self._on_step = on_step
        self._decided_s = 0.0

    def note_decision(self, duration_s: float) -> None:
        """The policy was asked; its time counts to the step that follows."""
        self.decision_times_s.append(duration_s)
        self._decided_s += duration_s

    def note_step(
        self,
        start_s: float,
        duration_s: float,
        batch: Sequence[Resolution],
        *,
        num_waiting: int,
        has_failed: bool,
    ) -> None:
        """A step of `batch` was taken, while `num_waiting` requests had arrived and were not in it."""
        sizes = dict(Counter(map(str, batch)))
        row = StepRow(len(self.rows), start_s, duration_s, len(batch), num_waiting, sizes, self._decided_s)
        self._decided_s = 0.0
        self.rows.append(row)
        # A failing step is repeated for the others, so it tells nothing of how long a step takes.
        if self._learner is not None and not has_failed:
            self._learner.observe(batch, duration_s)
        if self._on_step is not None:
            self._on_step(row)
