"""Online correction of predicted step latencies by the engine's measurements: by a factor that follows the machine, and
by a linear model of the served batches (`learnt_line`), weighted by their recent accuracy.

It also learns how long requests spend in the decoder after their last step, and how much time passes between steps, for
instance where texts are encoded and images decoded there. A scheduler that planned with the steps alone would admit
more than can be finished in time.

A profile is as old as its table. Since then the machine may have become slower or faster (heat, neighbours, another
driver), and a profile of full steps does not describe steps that reuse cached patches. Schedulers add up the remaining
steps of requests, so the factor is the total time of recent steps divided by their total prediction. With a cache most
steps are short and some are long, and when a request joins, one step repacks the batch: the typical step is much
shorter than the mean, and a scheduler that planned with it would miss deadlines.

A factor cannot correct a table that is wrong for some batches only, such as one measured in too few repeats or beside
other work. The line therefore learns from the same steps, and predictions lie between both, each weighted by its
likelihood according to its squared errors. A good table dominates as long as the line is no closer.

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
"""Weight of a new step against all earlier ones, whose weight halves in 34 steps, about those of one request."""
END_WEIGHT = 0.1
"""Weight of a finished request against all earlier ones of its resolution, whose weight halves in 7 requests."""
LONGEST = 5.0
"""A step counts as at most this many times its corrected prediction, so that a process that was stopped for a minute
does not distort the scheduler's plans."""
RECENT = 100
"""Number of steps over which the reported errors are averaged."""
LINE_FADING = 0.99
"""Factor by which earlier errors of table and line are discounted at every step; their weight halves in 69 steps."""
LINE_SHARPNESS = 8
"""Exponent of the ratio of squared errors: twice the squared error divides the odds by 2 to this power, which is the
likelihood of 16 steps."""
MOST_PACE = 4.0
"""Upper bound of the pace, the time from one step to the next over the duration of the step."""
MOST_OFF_TABLE = 4.0
"""The line's prediction is limited to within this factor of the table's, as corrected by the scale."""
_NEGLIGIBLE_ERROR = 1e-4
"""Square of a relative error that does not matter: one per cent."""
LEAST_SCALE, MOST_SCALE = 0.05, 4.0
"""Bounds of the factor. With the cache, steps take a quarter of the time, and a table that was measured beside other
work may be several times too long. The upper bound is tighter: a scheduler that overestimates every request drops them
all, and never measures a step that would correct it.
"""


def bounded(scale: float) -> float:
    """Clamp a factor to the allowed range."""
    return min(max(scale, LEAST_SCALE), MOST_SCALE)


class StepPredictor(Protocol):
    """The predictor that is corrected (as `serving.scheduling.policies.base.StepLatencyPredictor`)."""

    def step_latency_s(self, active: Sequence[Resolution | Work]) -> float: ...


@dataclass(frozen=True, slots=True)
class Drift:
    """Deviation of predictions from measurements.

    Attributes:
        num_observations: number of measured steps.
        scale: current factor of the table's predictions.
        pace: time from one step to the next, over the duration of the step.
        line_share: weight of the line beside the table, from 0 to 1.
        mean_error: mean of |predicted / measured - 1| over the recent steps, each predicted before it was measured;
            None without any.
        mean_uncorrected_error: the same without any correction.
        first_error: the same with corrections, over the first `RECENT` steps.
    """

    num_observations: int
    scale: float
    pace: float
    line_share: float
    mean_error: float | None
    mean_uncorrected_error: float | None
    first_error: float | None


