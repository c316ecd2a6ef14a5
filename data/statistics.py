"""Estimates: numbers with their 95 % intervals, and the intervals of means and shares. No torch, no numpy."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist, fmean, median, stdev
from typing import Any, Self

from .errors import UsageError

CONFIDENCE = 0.95
Z95 = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
"""Number of standard deviations on either side of the mean that contain 95 % of a normal distribution."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its uncertainty. Result files hold it as `{"value", "low", "high", "n"}`.

    Attributes:
        value: the number.
        low, high: the 95 % interval; both None if the deviation of another run is unknown, both equal to `value` if the
            number is exact.
        n: number of images, requests or runs behind it; None if unknown.

    Raises:
        UsageError: a field is not of its kind, or the interval has one end, or its ends are exchanged. (Result files
            are edited by people.)
    """

    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None

    def __post_init__(self) -> None:
        for name in ("value", "low", "high"):
            given = getattr(self, name)
            is_number = isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given)
            if not is_number and (name == "value" or given is not None):
                raise UsageError(f"{name} is {given!r}, but it must be a finite number")
        if (self.low is None) != (self.high is None):
            raise UsageError(f"the interval is {self.low!r} to {self.high!r}; give both ends or neither")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise UsageError(f"the interval {self.low:g} to {self.high:g} has its ends exchanged")
        if self.n is not None and (not isinstance(self.n, int) or isinstance(self.n, bool) or self.n < 1):
            raise UsageError(f"n is {self.n!r}, but it must be a whole number of at least 1")

    @classmethod
    def exact(cls, value: float, n: int | None = None) -> Self:
        """Return the estimate of a number that every run repeats exactly."""
        return cls(value, value, value, n)

    @classmethod
    def of_mean(cls, values: Sequence[float]) -> Self:
        """Return the mean of independent values with Student's interval. Raises ValueError without values."""
        return cls(fmean(values), *(student_interval(values) or (None, None)), len(values))

    @classmethod
    def of_median(cls, values: Sequence[float]) -> Self:
        """Return the median of independent values with Thompson's interval. Raises ValueError without values."""
        return cls(median(values), *(median_interval(values) or (None, None)), len(values))

    @classmethod
    def of_ratios(cls, values: Sequence[float]) -> Self:
        """Return the geometric mean of independent ratios, with Student's interval of their logarithms, so that both
        stay above 0. Raises ValueError without values, or if one is not above 0.
        """
        logs = cls.of_mean([math.log(value) for value in values])
        low, high = (None if end is None else math.exp(end) for end in (logs.low, logs.high))
        return cls(math.exp(logs.value), low, high, logs.n)

    @classmethod
    def of_share(cls, num_met: int, num: int) -> Self:
        """Return the share of successes in independent trials with Wilson's interval. Raises ValueError if it is not a
        share.
        """
        low, high = wilson_interval(num_met, num)
        return cls(num_met / num, low, high, num)

    @property
    def is_exact(self) -> bool:
        """Whether both ends of the interval equal the number."""
        return self.low == self.value == self.high

    @property
    def interval(self) -> tuple[float, float] | None:
        """Both ends of the interval, or None."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    def to_json(self) -> dict[str, Any]:
        """Return a mapping that can be serialized as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """Return the estimate in a result file; a bare number has no interval.

        Raises UsageError if it is neither a number nor a mapping of `value`, `low`, `high` and `n`.
        """
        if not isinstance(content, Mapping):
            return cls(content)
        unknown = sorted(set(content) - {"value", "low", "high", "n"})
        if unknown or "value" not in content:
            raise UsageError(f"field {(unknown or ['value'])[0]!r} is {'unknown' if unknown else 'missing'}")
        return cls(**content)


def student_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean of independent values (Student, 1908); None for fewer than two.

    The bootstrap is unsuitable for few values: three values have ten resamples, and a nominal 95 % interval then covers
    the true mean about three times in four.
    """
    if len(values) < 2:
        return None
    from scipy.special import stdtrit  # half a second faster than scipy.stats

    mean, degrees = fmean(values), len(values) - 1
    half = float(stdtrit(degrees, (1 + CONFIDENCE) / 2)) * stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return a distribution-free 95 % interval of the median of independent values; None for fewer than six.

    Its ends are two of the values. The median lies below the k-th smallest only if fewer than k values lie below the
    median, whose number is binomial with probability 1/2 (Thompson, 1936).
    """
    count = len(values)
    tail, rank = 0.0, 0
    while (tail := tail + math.comb(count, rank) / 2**count) <= (1 - CONFIDENCE) / 2:
        rank += 1
    if rank == 0:
        return None
    ranked = sorted(values)
    return ranked[rank - 1], ranked[-rank]


def ratios_of(base: Sequence[float], own: Sequence[float]) -> list[float]:
    """Return the ratio of each time of a base side to the time of another side in the same round.

    Whatever slows the machine down affects both sides of a round alike, so that the ratios are nearly independent; the
    times are not.
    """
    return [one / other for one, other in zip(base, own, strict=True)]


def wilson_interval(num_met: float, num: int) -> tuple[float, float]:
    """Return the 95 % interval of the share of successes in independent trials (Wilson, 1927).

    Args:
        num_met: number of successes; fractional if a tie counts half.
        num: number of trials, at least 1.

    Raises:
        ValueError: `num` is below 1, or `num_met` is not within 0 and `num`.
    """
    if num < 1 or not 0 <= num_met <= num:
        raise ValueError(f"{num_met:g} of {num} is not a share")
    share, z2 = num_met / num, Z95 * Z95
    centre = (share + z2 / (2 * num)) / (1 + z2 / num)
    half = Z95 / (1 + z2 / num) * math.sqrt(share * (1 - share) / num + z2 / (4 * num * num))
    # For a share of 0 or 1 one bound is the share itself, which rounding would miss.
    low = 0.0 if num_met == 0 else min(centre - half, share)
    return low, 1.0 if num_met == num else max(centre + half, share)
