"""Step latency of edits over records, as a linear model of the computed work (InstGenIE section 4.4). No torch.

The paper predicts compute time by a line on the FLOPs of its table 1, in which work on tokens and attention from them
are proportional to the computed share.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from ...data.errors import UsageError
from ...data.resolution import Resolution
from ...data.work import Work, is_part
from ...training.latency.least_squares import relative_line
from ..scheduling.policies.base import StepLatencyPredictor

TERMS = ("step", "edit", "image", "tokens", "attention")
_PIXELS_PER_UNIT = 65_536.0
"""Lengths are in units of a 256x256 image, so that coefficients have a readable size."""


def terms_of(works: Sequence[Work]) -> tuple[float, ...]:
    """Return the terms in which the latency of a step over these edits is linear, in the order of `TERMS`.

    The terms are a constant, the number of edits, and three sums over edits, where L is the number of pixels of an
    image and m its active share: L (work that remains on all tokens: gathering, scattering, the blend), m L (work on
    active tokens: table 1, rows 1 and 2) and m L^2 (attention from active tokens to all: row 3).
    """
    image = tokens = attention = 0.0
    for width, height, share in works:
        length = width * height / _PIXELS_PER_UNIT
        image += length
        tokens += share * length
        attention += share * length * length
    return 1.0, float(len(works)), image, tokens, attention


def fitted_line(terms: Sequence[Sequence[float]], times_s: Sequence[float]) -> tuple[float, ...]:
    """Return seconds for each term, none negative: the line with the least relative error on these times."""
    return tuple(relative_line(np.array(terms), np.array(times_s)).tolist())


def on_line(coefficients: Sequence[float], terms: Sequence[float]) -> float:
    """Return the seconds that a line predicts for these terms."""
    return math.fsum(each * term for each, term in zip(coefficients, terms, strict=True))


@dataclass(frozen=True, slots=True)
class EditStepLatency:
    """Step latencies of batches with edits that are computed in part.

    The engine runs one pass over such edits and another over whole images (`serving.patched.stepper`), so the latency
    of a step is the sum of both.

    Attributes:
        whole: predictor for whole images.
        coefficients: seconds for each of `TERMS`, none negative.
    """

    whole: StepLatencyPredictor
    coefficients: tuple[float, ...]

    @classmethod
    def fitted(cls, whole: StepLatencyPredictor, measured_s: Mapping[tuple[Work, ...], float]) -> Self:
        """Fit the line to measured steps of edits (`fitted_line`).

        Raises UsageError: there is no step, a step has no edit, or a time is not above 0.
        """
        if not measured_s or not all(works and 0 < time_s < math.inf for works, time_s in measured_s.items()):
            raise UsageError("steps of edits must be at least one, each of an edit and longer than 0 s")
        return cls(whole, fitted_line(list(map(terms_of, measured_s)), list(measured_s.values())))

    def step_latency_s(self, active: Sequence[Resolution | Work]) -> float:
        """Predict the latency of a step, as a `StepLatencyPredictor`. Raises what `whole` raises."""
        parts = [each for each in active if isinstance(each, Work) and is_part(each)]
        images = [each for each in active if not is_part(each)]
        if not parts:
            return self.whole.step_latency_s(images)
        return on_line(self.coefficients, terms_of(parts)) + (self.whole.step_latency_s(images) if images else 0.0)
