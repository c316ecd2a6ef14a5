"""How fast a queue is drawn: what full batches take, whatever was drawn last. No torch."""

import statistics
from collections import defaultdict, deque

_MOST_STEPS, _LEAST_STEPS = 31, 5


class DrainRate:
    """Pixel steps per second of the largest batches so far.

    What waits is going to be drawn in full batches. One small image alone has a fraction of their rate, so that the
    rate of the last steps would tell a burst after a quiet hour that there is no room for it.

    It is the median of the last 31 steps of such batches, once there were 5: a step during which the machine stood
    still would tell for ever that there is no room, as no batch gets so large again.
    """

    def __init__(self) -> None:
        self._by_size: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_MOST_STEPS))

    def note(self, pixels: int, seconds: float) -> None:
        """Take a step of a batch of so many pixels into account."""
        # Batches of up to twice the pixels count as equal.
        self._by_size[pixels.bit_length()].append(pixels / max(seconds, 1e-6))

    @property
    def value(self) -> float | None:
        """Pixels per second of the largest batches; None until enough steps have run."""
        known = [size for size, rates in self._by_size.items() if len(rates) >= _LEAST_STEPS]
        return statistics.median(self._by_size[max(known)]) if known else None
