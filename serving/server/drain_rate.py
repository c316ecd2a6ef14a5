"""Rate at which a queue is drawn, measured on full batches only. No torch."""

import statistics
from collections import defaultdict, deque

_MOST_STEPS, _LEAST_STEPS = 31, 5


class DrainRate:
    """Pixel steps per second of the largest batches so far.

    Waiting requests will be drawn in full batches. A small image alone has a fraction of their rate, so with the rate
    of the latest steps, a burst after a quiet hour would be refused although there is room for it.

    The rate is the median of the last 31 steps of such batches, once there are 5. A single step during which the
    machine stood still would otherwise lower the rate for good: requests would be refused, and no batch would get that
    large again.
    """

    def __init__(self) -> None:
        self._by_size: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_MOST_STEPS))

    def note(self, pixels: int, seconds: float) -> None:
        """Record a step of a batch: its pixels, and the seconds that it took."""
        # Batches of up to twice the pixels count as equal.
        self._by_size[pixels.bit_length()].append(pixels / max(seconds, 1e-6))

    @property
    def value(self) -> float | None:
        """Pixels per second of the largest batches; None until enough steps have run."""
        known = [size for size, rates in self._by_size.items() if len(rates) >= _LEAST_STEPS]
        return statistics.median(self._by_size[max(known)]) if known else None
