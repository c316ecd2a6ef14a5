"""f(t) from confidences: profiled ones first, then those of the light images that were served last. No torch."""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence

from .problem import DeferralCurve, thresholds_of

GRID = 0.005
WINDOW = 500
"""How many light images f(t) goes by while it serves."""


def deferral_curve(confidences: Iterable[float], grid: float = GRID) -> DeferralCurve:
    """The share of confidences below each threshold. One that is no number is below all of them but 0.

    Raises:
        UsageError: there are none.
    """
    known = sorted(_placed(confidence) for confidence in confidences)
    if not known:
        return DeferralCurve((), ())
    thresholds = thresholds_of(known, grid)
    # Threshold 0 means that nothing is deferred, whatever its confidence.
    return DeferralCurve(thresholds, (0.0, *(bisect_left(known, each) / len(known) for each in thresholds[1:])))


class OnlineDeferral:
    """f(t) by the last confidences. It begins with the profiled ones, which real ones replace one by one.

    Args:
        profiled: confidences, in any order.
        window: how many count.
    """

    def __init__(self, profiled: Sequence[float], window: int = WINDOW) -> None:
        # Evenly among them, so that a window of them is as the whole.
        ordered = sorted(map(_placed, profiled))
        count = min(window, len(ordered))
        chosen = [ordered[(2 * place + 1) * len(ordered) // (2 * count)] for place in range(count)]
        # Whatever order they are replaced in, what is left of them must be as the whole, too.
        self._recent = deque((chosen[place] for place in _scattered(len(chosen))), maxlen=window)
        self._curve: DeferralCurve | None = None

    def note(self, confidence: float) -> None:
        """A light image was scored."""
        self._recent.append(_placed(confidence))
        self._curve = None

    @property
    def curve(self) -> DeferralCurve:
        """f(t) of now. Raises UsageError: nothing was profiled or noted."""
        if self._curve is None:
            self._curve = deferral_curve(self._recent)
        return self._curve


def _placed(confidence: float) -> float:
    """One that is no number is less than any other, so that its image is deferred."""
    return -1.0 if math.isnan(confidence) else confidence


def _scattered(count: int) -> list[int]:
    """All places, such that any first ones are spread evenly: by the golden section."""
    golden = (math.sqrt(5) - 1) / 2
    return sorted(range(count), key=lambda place: (place * golden) % 1)
