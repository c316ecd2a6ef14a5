"""Arrival times of requests: drawn at random, or those of a recorded trace scaled to another rate."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ..errors import UsageError

_BISECTIONS = 60


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
