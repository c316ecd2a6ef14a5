"""Estimates: numbers with their 95 % intervals, and the intervals of means and shares. No torch, no numpy."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist, fmean, stdev
from typing import Any, Self

from .errors import UsageError

CONFIDENCE = 0.95
Z95 = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
"""Standard deviations on either side of the mean of a normal distribution that hold 95 % of it."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and how sure it is. Result files hold it as `{"value", "low", "high", "n"}`.

    Attributes:
        value: the number.
        low, high: its 95 % interval; both None where it is not known how far another run may be off, both equal to
            `value` where the number is exact.
        n: number of images, requests or runs behind it; None where that is not known.

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
        """A number that repeats exactly."""
        return cls(value, value, value, n)

    @classmethod
    def of_mean(cls, values: Sequence[float]) -> Self:
        """The mean of independent values with Student's interval. Raises ValueError without values."""
        return cls(fmean(values), *(student_interval(values) or (None, None)), len(values))

    @classmethod
    def of_ratios(cls, values: Sequence[float]) -> Self:
        """The geometric mean of independent ratios, with Student's interval of their logarithms, so that both stay
        above 0. Raises ValueError without values, or if one is not above 0.
        """
        logs = cls.of_mean([math.log(value) for value in values])
        low, high = (None if end is None else math.exp(end) for end in (logs.low, logs.high))
        return cls(math.exp(logs.value), low, high, logs.n)

    @classmethod
    def of_share(cls, num_met: int, num: int) -> Self:
        """A share of independent things with Wilson's interval. Raises ValueError if it is not a share."""
        low, high = wilson_interval(num_met, num)
        return cls(num_met / num, low, high, num)

    @property
    def is_exact(self) -> bool:
        """Whether the interval is the number itself."""
        return self.low == self.value == self.high

    @property
    def interval(self) -> tuple[float, float] | None:
        """Both ends, or None."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    def to_json(self) -> dict[str, Any]:
        """A mapping that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """The estimate in a result file; a bare number has no interval.

        Raises UsageError: it is neither a number nor a mapping of `value`, `low`, `high` and `n`.
        """
        if not isinstance(content, Mapping):
            return cls(content)
        unknown = sorted(set(content) - {"value", "low", "high", "n"})
        if unknown or "value" not in content:
            raise UsageError(f"field {(unknown or ['value'])[0]!r} is {'unknown' if unknown else 'missing'}")
        return cls(**content)


def student_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the mean of independent values (Student, 1908); None for fewer than two.

    For few values the bootstrap does not serve: three have ten resamples, and an interval called 95 % then holds the
    truth about three times in four.
    """
    if len(values) < 2:
        return None
    from scipy.special import stdtrit  # half a second faster than scipy.stats

    mean, degrees = fmean(values), len(values) - 1
    half = float(stdtrit(degrees, (1 + CONFIDENCE) / 2)) * stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def wilson_interval(num_met: float, num: int) -> tuple[float, float]:
    """95 % interval of the share of independent things that were met (Wilson, 1927).

    Args:
        num_met: how many; also a part of one, where a tie counts half.
        num: of how many, at least 1.

    Raises:
        ValueError: `num` is below 1, or `num_met` is not within 0 and `num`.
    """
    if num < 1 or not 0 <= num_met <= num:
        raise ValueError(f"{num_met:g} of {num} is not a share")
    share, z2 = num_met / num, Z95 * Z95
    centre = (share + z2 / (2 * num)) / (1 + z2 / num)
    half = Z95 / (1 + z2 / num) * math.sqrt(share * (1 - share) / num + z2 / (4 * num * num))
    # At the ends a bound is the share itself, which rounding would miss.
    low = 0.0 if num_met == 0 else min(centre - half, share)
    return low, 1.0 if num_met == num else max(centre + half, share)
