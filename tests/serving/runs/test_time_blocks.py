"""Confidence intervals from a single run, tested on a queue with known figures and autocorrelated latencies."""

import tracemalloc

import numpy as np
import pytest

from patchedserve.data.statistics import wilson_interval
from patchedserve.serving.runs.time_blocks import (
    autocorrelation_time,
    mean_interval,
    percentile_interval,
    rate_interval,
    share_interval,
)


def queue(rng: np.random.Generator, count: int, load: float) -> tuple[np.ndarray, np.ndarray]:
    """Return arrivals and latencies of an M/M/1 queue with mean service 1 in its steady state (Lindley, 1952).

    Latencies are exponential with mean 1 / (1 - load).
    """
    gaps, service = rng.exponential(1 / load, count), rng.exponential(1.0, count)
    change = np.cumsum(service[:-1] - gaps[1:])
    first = rng.exponential(1 / (1 - load)) if rng.random() < load else 0.0
    waits = np.maximum(first + change, change - np.minimum.accumulate(np.minimum(change, 0.0)))
    return np.cumsum(gaps), service + np.concatenate([[first], waits])


def misses(load: float, count: int, runs: int = 250) -> dict[str, tuple[float, float]]:
    """Return, by figure, the share of runs whose interval misses the truth and the share without an interval."""
    rng = np.random.default_rng(0)
    mean = 1 / (1 - load)
    truth = {"mean": mean, "p95": mean * np.log(20), "share": 0.9, "rate": load, "wilson": 0.9}
    missed, none = dict.fromkeys(truth, 0), dict.fromkeys(truth, 0)
    for _ in range(runs):
        arrivals, latencies = queue(rng, count, load)
        memory = autocorrelation_time(latencies)
        is_met = latencies <= mean * np.log(10)
        done = arrivals + latencies
        found = {
            "mean": mean_interval(latencies),
            "p95": percentile_interval(latencies, 95, memory),
            "share": share_interval(is_met, memory),
            "rate": rate_interval(done, float(done.max())),
            "wilson": wilson_interval(int(is_met.sum()), count),
        }
        for name, interval in found.items():
            if interval is None:
                none[name] += 1
            elif not interval[0] <= truth[name] <= interval[1]:
                missed[name] += 1
    return {name: (missed[name] / runs, none[name] / runs) for name in truth}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_intervals_of_long_runs_have_95_percent_coverage() -> None:
    found = misses(0.6, 10_000)
    assert found["wilson"][0] > 0.5
    for name in ("mean", "p95", "share", "rate"):
        assert 0.01 < found[name][0] < 0.09, name
        assert found[name][1] < 0.05, name


@pytest.mark.parametrize(("load", "count"), [(0.3, 300), (0.6, 300), (0.6, 3000), (0.8, 300), (0.8, 3000)])
def test_shorter_runs_keep_coverage_or_give_no_interval(load: float, count: int) -> None:
    found = misses(load, count)
    assert found["wilson"][0] > 0.15
    for name in ("mean", "p95", "share", "rate"):
        assert found[name][0] < 0.09, name
    if load == 0.8:
        assert found["share"][1] > 0.9


def test_independent_values_have_the_usual_intervals() -> None:
    values = np.random.default_rng(1).normal(10, 2, 5000)
    low, high = mean_interval(values) or (0, 0)
    assert high - low == pytest.approx(2 * 2.26 * 2 / np.sqrt(5000), rel=0.4)
    low, high = percentile_interval(values, 50, 1.0) or (0, 0)
    assert low < np.median(values) < high
    assert high - low < 0.3
    # If all are in time, the interval is Wilson's, not a point.
    assert share_interval(np.ones(5000, dtype=bool), 1.0) == wilson_interval(5000, 5000)


def test_too_few_values_give_no_interval() -> None:
    values = np.random.default_rng(2).normal(10, 2, 199)
    assert mean_interval(values) is None
    assert mean_interval(np.empty(0)) is None
    assert rate_interval(np.empty(0), 10.0) is None
    # With this memory, ten values count as one.
    assert mean_interval(np.tile(values, 10), memory=10) is None
    # The upper end of the interval of a p99.9 lies beyond the largest value.
    assert percentile_interval(np.random.default_rng(3).normal(size=1000), 99.9, 1.0) is None


def test_autocorrelation_time_of_an_autoregressive_series() -> None:
    noise = np.random.default_rng(4).normal(size=200_000)
    for share in (0.0, 0.5, 0.9):
        series = np.array(_filtered(noise, share))
        assert autocorrelation_time(series) == pytest.approx((1 + share) / (1 - share), rel=0.1)
    assert autocorrelation_time(np.ones(10)) == 1
    # The only variation is rounding, which changes with the magnitude of the numbers.
    assert autocorrelation_time((np.arange(1000) * 0.25 + 0.1) - np.arange(1000) * 0.25) == 1


def _filtered(noise: np.ndarray, share: float) -> list[float]:
    found, last = [], 0.0
    for each in noise.tolist():
        last = share * last + each
        found.append(last)
    return found


def test_intervals_of_100000_requests_need_little_memory() -> None:
    _, latencies = queue(np.random.default_rng(5), 100_000, 0.5)
    tracemalloc.start()
    assert percentile_interval(latencies, 95, autocorrelation_time(latencies)) is not None
    assert tracemalloc.get_traced_memory()[1] < 30e6
    tracemalloc.stop()
