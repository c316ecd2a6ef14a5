"""Corrects predicted step latencies by what the engine measures: a scale factor that follows the machine.

A profile is as old as its table. Since then the machine may have become slower or faster (heat, neighbours, another
driver), and a profile of full steps says nothing of steps that reuse cached patches. Schedulers add up the steps that
requests have left, so the factor is the time of recent steps, all of them together, over what was predicted for them.
With a cache most steps are short and some are long, and after a request has joined one step packs the batch again: the
typical step is much shorter than the mean, and a scheduler that counts on it promises what cannot be kept.

This module imports no torch.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ...data.resolution import Resolution


class PredictsSteps(Protocol):
    """What is corrected (as `serving.scheduling.policies.base.StepLatencyPredictor`)."""

    def step_latency_s(self, active: Sequence[Resolution]) -> float: ...


@dataclass(frozen=True, slots=True)
class CorrectionSettings:
    """How fast the correction follows, and how far.

    Attributes:
        weight: of a new step against all before it, in (0, 1]; 0.02 forgets half in 34 steps, about one request's.
        longest: a step counts as so many times its corrected prediction at most, so that a process that was stopped
            for a minute is not what the scheduler plans with.
        recent: steps that the reported errors are averaged over.
        max_scale: the factor stays between 1 / max_scale and max_scale.

    Raises:
        ValueError: a value is out of its range.
    """

    weight: float = 0.02
    longest: float = 5.0
    recent: int = 100
    max_scale: float = 4.0

    def __post_init__(self) -> None:
        if not 0 < self.weight <= 1:
            raise ValueError(f"weight is {self.weight}, but it must be more than 0 and at most 1")
        if not 1 < self.longest < math.inf:
            raise ValueError(f"longest is {self.longest}, but it must be more than 1 and finite")
        if self.recent < 1:
            raise ValueError(f"recent is {self.recent}, but it must be at least 1")
        if not 1 <= self.max_scale < math.inf:
            raise ValueError(f"max_scale is {self.max_scale}, but it must be at least 1 and finite")


@dataclass(frozen=True, slots=True)
class Drift:
    """How far predictions and measurements lie apart.

    Attributes:
        num_observations: measured steps.
        scale: what predictions are multiplied by now.
        mean_error: mean of |predicted / measured - 1| over the recent steps, each as it was predicted before it was
            measured; None without any.
        mean_uncorrected_error: the same without the correction.
    """

    num_observations: int
    scale: float
    mean_error: float | None
    mean_uncorrected_error: float | None


class OnlineCorrection:
    """A step latency predictor that learns from every step; itself a `StepLatencyPredictor`.

    Observe and ask from any threads, but observe from one at a time.

    Args:
        predictor: what is corrected.
        settings: how fast it follows.
        scale: what it multiplies by before it has seen anything, for one that goes on where another has ended.

    Raises:
        ValueError: the scale is beyond what the settings allow.
    """

    def __init__(
        self, predictor: PredictsSteps, settings: CorrectionSettings | None = None, *, scale: float = 1.0
    ) -> None:
        self.predictor = predictor
        self.settings = settings or CorrectionSettings()
        if not 1 / self.settings.max_scale <= scale <= self.settings.max_scale:
            raise ValueError(
                f"scale is {scale:g}, but it may differ from 1 by {self.settings.max_scale:g} times at most"
            )
        self.scale = scale
        self._num_observations = 0
        # Moving averages of what was measured and predicted; the first prediction serves as the past.
        self._measured_s = self._predicted_s = 0.0
        self._errors: deque[float] = deque(maxlen=self.settings.recent)
        self._uncorrected_errors: deque[float] = deque(maxlen=self.settings.recent)

    def step_latency_s(self, active: Sequence[Resolution]) -> float:
        """Seconds of one step, corrected. Raises what the predictor raises."""
        return self.predictor.step_latency_s(active) * self.scale

    def observe(self, active: Sequence[Resolution], measured_s: float) -> None:
        """Take note of a step that was measured.

        Args:
            active: the resolutions of the batch, at least one.
            measured_s: how long the step took.

        Raises:
            ValueError: there was no batch, or the time is not positive and finite.
        """
        if not active or not 0 < measured_s < math.inf:
            raise ValueError(f"a step of {len(active)} requests took {measured_s} s, but both must be positive")
        predicted_s = self.predictor.step_latency_s(active)
        corrected_s = predicted_s * self.scale
        self._errors.append(abs(corrected_s / measured_s - 1))
        self._uncorrected_errors.append(abs(predicted_s / measured_s - 1))
        if not self._num_observations:
            self._measured_s, self._predicted_s = corrected_s, predicted_s
        self._num_observations += 1
        settings = self.settings
        counted_s = min(measured_s, settings.longest * corrected_s)
        self._measured_s += settings.weight * (counted_s - self._measured_s)
        self._predicted_s += settings.weight * (predicted_s - self._predicted_s)
        # What lies beyond the bounds is forgotten, so that no time is lost on the way back.
        lowest_s, highest_s = self._predicted_s / settings.max_scale, self._predicted_s * settings.max_scale
        self._measured_s = min(max(self._measured_s, lowest_s), highest_s)
        self.scale = self._measured_s / self._predicted_s

    def drift(self) -> Drift:
        """Return how far predictions and measurements lie apart by now."""
        return Drift(self._num_observations, self.scale, _mean(self._errors), _mean(self._uncorrected_errors))


def _mean(values: deque[float]) -> float | None:
    return statistics.fmean(values) if values else None
