"""Corrects predicted step latencies by what the engine measures: by a factor that follows the machine, and by a line
through the batches that were served (`learnt_line`), whichever was nearer lately.

It learns as well how long the decoder has for requests after their last step, and how much time passes between steps,
as where texts are encoded and images decoded there. Whoever plans with the steps alone promises more than can be kept.

A profile is as old as its table. Since then the machine may have become slower or faster (heat, neighbours, another
driver), and a profile of full steps says nothing of steps that reuse cached patches. Schedulers add up the steps that
requests have left, so the factor is the time of recent steps, all of them together, over what was predicted for them.
With a cache most steps are short and some are long, and after a request has joined one step packs the batch again: the
typical step is much shorter than the mean, and a scheduler that counts on it promises what cannot be kept.

A factor mends nothing of a table that is wrong in some batches only: one measured in a hurry, or beside other work. So
the line is told of the same steps, and predictions lie between both, each with the weight of its likelihood by the
squares of how far it was off. A good table has the say for as long as no line is nearer.

This module imports no torch.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...data.resolution import Resolution
from ...data.work import Work
from .learnt_line import LearntLine

WEIGHT = 0.02
"""Of a new step against all before it: half is forgotten in 34 steps, about one request's."""
END_WEIGHT = 0.1
"""Of a request that has ended against all of its resolution before it: half is forgotten in 7."""
LONGEST = 5.0
"""A step counts as so many times its corrected prediction at most, so that a process that was stopped for a minute is
not what the scheduler plans with."""
RECENT = 100
"""Steps that the reported errors are averaged over."""
LINE_FADING = 0.99
"""Weight of how far off table and line were before a step against that step: half is forgotten in 69."""
LINE_SHARPNESS = 8
"""What is twice as far off in the square counts 2 to the power of this less: the likelihood of 16 steps."""
MOST_PACE = 4.0
"""From one step to the next it is taken to be this many times as long as the step at most."""
MOST_OFF_TABLE = 4.0
"""The line is believed within this factor of the table, as corrected by the scale."""
_NO_MATTER = 1e-4
"""The square of what nobody needs to know better: one per cent."""
LEAST_SCALE, MOST_SCALE = 0.05, 4.0
"""The factor stays between these. With the cache steps take a quarter of the time, and a table that was measured beside
other work may be several times too long. The other way it is not let far: who expects too much of every request
discards them all, and never learns better.
"""


def bounded(scale: float) -> float:
    """The nearest factor that is allowed."""
    return min(max(scale, LEAST_SCALE), MOST_SCALE)


class PredictsSteps(Protocol):
    """What is corrected (as `serving.scheduling.policies.base.StepLatencyPredictor`)."""

    def step_latency_s(self, active: Sequence[Resolution | Work]) -> float: ...


@dataclass(frozen=True, slots=True)
class Drift:
    """How far predictions and measurements lie apart.

    Attributes:
        num_observations: measured steps.
        scale: what predictions of the table are multiplied by now.
        pace: from one step to the next, over the step.
        line_share: how far the line is believed beside it, from 0 to 1.
        mean_error: mean of |predicted / measured - 1| over the recent steps, each as it was predicted before it was
            measured; None without any.
        mean_uncorrected_error: the same without any correction.
        first_error: the mean error of the first steps, as many.
    """

    num_observations: int
    scale: float
    pace: float
    line_share: float
    mean_error: float | None
    mean_uncorrected_error: float | None
    first_error: float | None


