"""Curves of request rates, and the arrivals of a Poisson process that follows a curve. No torch."""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np

from ..errors import UsageError
from ..records import csv_rows, open_text

_TIME, _RATE = "time_s", "rate"
# A typical day of a server with human users: a low morning, a peak before noon and a higher one in the evening, with
# dips. Drawn by us.
_BOX = (
    0.10, 0.06, 0.03, 0.00, 0.02, 0.05, 0.12, 0.20, 0.31, 0.44, 0.52, 0.61, 0.66, 0.63, 0.70, 0.64, 0.55, 0.49, 0.52,
    0.46, 0.41, 0.45, 0.53, 0.60, 0.71, 0.78, 0.86, 0.83, 0.92, 1.00, 0.97, 0.90, 0.94, 0.85, 0.74, 0.66, 0.58, 0.60,
    0.49, 0.38, 0.33, 0.27, 0.21, 0.24, 0.18, 0.15, 0.11, 0.12,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Curve:
    """A rate over time, linear between its points.

    Attributes:
        times_s: times of the points, ascending from 0.
        rates: rates in requests a second, none negative.
    """

    times_s: tuple[float, ...]
    rates: tuple[float, ...]

    @classmethod
    def in_the_box(cls) -> Self:
        """Return the bundled curve of a day, from 0 to 1, which is used if no file is named."""
        return cls(tuple(map(float, range(len(_BOX)))), _BOX)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read CSV with the columns `time_s` and `rate`; others are ignored.

        Raises UsageError if the file cannot be read, lacks a column or has fewer than two points, or a line is not a
        point or does not advance in time. The message for a line starts with `file:line:`.
        """
        times_s: list[float] = []
        rates: list[float] = []
        with open_text(path, "the curve") as file:
            rows = csv_rows(path, file)
            _, names = next(rows, (1, []))
            if not {_TIME, _RATE} <= set(names):
                raise UsageError(f"{path}: a curve must be CSV with the columns {_TIME} and {_RATE}")
            for number, row in rows:
                line = dict(zip(names, row, strict=False))
                time_s, rate = (_number(line.get(name), name, f"{path}:{number}") for name in (_TIME, _RATE))
                if times_s and time_s <= times_s[-1]:
                    raise UsageError(f"{path}:{number}: time goes back or stands still, but lines must be in its order")
                if rate < 0:
                    raise UsageError(f"{path}:{number}: rate is {rate:g}, but it must not be negative")
                times_s.append(time_s)
                rates.append(rate)
        if len(times_s) < 2:
            raise UsageError(f"{path}: the curve has {len(times_s)} points, but it needs at least two")
        return cls(tuple(time_s - times_s[0] for time_s in times_s), tuple(rates))

    def scaled(self, low: float, high: float, duration_s: float) -> Self:
        """Return the same shape from `low` to `high` requests a second, over `duration_s`.

        Raises UsageError if a number is out of its range, or a flat curve is given two different rates.
        """
        if not 0 <= low <= high < math.inf or high == 0:
            raise UsageError(f"rates are {low:g} to {high:g}, but they must rise from 0 or more, and be finite")
        least, most = min(self.rates), max(self.rates)
        if most == least:
            if low != high:
                raise UsageError(f"the curve is flat, so that it cannot go from {low:g} to {high:g}")
            rates = tuple(high for _ in self.rates)
        else:
            rates = tuple(low + (rate - least) / (most - least) * (high - low) for rate in self.rates)
        return type(self)(tuple(time_s / self.times_s[-1] * duration_s for time_s in self.times_s), rates)

    def arrivals(self, rng: np.random.Generator) -> Iterator[float]:
        """Yield arrivals in seconds of a Poisson process of this rate, up to the end of the curve.

        The process is exact, by time change: the n-th arrival is where the integral of the rate reaches the n-th
        arrival of a Poisson process of rate 1 (Cinlar 1975). Between two points the integral is a parabola.
        """
        sums = [0.0]
        for (begin_s, end_s), (low, high) in zip(pairwise(self.times_s), pairwise(self.rates), strict=True):
            sums.append(sums[-1] + (end_s - begin_s) * (low + high) / 2)
        total = 0.0
        while (total := total + float(rng.standard_exponential())) <= sums[-1]:
            part = bisect_left(sums, total, lo=1) - 1
            begin_s, end_s = self.times_s[part : part + 2]
            low, high = self.rates[part : part + 2]
            left, slope = total - sums[part], (high - low) / (end_s - begin_s)
            # Root of slope / 2 x^2 + low x = left, in a form that is exact for any slope.
            root = math.sqrt(max(0.0, low * low + 2 * slope * left))
            yield begin_s + min(end_s - begin_s, 2 * left / (low + root))


def _number(text: str | None, name: str, where: str) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"{where}: {name} is {text!r}, but it must be a number")
    return value
