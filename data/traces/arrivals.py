"""Times at which requests arrive: drawn at random, or those of a recorded trace scaled to another rate."""

import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

import numpy as np

from ..errors import UsageError
from ..records import csv_rows, open_text

_SECONDS, _CLOCK = "arrived_at", "TIMESTAMP"
_BISECTIONS = 60


def gamma_arrivals(rng: np.random.Generator, rate: float, cv: float) -> Iterator[float]:
    """Seconds of an endless renewal process: gamma gaps of mean `1 / rate` with this coefficient of variation.

    With a coefficient of 1 the gaps are exponential (a Poisson process). The first arrival comes after one gap. Unit
    gaps are drawn and then scaled, so that the rate cannot change what is drawn.
    """
    shape = 1.0 / cv**2
    scale_s = 1.0 / (shape * rate)
    arrival_s = 0.0
    while True:
        gap = rng.standard_exponential() if cv == 1 else rng.standard_gamma(shape)
        arrival_s += float(gap) * scale_s
        yield arrival_s


def diurnal_arrivals(rng: np.random.Generator, rate: float, amplitude: float, period_s: float) -> Iterator[float]:
    """Seconds of an endless Poisson process whose rate swings as day and night.

    The rate at t is `rate * (1 + amplitude * sin(2 pi t / period_s))`, its mean over a period `rate`. Exact, by time
    change: the n-th arrival is where the integral of the rate reaches the n-th arrival of a Poisson process of rate 1
    (Cinlar 1975). The integral has no closed inverse and is bisected down to rounding.
    """
    swing_s = amplitude * period_s / (2 * math.pi)

    def expected(time_s: float) -> float:
        return rate * (time_s + swing_s * (1 - math.cos(2 * math.pi * time_s / period_s)))

    total, low_s = 0.0, 0.0
    while True:
        total += float(rng.standard_exponential())
        # The swing only adds to the integral, so it has reached the total by then.
        high_s = max(total / rate, low_s)
        for _ in range(_BISECTIONS):
            middle_s = (low_s + high_s) / 2
            if expected(middle_s) < total:
                low_s = middle_s
            else:
                high_s = middle_s
        yield high_s


def scaled_arrivals(arrivals_s: Sequence[float], rate: float) -> list[float]:
    """Recorded arrivals from 0 on, all gaps multiplied by one factor, so that the mean gap is `1 / rate`.

    Raises UsageError: there are fewer than two, or all are at one time: they have no rate.
    """
    if len(arrivals_s) < 2 or arrivals_s[-1] <= arrivals_s[0]:
        raise UsageError(f"{len(arrivals_s)} recorded arrivals span no time, so they cannot be scaled to a rate")
    factor = (len(arrivals_s) - 1) / (arrivals_s[-1] - arrivals_s[0]) / rate
    return [(arrival_s - arrivals_s[0]) * factor for arrival_s in arrivals_s]


def read_arrivals(path: str | Path) -> tuple[float, ...]:
    """Read the arrivals of a recorded trace, in seconds from its first one.

    The file is CSV with a column `arrived_at` (seconds; the processed Azure LLM traces of vidur) or `TIMESTAMP` (date
    and time; the same traces as Azure published them). Other columns are not read.

    Raises:
        UsageError: the file cannot be read, has neither column or no arrival, or a line has none or goes back in time.
            The message starts with `file:line:`.
    """
    path = Path(path)
    arrivals_s: list[float] = []
    with open_text(path, "the arrivals") as file:
        rows = csv_rows(path, file)
        _, names = next(rows, (1, []))
        column = next((name for name in (_SECONDS, _CLOCK) if name in names), None)
        if column is None:
            raise UsageError(f"{path}: recorded arrivals must be CSV with a column {_SECONDS} or {_CLOCK}")
        for number, row in rows:
            where = f"{path}:{number}"
            arrival_s = _seconds(dict(zip(names, row, strict=False)).get(column), column, where)
            if arrivals_s and arrival_s < arrivals_s[-1]:
                raise UsageError(f"{where}: time goes back, but lines must be in order of arrival")
            arrivals_s.append(arrival_s)
    if not arrivals_s:
        raise UsageError(f"{path}: the trace is empty, but it must hold at least one arrival")
    return tuple(arrival_s - arrivals_s[0] for arrival_s in arrivals_s)


def _seconds(text: str | None, column: str, where: str) -> float:
    try:
        if column == _SECONDS:
            value = float(text or "")
        else:
            # Azure writes seven decimals, of which Python reads six.
            moment = datetime.fromisoformat((text or "").strip()[:26])
            value = (moment - datetime(2020, 1, 1)).total_seconds()
    except (ValueError, TypeError) as error:
        raise UsageError(f"{where}: {column} is {text!r}, which is not a time") from error
    if not math.isfinite(value):
        raise UsageError(f"{where}: {column} is {text!r}, but it must be finite")
    return value