class OnlineCorrection:
    """A step latency predictor that learns from every step; itself a `StepLatencyPredictor`.

    Observe and ask from any threads, but observe from one at a time.

    Args:
        predictor: what is corrected.
        scale, pace, after_s, line: what it multiplies by, what the decoder has for requests of each resolution, and the
            line through batches, before it has seen anything: for one that continues where another has ended.

    Attributes:
        scale: what predictions of the table are multiplied by.
        pace: what predicted steps are multiplied by, so that they last until the next one; 1 or more.
        line: the line through batches.
        after_s: seconds that the decoder has for a request, by resolution, without what it waits for the decoder.

    Raises:
        ValueError: the scale is not from `LEAST_SCALE` to `MOST_SCALE`, or the pace not from 1 to `MOST_PACE`.
    """

    def __init__(
        self,
        predictor: PredictsSteps,
        *,
        scale: float = 1.0,
        pace: float = 1.0,
        after_s: Mapping[Resolution, float] | None = None,
        line: LearntLine | None = None,
    ) -> None:
        if not LEAST_SCALE <= scale <= MOST_SCALE:
            raise ValueError(f"scale is {scale:g}, but it must be from {LEAST_SCALE:g} to {MOST_SCALE:g}")
        if not 1 <= pace <= MOST_PACE:
            raise ValueError(f"pace is {pace:g}, but it must be from 1 to {MOST_PACE:g}")
        self.predictor = predictor
        self.scale, self.pace = scale, pace
        self.line = line or LearntLine()
        # Sums of squares that fade, at first as if in 20 steps the table had been off by 10 % and the line by 20 %.
        self._off_table, self._off_line = 0.2, 0.8
        self._num_observations = 0
        # Moving averages of what was measured and predicted; the first prediction serves as the past.
        self._measured_s = self._predicted_s = self._between_s = 0.0
        self._errors: deque[float] = deque(maxlen=RECENT)
        self._uncorrected_errors: deque[float] = deque(maxlen=RECENT)
        self._first_errors: list[float] = []
        self.after_s = dict(after_s or {})

    def step_latency_s(self, active: Sequence[Resolution | Work]) -> float:
        """Seconds from the start of a step to that of the next, corrected. Raises what the predictor raises."""
        return self._corrected(self.predictor.step_latency_s(active) * self.scale, active) * self.pace

    def _corrected(self, table_s: float, active: Sequence[Resolution | Work]) -> float:
        line_s = self.line.step_latency_s(active)
        return table_s if line_s is None else table_s * _bounded_line(line_s / table_s) ** self.line_share

    @property
    def line_share(self) -> float:
        """How far the line is believed, from 0 to 1."""
        return 1 / (1 + (self._off_line / self._off_table) ** LINE_SHARPNESS)

    def observe(
        self,
        active: Sequence[Resolution | Work],
        measured_s: float,
        *,
        is_first: bool = False,
        between_s: float = 0.0,
    ) -> None:
        """Learn from a step of this batch (at least one request) that took this long, the first of this batch or not,
        `between_s` after the one before.

        Raises ValueError: there was no batch, or the time is not positive and finite.
        """
        if not active or not 0 < measured_s < math.inf:
            raise ValueError(f"a step of {len(active)} requests took {measured_s} s, but both must be positive")
        predicted_s = self.predictor.step_latency_s(active)
        table_s = predicted_s * self.scale
        corrected_s = self._corrected(table_s, active)
        self._errors.append(abs(corrected_s / measured_s - 1))
        self._uncorrected_errors.append(abs(predicted_s / measured_s - 1))
        if len(self._first_errors) < RECENT:
            self._first_errors.append(self._errors[-1])
        if not self._num_observations:
            self._measured_s, self._predicted_s = table_s, predicted_s
            self._between_s = (self.pace - 1) * table_s
        self._num_observations += 1
        counted_s = min(measured_s, LONGEST * corrected_s)
        if (line_s := self.line.step_latency_s(active)) is not None:
            off_table, off_line = counted_s / table_s - 1, counted_s / table_s - _bounded_line(line_s / table_s)
            self._off_table = LINE_FADING * self._off_table + off_table**2 + _NO_MATTER
            self._off_line = LINE_FADING * self._off_line + off_line**2 + _NO_MATTER
        self.line.observe(active, counted_s, corrected_s, is_first=is_first)
        self._measured_s += WEIGHT * (counted_s - self._measured_s)
        self._predicted_s += WEIGHT * (predicted_s - self._predicted_s)
        self._between_s += WEIGHT * (min(between_s, LONGEST * corrected_s) - self._between_s)
        self.pace = min(1 + self._between_s / self._measured_s, MOST_PACE)
        learnt = self._measured_s / self._predicted_s
        self.scale = bounded(learnt)
        if self.scale != learnt:
            # What lies beyond the bounds is forgotten, so that no time is lost on the way back.
            self._measured_s = self.scale * self._predicted_s

    def after_steps_s(self, resolution: Resolution) -> float | None:
        """Seconds that the decoder had for a request of this resolution, lately; None if none has ended."""
        return self.after_s.get(resolution)

    def observe_end(self, resolution: Resolution, after_s: float) -> None:
        """Learn that the decoder had this long for a request that has ended.

        What is `LONGEST` times as long as known counts for that much only, and where it is the known one that is, it is
        forgotten: the process stood still meanwhile.
        """
        known_s = self.after_s.get(resolution, 0.0) or after_s
        known_s = min(known_s, LONGEST * after_s) or known_s
        self.after_s[resolution] = known_s + END_WEIGHT * (min(after_s, LONGEST * known_s) - known_s)

    def drift(self) -> Drift:
        """Return how far predictions and measurements lie apart by now."""
        errors = map(_mean, (self._errors, self._uncorrected_errors, self._first_errors))
        return Drift(self._num_observations, self.scale, self.pace, self.line_share, *errors)


def _bounded_line(over_table: float) -> float:
    return min(max(over_table, 1 / MOST_OFF_TABLE), MOST_OFF_TABLE)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