class OnlineCorrection:
    """A `StepLatencyPredictor` that corrects another one and learns from every step.

    Any thread may predict; only one at a time may observe.

    Args:
        predictor: the predictor to correct.
        scale, pace, after_s, line: initial values of the attributes, to continue where another correction has ended.

    Attributes:
        scale: factor of the table's predictions.
        pace: factor of predicted steps, so that they extend to the start of the next one; 1 or more.
        line: the linear model of batches.
        after_s: seconds that the decoder takes for a request, by resolution, without the time in the decoder's queue.

    Raises:
        ValueError: the scale is not from `LEAST_SCALE` to `MOST_SCALE`, or the pace not from 1 to `MOST_PACE`.
    """

    def __init__(
        self,
        predictor: StepPredictor,
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
        # Discounted sums of squared errors, initially as if the table had been off by 10 % in 20 steps, and the line by
        # 20 %.
        self._off_table, self._off_line = 0.2, 0.8
        self._num_observations = 0
        # Moving averages of measurements and predictions, initialised with the first prediction.
        self._measured_s = self._predicted_s = self._between_s = 0.0
        self._errors: deque[float] = deque(maxlen=RECENT)
        self._uncorrected_errors: deque[float] = deque(maxlen=RECENT)
        self._first_errors: list[float] = []
        self.after_s = dict(after_s or {})

    def step_latency_s(self, active: Sequence[Resolution | Work]) -> float:
        """Return the corrected seconds from the start of a step to that of the next. Raises as the predictor does."""
        return self._corrected(self.predictor.step_latency_s(active) * self.scale, active) * self.pace

    def _corrected(self, table_s: float, active: Sequence[Resolution | Work]) -> float:
        line_s = self.line.step_latency_s(active)
        return table_s if line_s is None else table_s * _bounded_line(line_s / table_s) ** self.line_share

    @property
    def line_share(self) -> float:
        """Weight of the line beside the table, from 0 to 1."""
        return 1 / (1 + (self._off_line / self._off_table) ** LINE_SHARPNESS)

    def observe(
        self,
        active: Sequence[Resolution | Work],
        measured_s: float,
        *,
        is_first: bool = False,
        between_s: float = 0.0,
    ) -> None:
        """Learn from a step.

        Args:
            active: batch of the step, at least one request.
            measured_s: measured seconds of the step.
            is_first: whether it is the first step of this batch.
            between_s: seconds since the end of the step before.

        Raises:
            ValueError: the batch is empty, or the time is not positive and finite.
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
            self._off_table = LINE_FADING * self._off_table + off_table**2 + _NEGLIGIBLE_ERROR
            self._off_line = LINE_FADING * self._off_line + off_line**2 + _NEGLIGIBLE_ERROR
        self.line.observe(active, counted_s, corrected_s, is_first=is_first)
        self._measured_s += WEIGHT * (counted_s - self._measured_s)
        self._predicted_s += WEIGHT * (predicted_s - self._predicted_s)
        self._between_s += WEIGHT * (min(between_s, LONGEST * corrected_s) - self._between_s)
        self.pace = min(1 + self._between_s / self._measured_s, MOST_PACE)
        learnt = self._measured_s / self._predicted_s
        self.scale = bounded(learnt)
        if self.scale != learnt:
            # The excess beyond the bounds is discarded, so that the scale returns without delay.
            self._measured_s = self.scale * self._predicted_s

    def after_steps_s(self, resolution: Resolution) -> float | None:
        """Return the recent seconds of the decoder for a request of this resolution; None if none has ended."""
        return self.after_s.get(resolution)

    def observe_end(self, resolution: Resolution, after_s: float) -> None:
        """Learn from the decoder's seconds for a finished request.

        A time counts as at most `LONGEST` times the known one. Conversely, a known time that is more than `LONGEST`
        times as long as the new one is reduced to that: the process was suspended during its measurement.
        """
        known_s = self.after_s.get(resolution, 0.0) or after_s
        known_s = min(known_s, LONGEST * after_s) or known_s
        self.after_s[resolution] = known_s + END_WEIGHT * (min(after_s, LONGEST * known_s) - known_s)

    def drift(self) -> Drift:
        """Return the current deviation of predictions from measurements."""
        errors = map(_mean, (self._errors, self._uncorrected_errors, self._first_errors))
        return Drift(self._num_observations, self.scale, self.pace, self.line_share, *errors)


def _bounded_line(over_table: float) -> float:
    return min(max(over_table, 1 / MOST_OFF_TABLE), MOST_OFF_TABLE)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
