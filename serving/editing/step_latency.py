"""How long steps of edits over records take: lines on what is computed (InstGenIE section 4.4). No torch.

The paper predicts computing by a line on the FLOPs of its table 1, where work on tokens, and attention from them, are
in proportion to the share that is computed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from ...data.errors import UsageError
from ...data.resolution import Resolution
from ...data.work import Work
from ...training.latency.least_squares import relative_line
from ..scheduling.policies.base import StepLatencyPredictor

TERMS = ("step", "edit", "image", "tokens", "attention")
_PIXELS_PER_UNIT = 65_536.0
"""Lengths are counted in images of 256 px, so that coefficients are of a readable size."""


def terms_of(works: Sequence[Work]) -> tuple[float, ...]:
    """What a step over these edits is linear in, in the order of `TERMS`.

    A constant; the number of edits; with L for the pixels of an image and m for its active share, the sums of L (what
    stays work on all tokens: gathering, scattering, the blend), of m L (work on tokens: table 1, rows 1 and 2) and of
    m L^2 (attention from active tokens to all: row 3).
    """
    image = tokens = attention = 0.0
    for width, height, share in works:
        length = width * height / _PIXELS_PER_UNIT
        image += length
        tokens += share * length
        attention += share * length * length
    return 1.0, float(len(works)), image, tokens, attention


def fitted_line(terms: Sequence[Sequence[float]], times_s: Sequence[float]) -> tuple[float, ...]:
    """Seconds for each term, none negative, of the line through times with the least relative error."""
    return tuple(relative_line(np.array(terms), np.array(times_s)).tolist())


def on_line(coefficients: Sequence[float], terms: Sequence[float]) -> float:
    """Seconds that such a line says."""
    return math.fsum(each * term for each, term in zip(coefficients, terms, strict=True))


@dataclass(frozen=True, slots=True)
class EditStepLatency:
    """Step latencies of batches with edits that are computed in part.

    The engine takes a pass over these and another over whole images (`serving.patched.stepper`), so that a step is as
    long as both.

    Attributes:
        whole: of whole images.
        coefficients: seconds for each of `TERMS`, none negative.
    """

    whole: StepLatencyPredictor
    coefficients: tuple[float, ...]

    @classmethod
    def fitted(cls, whole: StepLatencyPredictor, measured_s: Mapping[tuple[Work, ...], float]) -> Self:
        """The line through measured steps of edits (`fitted_line`).

        Raises UsageError: there is no step, one is of no edit, or a time is not above 0.
        """
        if not measured_s or not all(works and 0 < time_s < math.inf for works, time_s in measured_s.items()):
            raise UsageError("steps of edits must be at least one, each of an edit and longer than 0 s")
        return cls(whole, fitted_line(list(map(terms_of, measured_s)), list(measured_s.values())))

    def step_latency_s(self, active: Sequence[Resolution | Work]) -> float:
        """See `StepLatencyPredictor`. Raises as the one of whole images does."""
        parts = [each for each in active if isinstance(each, Work)]
        images = [each for each in active if not isinstance(each, Work)]
        if not parts:
            return self.whole.step_latency_s(images)
        return on_line(self.coefficients, terms_of(parts)) + (self.whole.step_latency_s(images) if images else 0.0)
