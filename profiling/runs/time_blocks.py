"""95 % intervals of the figures of one served run, whose requests are late together. No torch.

Requests that queue behind each other are not independent, so taking them one by one says far too surely what another
run would give: of a single server that is busy 60 % of the time, the 95 % interval of the attainment then holds the
truth 42 times in 100. Here a run is cut into `NUM_BLOCKS` blocks of time, and Student's interval is taken over the
blocks: the method of batch means (Schmeiser, "Batch size effects in the analysis of simulation output", 1982). A block
bootstrap over so few blocks would be too narrow, as it lacks Student's factor.

Blocks are independent only if they are long against the time for which a queue remembers. That is measured as the
integrated autocorrelation time (Sokal, "Monte Carlo methods in statistical mechanics", 1997, section 3), and a run
shorter than `MIN_TIMES` of them has no interval: gates then say "not enough evidence". A short run that looks calm is
the danger, because it also looks as if it remembered little. With 200 times about 5 runs in 100 get an interval that
misses the truth, whatever their length (with 50 times 13). So a run wants some 300 requests if they hardly meet each
other, and thousands in a busy queue; several runs with `repeats = true` need no such length.
"""

import math

import numpy as np

from ...data.statistics import student_interval, wilson_interval

NUM_BLOCKS = 10
MIN_TIMES = 200
_WINDOW = 5

Interval = tuple[float, float]


def mean_interval(series: np.ndarray, memory: float = 1.0) -> Interval | None:
    """Interval of the mean of values in order of time; None if the run is too short to tell.

    Args:
        series: (n,).
        memory: how many values count as one at the least; that of the series itself counts, too.
    """
    if len(series) < MIN_TIMES * max(memory, autocorrelation_time(series)):
        return None
    mean, size = float(series.mean()), len(series) / NUM_BLOCKS
    # Sums, because the lengths of blocks may differ by one.
    blocks = np.array_split(series - mean, NUM_BLOCKS)
    return student_interval([mean + float(block.sum()) / size for block in blocks])


def share_interval(flags: np.ndarray, memory: float) -> Interval | None:
    """Interval of the share of requests for which something holds; None as `mean_interval`.

    It is never narrower than Wilson's, which takes requests as independent, and stays within 0 and 1.

    Args:
        flags: (n,) bools in order of time.
        memory: of the latencies, because flags that are nearly all alike do not show their own.
    """
    interval = mean_interval(flags.astype(np.float64), memory)
    if interval is None:
        return None
    low, high = wilson_interval(int(flags.sum()), len(flags))
    return max(0.0, min(low, interval[0])), min(1.0, max(high, interval[1]))


def percentile_interval(series: np.ndarray, percent: float, memory: float) -> Interval | None:
    """Interval of a percentile of values in order of time: the quantiles at both ends of the interval of the share that
    lies below it (Woodruff, "Confidence intervals for medians and other position measures", 1952).

    None as `mean_interval`, or if the interval goes beyond the smallest or largest value. `memory` as of
    `share_interval`.
    """
    value = float(np.percentile(series, percent))
    shares = share_interval(series <= value, memory)
    if shares is None or shares[0] <= 0 or shares[1] >= 1:
        return None
    low, high = np.quantile(series, shares)
    return min(float(low), value), max(float(high), value)


def rate_interval(times_s: np.ndarray, duration_s: float) -> Interval | None:
    """Interval of the number of events per second, given when they happened, (n,); None as `mean_interval`."""
    if len(times_s) < MIN_TIMES or duration_s <= 0:
        return None
    counts, _ = np.histogram(times_s, bins=len(times_s), range=(0.0, duration_s))
    interval = mean_interval(counts.astype(np.float64))
    scale = len(times_s) / duration_s
    return None if interval is None else (max(0.0, interval[0] * scale), interval[1] * scale)


def autocorrelation_time(series: np.ndarray) -> float:
    """How many values of a series count as one independent value; 1 at the least."""
    # What differs by rounding only has no memory.
    if not len(series) or np.ptp(series) <= 1e-9 * np.abs(series).max():
        return 1.0
    centred = series - series.mean()
    # Padded, so that the end of the series does not meet its beginning.
    size = 2 ** math.ceil(math.log2(2 * len(series)))
    spectrum = np.fft.rfft(centred, size)
    covariances = np.fft.irfft(spectrum * spectrum.conj(), size)[: len(series)]
    times = 2 * np.cumsum(covariances / covariances[0]) - 1
    wide = np.arange(len(times)) >= _WINDOW * times
    return max(1.0, float(times[np.argmax(wide)] if wide.any() else times[-1]))
