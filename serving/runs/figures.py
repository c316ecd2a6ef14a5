"""Figures of one served or simulated run, with the intervals that its records support (`time_blocks`). This module
imports no torch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...data.figures import numbers_of
from ...data.statistics import Estimate
from ..core.request_state import RequestRecord
from .time_blocks import (
    Interval,
    autocorrelation_time,
    mean_interval,
    percentile_interval,
    rate_interval,
    share_interval,
)

# Our names of figures, by the names that benchmark clients use.
_NAMES = {
    "slo_attainment_rate": "slo_attainment",
    "throughput_qps": "throughput",
    "goodput_qps": "goodput",
}
_LATENCY_PERCENTILES = {"latency_p50": 50, "latency_median": 50, "latency_p95": 95, "latency_p99": 99}
_QUEUEING_PERCENTILES = {"queueing_p95": 95}
_MEASURED = (
    *("latency_", "queueing_", "scheduling_", "step_latency_", "batch_size_", "denoise_busy_", "duration"),
    *("slo_attainment", "throughput", "goodput"),
)
"""Prefixes of the names of figures that vary from run to run."""
_COLUMNS = ("arrival_s", "finish_s", "latency_s", "queueing_s")

_Found = dict[str, tuple[Interval | None, int]]


def run_figures(summary: Mapping[str, Any], records: Sequence[RequestRecord]) -> dict[str, Estimate]:
    """Return all numbers of a summary (`summarize`) by their paths.

    A measured number has the interval that the records support, or none. A number that was counted or set is exact.
    """
    duration_s = float(summary["duration"])
    found = _intervals(records, duration_s)
    figures = {}
    for path, each in numbers_of(summary).items():
        name = _NAMES.get(path, path)
        is_measured = name.rpartition(".")[2].startswith(_MEASURED) and not name.startswith("config.")
        if name in found:
            interval, count = found[name]
            figures[name] = Estimate(each.value, *(interval or (None, None)), count or None)
        else:
            figures[name] = Estimate(each.value) if is_measured else each
    return figures


def _intervals(records: Sequence[RequestRecord], duration_s: float) -> _Found:
    """Return interval and number of requests by the name of the figure."""
    ordered = sorted(records, key=lambda record: record.arrival_s)
    columns = {name: np.array([getattr(each, name) for each in ordered], dtype=np.float64) for name in _COLUMNS}
    columns["slo_met"] = np.array([each.slo_met for each in ordered], dtype=object)
    found = _of_requests(columns)
    done_s = columns["finish_s"][~np.isnan(columns["latency_s"])]
    found["throughput"] = rate_interval(done_s, duration_s), len(done_s)
    if "slo_attainment" in found and duration_s > 0:
        # The number of requests is the same in every run of a trace, so goodput scales with attainment.
        interval, count = found["slo_attainment"]
        scale = count / duration_s
        found["goodput"] = None if interval is None else (interval[0] * scale, interval[1] * scale), count
    sizes = np.array([str(each.resolution) for each in ordered])
    for size in np.unique(sizes).tolist():
        # Within resolutions, summaries use the benchmark clients' name for SLO attainment.
        for name, each in _of_requests({name: column[sizes == size] for name, column in columns.items()}).items():
            found[f"per_resolution.{size}.{'slo_attainment_rate' if name == 'slo_attainment' else name}"] = each
    return found


def _of_requests(columns: Mapping[str, np.ndarray]) -> _Found:
    found: _Found = {}
    memory = 1.0
    for name, percentiles in (("latency", _LATENCY_PERCENTILES), ("queueing", _QUEUEING_PERCENTILES)):
        series = columns[f"{name}_s"]
        series = series[~np.isnan(series)]
        if len(series):
            own = autocorrelation_time(series)
            memory = own if name == "latency" else memory
            found[f"{name}_mean"] = mean_interval(series), len(series)
            for percentile, percent in percentiles.items():
                found[percentile] = percentile_interval(series, percent, own), len(series)
    flags = np.array([each for each in columns["slo_met"] if each is not None], dtype=bool)
    if len(flags):
        found["slo_attainment"] = share_interval(flags, memory), len(flags)
    return found
