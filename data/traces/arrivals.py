"""Arrival times of requests: drawn at random, or those of a recorded trace scaled to another rate."""

import math
import re
from collections.abc import Iterator, Sequence
from datetime import date, time
from pathlib import Path

import numpy as np

from ..errors import UsageError
from ..records import csv_rows, open_text

_SECONDS, _CLOCK = "arrived_at", "TIMESTAMP"
_BISECTIONS = 60
_MOMENT = re.compile(
    r"((?P<year>\d{4})[/-](?P<month>\d\d?)[/-](?P<day>\d\d?)|(?P<other>\d{8}|\d{4}-?W\d\d-?\d))"
    r"([Tt ](?P<clock>\d\d?(:\d\d?){0,2}|\d{4}|\d{6})([.,](?P<fraction>\d+))?"
    r" ?(?P<zone>[Zz]|UTC|GMT|(?P<sign>[+\u2212-])(?P<hours>[01]\d|2[0-3]):?(?P<minutes>[0-5]\d)?)?)?",
    re.ASCII,
)


def gamma_arrivals(rng: np.random.Generator, rate: float, cv: float) -> Iterator[float]:
    """Yield arrivals in seconds of an endless renewal process with gamma gaps of mean `1 / rate` and coefficient of
    variation `cv`.

    With a coefficient of 1 the gaps are exponential (a Poisson process). The first arrival comes after one gap. Unit
    gaps are drawn and then scaled, so that the rate does not affect the random draws.
    """
    shape = 1.0 / cv**2
    scale_s = 1.0 / (shape * rate)
    arrival_s = 0.0
    while True:
        gap = rng.standard_exponential() if cv == 1 else rng.standard_gamma(shape)
        arrival_s += float(gap) * scale_s
        yield arrival_s


def diurnal_arrivals(rng: np.random.Generator, rate: float, amplitude: float, period_s: float) -> Iterator[float]:
    """Yield arrivals in seconds of an endless Poisson process whose rate varies like day and night.

    The rate at t is `rate * (1 + amplitude * sin(2 pi t / period_s))`, with mean `rate` over a period. The process is
    exact, by time change: the n-th arrival is where the integral of the rate reaches the n-th arrival of a Poisson
    process of rate 1 (Cinlar 1975). The integral has no closed inverse and is inverted by bisection to rounding error.
    """
    swing_s = amplitude * period_s / (2 * math.pi)

    def expected(time_s: float) -> float:
        return rate * (time_s + swing_s * (1 - math.cos(2 * math.pi * time_s / period_s)))

    total, low_s = 0.0, 0.0
    while True:
        total += float(rng.standard_exponential())
        # The variation only adds to the integral, so it has reached the total by then.
        high_s = max(total / rate, low_s)
        for _ in range(_BISECTIONS):
            middle_s = (low_s + high_s) / 2
            if expected(middle_s) < total:
                low_s = middle_s
            else:
                high_s = middle_s
        yield high_s


def scaled_arrivals(arrivals_s: Sequence[float], rate: float) -> list[float]:
    """Return recorded arrivals from 0 on, with all gaps multiplied by one factor, so that the mean gap is `1 / rate`.

    Raises UsageError if there are fewer than two, or all are at one time, so that they have no rate.
    """
    if len(arrivals_s) < 2 or arrivals_s[-1] <= arrivals_s[0]:
        raise UsageError(f"{len(arrivals_s)} recorded arrivals span no time, so they cannot be scaled to a rate")
    factor = (len(arrivals_s) - 1) / (arrivals_s[-1] - arrivals_s[0]) / rate
    return [(arrival_s - arrivals_s[0]) * factor for arrival_s in arrivals_s]


def read_arrivals(path: str | Path) -> tuple[float, ...]:
    """Read the arrivals of a recorded trace, in seconds from its first one.

    The file is CSV with a column `arrived_at` (seconds; the processed Azure LLM traces of vidur) or `TIMESTAMP` (date
    and time, as ISO 8601 and pandas write them; the same traces as Azure published them). Other columns are ignored.
    Offsets from UTC may change within the file, as with daylight saving.

    Raises:
        UsageError: the file cannot be read, has neither column or no arrival, or a line has none, goes back in time, or
            has a zone where the lines above have none. The message starts with `file:line:`.
    """
    path = Path(path)
    arrivals: list[float] = []
    first = 0
    is_zoned = False
    with open_text(path, "the arrivals") as file:
        rows = csv_rows(path, file)
        _, names = next(rows, (1, []))
        column = next((name for name in (_SECONDS, _CLOCK) if name in names), None)
        if column is None:
            raise UsageError(f"{path}: recorded arrivals must be CSV with a column {_SECONDS} or {_CLOCK}")
        for number, row in rows:
            where = f"{path}:{number}"
            text = dict(zip(names, row, strict=False)).get(column)
            try:
                arrival, has_zone = (float(text or ""), False) if column == _SECONDS else _moment_ns(text or "")
            except ValueError as error:
                raise UsageError(f"{where}: {column} is {text!r}, which is not a time") from error
            if not math.isfinite(arrival):
                raise UsageError(f"{where}: {column} is {text!r}, but it must be finite")
            if not arrivals:
                first, is_zoned = number, has_zone
            elif has_zone != is_zoned:
                has, had = ("a zone", "none") if has_zone else ("no zone", "one")
                raise UsageError(f"{where}: {column} is {text!r}, with {has}, but line {first} has {had}")
            elif arrival < arrivals[-1]:
                raise UsageError(f"{where}: time goes back, but lines must be in order of arrival")
            arrivals.append(arrival)
    if not arrivals:
        raise UsageError(f"{path}: the trace is empty, but it must hold at least one arrival")
    unit = 1 if column == _SECONDS else 10**9
    return tuple((arrival - arrivals[0]) / unit for arrival in arrivals)


def _moment_ns(text: str) -> tuple[int, bool]:
    """Return nanoseconds from the year 1 in UTC, and whether the text names a zone. Raises ValueError if it is not a
    date and time.

    The result is an integer, because a float of that many seconds is a microsecond off.
    """
    found = _MOMENT.fullmatch(text.strip())
    if found is None:
        raise ValueError(text)
    other, (year, month, of_month) = found["other"], found.group("year", "month", "day")
    day = date.fromisoformat(other) if other else date(int(year), int(month), int(of_month))
    parts = [int(part) for part in re.findall(r"\d\d?", found["clock"] or "0")]
    hour, minute, second, *_ = (*parts, 0, 0)
    time(hour, minute, second)  # checks them
    seconds = day.toordinal() * 86_400 + hour * 3600 + minute * 60 + second
    if found["sign"]:
        offset_s = int(found["hours"]) * 3600 + int(found["minutes"] or 0) * 60
        seconds += -offset_s if found["sign"] == "+" else offset_s
    # A fraction refers to the last unit that is written.
    unit_s = (3600, 60, 1)[len(parts) - 1]
    return seconds * 10**9 + unit_s * int((found["fraction"] or "0")[:9].ljust(9, "0")), bool(found["zone"])
