"""95 % intervals of the figures of one served run, whose requests are not independent. No torch.

Requests that queue behind each other are late together, so intervals that treat them as independent are far too narrow:
for a single server that is busy 60 % of the time, such a 95 % interval of the attainment covers the true value only 42
times in 100. Here a run is cut into `NUM_BLOCKS` blocks of time, and Student's interval is taken over the blocks: the
method of batch means (Schmeiser, "Batch size effects in the analysis of simulation output", 1982). A block bootstrap
over so few blocks would be too narrow, because it lacks Student's factor.

Blocks are independent only if they are long compared with the correlation time of the queue. It is measured as the
integrated autocorrelation time (Sokal, "Monte Carlo methods in statistical mechanics", 1997, section 3). A run shorter
than `MIN_TIMES` of these times has no interval, and gates then report "not enough evidence". The risk is a short run
that happens to be calm, because its correlation time looks short as well. With 200 times, about 5 runs in 100 get an
interval that misses the true value, whatever their length (with 50 times, 13). A run therefore needs about 300 requests
if they hardly interact, and thousands in a busy queue; several runs with `repeats = true` need no such length.
"""

import math

import numpy as np

from ...data.statistics import student_interval, wilson_interval

NUM_BLOCKS = 10
MIN_TIMES = 200
_WINDOW = 5

Interval = tuple[float, float]


def mean_interval(series: np.ndarray, memory: float = 1.0) -> Interval | None:
    """Return the interval of the mean of values in order of time; None if the run is too short.

    Args:
        series: (n,) values.
        memory: lower bound of the autocorrelation time, in values; the larger of it and that of the series is used.
    """
    if len(series) < MIN_TIMES * max(memory, autocorrelation_time(series)):
        return None
    mean, size = float(series.mean()), len(series) / NUM_BLOCKS
    # Sums, because blocks may differ in length by one.
    blocks = np.array_split(series - mean, NUM_BLOCKS)
    return student_interval([mean + float(block.sum()) / size for block in blocks])


def share_interval(flags: np.ndarray, memory: float) -> Interval | None:
    """Return the interval of the share of True flags; None as in `mean_interval`.

    It is never narrower than Wilson's interval, which assumes independent requests, and stays within 0 and 1.

    Args:
        flags: (n,) bools in order of time.
        memory: autocorrelation time of the latencies, because nearly constant flags do not show their own.
    """
    interval = mean_interval(flags.astype(np.float64), memory)
    if interval is None:
        return None
    low, high = wilson_interval(int(flags.sum()), len(flags))
    return max(0.0, min(low, interval[0])), min(1.0, max(high, interval[1]))


def percentile_interval(series: np.ndarray, percent: float, memory: float) -> Interval | None:
    """Return the interval of a percentile of values in order of time: the quantiles at both ends of the interval of the
    share of values below it (Woodruff, "Confidence intervals for medians and other position measures", 1952).

    None as in `mean_interval`, or if the interval extends beyond the smallest or largest value. `memory` is as in
    `share_interval`.
    """
    value = float(np.percentile(series, percent))
    shares = share_interval(series <= value, memory)
    if shares is None or shares[0] <= 0 or shares[1] >= 1:
        return None
    low, high = np.quantile(series, shares)
    return min(float(low), value), max(float(high), value)


def rate_interval(times_s: np.ndarray, duration_s: float) -> Interval | None:
    """Return the interval of the number of events per second from their times (n,); None as in `mean_interval`."""
    if len(times_s) < MIN_TIMES or duration_s <= 0:
        return None
    counts, _ = np.histogram(times_s, bins=len(times_s), range=(0.0, duration_s))
    interval = mean_interval(counts.astype(np.float64))
    scale = len(times_s) / duration_s
    return None if interval is None else (max(0.0, interval[0] * scale), interval[1] * scale)


def autocorrelation_time(series: np.ndarray) -> float:
    """Return the number of values of a series that count as one independent value, at least 1."""
    # A series that varies by rounding only has no correlation.
    if not len(series) or np.ptp(series) <= 1e-9 * np.abs(series).max():
        return 1.0
    centred = series - series.mean()
    # Padded, so that the end of the series does not wrap around to its beginning.
    size = 2 ** math.ceil(math.log2(2 * len(series)))
    spectrum = np.fft.rfft(centred, size)
    covariances = np.fft.irfft(spectrum * spectrum.conj(), size)[: len(series)]
    times = 2 * np.cumsum(covariances / covariances[0]) - 1
    wide = np.arange(len(times)) >= _WINDOW * times
    return max(1.0, float(times[np.argmax(wide)] if wide.any() else times[-1]))
