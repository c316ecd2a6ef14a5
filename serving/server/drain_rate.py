"""How fast a queue is drawn: what full batches take, whatever was drawn last. No torch."""

_WEIGHT = 0.05


class DrainRate:
    """Pixel steps per second of the largest batches so far.

    What waits is going to be drawn in full batches. One small image alone has a fraction of their rate, so that the
    rate of the last steps would tell a burst after a quiet hour that there is no room for it.
    """

    def __init__(self) -> None:
        self._by_size: dict[int, float] = {}

    def note(self, pixels: int, seconds: float) -> None:
        """Take a step of a batch of so many pixels into account."""
        # Batches of up to twice the pixels count as equal.
        size, rate = pixels.bit_length(), pixels / max(seconds, 1e-6)
        before = self._by_size.get(size, rate)
        self._by_size[size] = before + _WEIGHT * (rate - before)

    @property
    def value(self) -> float | None:
        """Of the largest; None before the first step."""
        return self._by_size[max(self._by_size)] if self._by_size else None
