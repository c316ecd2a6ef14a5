"""Corrects predicted step latencies by what the engine measures: a scale factor that follows the machine.

A profile is as old as its table. Since then the machine may have become slower or faster (heat, neighbours, another
driver, another share of cached patches), which shifts all latencies by about the same factor. Single steps may be far
off for reasons of their own (the first step of a new batch packs it anew), so a step moves the factor only through the
median of the last few. This module imports no torch.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..data.resolution import Resolution


class PredictsSteps(Protocol):
    """What is corrected (as `serving.policies.base.StepLatencyPredictor`)."""

    def step_latency_s(self, active: Sequence[Resolution]) -> float: ...


@dataclass(frozen=True, slots=True)
class CorrectionSettings:
    """How fast the correction follows, and how far.

    Attributes:
        weight: of a new step against all before it, in (0, 1]; 0.05 forgets half in 14 steps.
        median_of: steps whose median is taken for the new one; up to half of them, rounded down, may be off at will.
        recent: steps that the reported errors are averaged over.
        max_scale: the factor stays between 1 / max_scale and max_scale.

    Raises:
        ValueError: a value is out of its range.
    """

    weight: float = 0.05
    median_of: int = 5
    recent: int = 100
    max_scale: float = 4.0

    def __post_init__(self) -> None:
        if not 0 < self.weight <= 1:
            raise ValueError(f"weight is {self.weight}, but it must be more than 0 and at most 1")
        if self.median_of < 1 or self.recent < 1:
            raise ValueError(f"median_of is {self.median_of} and recent {self.recent}, but both must be at least 1")
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
        self._log_scale = math.log(scale)
        self._log_ratios: deque[float] = deque(maxlen=self.settings.median_of)
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
        self._errors.append(abs(predicted_s * self.scale / measured_s - 1))
        self._uncorrected_errors.append(abs(predicted_s / measured_s - 1))
        self._num_observations += 1
        self._log_ratios.append(math.log(measured_s / predicted_s))
        # Until the median has all of its steps a first step, which is often slow, would count in full.
        if len(self._log_ratios) < self.settings.median_of:
            return
        limit = math.log(self.settings.max_scale)
        moved = self._log_scale + self.settings.weight * (statistics.median(self._log_ratios) - self._log_scale)
        self._log_scale = min(max(moved, -limit), limit)
        self.scale = math.exp(self._log_scale)

    def drift(self) -> Drift:
        """Return how far predictions and measurements lie apart by now."""
        return Drift(self._num_observations, self.scale, _mean(self._errors), _mean(self._uncorrected_errors))


def _mean(values: deque[float]) -> float | None:
    return statistics.fmean(values) if values else None
