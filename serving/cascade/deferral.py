"""f(t) from confidences: profiled ones first, then those of the light images that were served last. No torch."""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate, repeat

from .problem import DeferralCurve, thresholds_of

GRID = 0.005
WINDOW = 500
"""How many light images f(t) goes by while it serves."""


def deferral_curve(
    confidences: Iterable[float], grid: float = GRID, costs: Iterable[float] | None = None
) -> DeferralCurve:
    """The share of confidences below each threshold. One that is no number is below all of them but 0.

    Args:
        confidences: of light images.
        grid: distance of the thresholds, beside quantiles.
        costs: of the heavy image of each, relative to any mean; None where one threshold is for all. With them, each
            confidence is compared with `threshold_at` its cost, and shares are of the heavy model's work.

    Raises:
        UsageError: there are none.
    """
    return _curve(_scored(confidences, costs), grid)


def threshold_at(threshold: float, cost: float) -> float:
    """The threshold for images of a cost: lower where a heavy image costs more, 0 and 1 wherever the threshold is."""
    return threshold**cost


def score(confidence: float, cost: float) -> float:
    """What is below t where the confidence is below `threshold_at(t, cost)`; -1 for what is no number."""
    placed = _placed(confidence)
    return placed if placed <= 0 else placed ** (1 / cost)


class OnlineDeferral:
    """f(t) by the last confidences. It begins with the profiled ones, which real ones replace one by one.

    Args:
        profiled: confidences, in any order.
        window: how many count.
        costs: of the heavy image of each; see `deferral_curve`.
    """

    def __init__(self, profiled: Sequence[float], window: int = WINDOW, costs: Sequence[float] | None = None) -> None:
        # Evenly among them, so that a window of them is as the whole.
        ordered = sorted(_scored(profiled, costs))
        count = min(window, len(ordered))
        chosen = [ordered[(2 * place + 1) * len(ordered) // (2 * count)] for place in range(count)]
        # Whatever order they are replaced in, what is left of them must be as the whole, too.
        self._recent = deque((chosen[place] for place in _scattered(len(chosen))), maxlen=window)
        self._curve: DeferralCurve | None = None

    def note(self, confidence: float, cost: float = 1.0) -> None:
        """A light image was scored, whose heavy one has this cost."""
        self._recent.append((score(confidence, cost), cost))
        self._curve = None

    @property
    def curve(self) -> DeferralCurve:
        """f(t) of now. Raises UsageError: nothing was profiled or noted."""
        if self._curve is None:
            self._curve = _curve(self._recent, GRID)
        return self._curve


def _scored(confidences: Iterable[float], costs: Iterable[float] | None) -> list[tuple[float, float]]:
    """Scores with the costs of their heavy images; each costs 1 where none are given."""
    pairs = zip(confidences, repeat(1.0) if costs is None else costs, strict=costs is not None)
    return [(score(confidence, cost), cost) for confidence, cost in pairs]


def _curve(scored: Iterable[tuple[float, float]], grid: float) -> DeferralCurve:
    """Of scores with the costs of their heavy images."""
    known = sorted(scored)
    if not known:
        return DeferralCurve((), ())
    scores = [each for each, _ in known]
    work = list(accumulate((cost for _, cost in known), initial=0.0))
    thresholds = thresholds_of(scores, grid)
    # Threshold 0 means that nothing is deferred, whatever its confidence.
    shares = (min(1.0, work[bisect_left(scores, each)] / work[-1]) for each in thresholds[1:])
    return DeferralCurve(thresholds, (0.0, *shares))


def _placed(confidence: float) -> float:
    """One that is no number is less than any other, so that its image is deferred."""
    return -1.0 if math.isnan(confidence) else confidence


def _scattered(count: int) -> list[int]:
    """All places, such that any first ones are spread evenly: by the golden section."""
    golden = (math.sqrt(5) - 1) / 2
    return sorted(range(count), key=lambda place: (place * golden) % 1)
