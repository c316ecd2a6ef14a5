"""How long steps last in the simulator beyond what a latency table says of a batch that stays the same. No torch.

Three things make a served step longer than a profiled one: the first step after a request has joined or left packs the
batch anew; the policy is asked and the books are kept between steps; and preparing and decoding, which run beside the
steps, take part of the processor. `profiling.runs.calibration` measures them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...data.errors import UsageError
from ...data.resolution import Resolution
from ..scheduling.policies.base import StepLatencyPredictor

MAX_SLOWDOWN = 9.0


@dataclass(frozen=True, slots=True)
class StepDurations:
    """How long steps last.

    Attributes:
        steady: of a batch that is the same as in the step before.
        first: of a batch that has changed; None: as long as steady ones.
        scale: factor of both: how much slower the machine is than when it was profiled.
        between_s: from the end of a step to the start of the next, while there is a batch.
        slowdown: share by which one stage that works beside a step prolongs it: 1 is twice as long. Two stages at once
            slow it twice as much.

    Raises:
        UsageError: a number is out of its range.
    """

    steady: StepLatencyPredictor
    first: StepLatencyPredictor | None = None
    scale: float = 1.0
    between_s: float = 0.0
    slowdown: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise UsageError(f"scale of step durations is {self.scale:g}, but it must be more than 0 and finite")
        if not 0 <= self.between_s < math.inf:
            raise UsageError(f"time between steps is {self.between_s:g} s, but it must be finite and not negative")
        if not 0 <= self.slowdown <= MAX_SLOWDOWN:
            raise UsageError(f"slowdown is {self.slowdown:g}, but it must be from 0 to {MAX_SLOWDOWN:g}")

    def undisturbed_s(self, batch: Sequence[Resolution], *, is_first: bool) -> float:
        """Seconds of a step of this batch while no stage works beside it."""
        known = self.first if is_first and self.first is not None else self.steady
        return known.step_latency_s(batch) * self.scale

    def lost_s(self, beside_s: float) -> float:
        """Seconds that a step loses to a stage that works beside it for `beside_s` seconds."""
        return beside_s * self.slowdown / (1 + self.slowdown)

    def stretched_s(self, undisturbed_s: float, *busy_s: float) -> float:
        """Seconds of a step beside stages that are busy for so many seconds from its start on.

        While n stages work, the step runs at 1 / (1 + n slowdown) of its speed.
        """
        if not self.slowdown:
            return undisturbed_s
        left_s, time_s = undisturbed_s, 0.0
        ends = sorted(end_s for end_s in busy_s if end_s > 0)
        for index, end_s in enumerate(ends):
            speed = 1 / (1 + (len(ends) - index) * self.slowdown)
            done_s = (end_s - time_s) * speed
            if done_s >= left_s:
                return time_s + left_s / speed
            left_s, time_s = left_s - done_s, end_s
        return time_s + left_s
