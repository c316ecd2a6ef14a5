"""Moving averages that estimate demand and queue lengths. No torch."""

SAMPLES = 20
ALPHA = 1 / 3.1
"""Weight of the newest sample (DiffServe uses an exponentially weighted moving average)."""


class MovingAverage:
    """Exponentially weighted moving average over the last samples.

    Args:
        alpha: weight of the newest sample; a sample of age k has the weight (1 - alpha)^k before normalisation.
        samples: number of samples that count.
    """

    def __init__(self, alpha: float = ALPHA, samples: int = SAMPLES) -> None:
        self._weights = [(1 - alpha) ** age for age in range(samples)]
        self._recent: list[float] = []

    def note(self, value: float) -> None:
        """Add a sample."""
        self._recent = [value, *self._recent[: len(self._weights) - 1]]

    @property
    def latest(self) -> float:
        """The newest sample; 0 before there is one."""
        return self._recent[0] if self._recent else 0.0

    @property
    def value(self) -> float:
        """The average; 0 before there is a sample."""
        if not self._recent:
            return 0.0
        weights = self._weights[: len(self._recent)]
        return sum(weight * each for weight, each in zip(weights, self._recent, strict=True)) / sum(weights)
