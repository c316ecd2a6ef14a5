"""f(t) from confidences: at first profiled ones, then those of the most recent light images. No torch."""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate, repeat

from .problem import DeferralCurve, thresholds_of

GRID = 0.005
WINDOW = 500
"""Number of recent light images that determine f(t) while serving."""


def deferral_curve(
    confidences: Iterable[float], grid: float = GRID, costs: Iterable[float] | None = None
) -> DeferralCurve:
    """Return the share of confidences below each threshold. NaN is below all thresholds but 0.

    Args:
        confidences: confidences of light images.
        grid: distance between thresholds, to which quantiles are added.
        costs: cost of the heavy image of each light image, relative to any mean; None to compare all images with one
            threshold. With costs, each confidence is compared with `threshold_at` its cost, and shares are shares of
            the heavy model's work.

    Raises:
        UsageError: there are no confidences.
    """
    return _curve(_scored(confidences, costs), grid)


def threshold_at(threshold: float, cost: float) -> float:
    """Return the threshold for images of a cost: lower for costlier heavy images; 0 and 1 stay as they are."""
    return threshold**cost


def score(confidence: float, cost: float) -> float:
    """Return a score that is below t exactly if the confidence is below `threshold_at(t, cost)`; -1 for NaN."""
    placed = _placed(confidence)
    return placed if placed <= 0 else placed ** (1 / cost)


class OnlineDeferral:
    """f(t) of the last confidences. It starts from the profiled ones, which observed ones replace one by one.

    Args:
        profiled: profiled confidences, in any order.
        window: number of confidences that count.
        costs: cost of the heavy image of each profiled light image; see `deferral_curve`.
    """

    def __init__(self, profiled: Sequence[float], window: int = WINDOW, costs: Sequence[float] | None = None) -> None:
        # Chosen evenly, so that the window has the distribution of the whole profile.
        ordered = sorted(_scored(profiled, costs))
        count = min(window, len(ordered))
        chosen = [ordered[(2 * place + 1) * len(ordered) // (2 * count)] for place in range(count)]
        # Scattered, so that the rest still has this distribution while they are replaced.
        self._recent = deque((chosen[place] for place in _scattered(len(chosen))), maxlen=window)
        self._curve: DeferralCurve | None = None

    def note(self, confidence: float, cost: float = 1.0) -> None:
        """Record the confidence of a light image, and the cost of its heavy image."""
        self._recent.append((score(confidence, cost), cost))
        self._curve = None

    @property
    def curve(self) -> DeferralCurve:
        """The current f(t). Raises UsageError: there are no confidences."""
        if self._curve is None:
            self._curve = _curve(self._recent, GRID)
        return self._curve


def _scored(confidences: Iterable[float], costs: Iterable[float] | None) -> list[tuple[float, float]]:
    """Return pairs of score and cost of the heavy image; costs default to 1."""
    pairs = zip(confidences, repeat(1.0) if costs is None else costs, strict=costs is not None)
    return [(score(confidence, cost), cost) for confidence, cost in pairs]


def _curve(scored: Iterable[tuple[float, float]], grid: float) -> DeferralCurve:
    """Return the curve of pairs of score and cost of the heavy image."""
    known = sorted(scored)
    if not known:
        return DeferralCurve((), ())
    scores = [each for each, _ in known]
    work = list(accumulate((cost for _, cost in known), initial=0.0))
    thresholds = thresholds_of(scores, grid)
    # At threshold 0 nothing is deferred, whatever the confidences.
    shares = (min(1.0, work[bisect_left(scores, each)] / work[-1]) for each in thresholds[1:])
    return DeferralCurve(thresholds, (0.0, *shares))


def _placed(confidence: float) -> float:
    """Return the confidence, with -1 in place of NaN, so that the image is deferred."""
    return -1.0 if math.isnan(confidence) else confidence


def _scattered(count: int) -> list[int]:
    """Return all places in an order whose every prefix is spread evenly, by the golden section."""
    golden = (math.sqrt(5) - 1) / 2
    return sorted(range(count), key=lambda place: (place * golden) % 1)
