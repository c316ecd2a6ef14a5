"""Figures of one served or simulated run: `summary.json`, with intervals from the `records.parquet` beside it."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...data.tables.schemas import RECORDS, read_table
from .figures import Figure, is_number, plain_figures
from .time_blocks import (
    Interval,
    autocorrelation_time,
    mean_interval,
    percentile_interval,
    rate_interval,
    share_interval,
)

# Names as people say them, for those of the benchmark clients.
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
"""How names of figures begin that another run would give otherwise."""
_COLUMNS = ("width", "height", "arrival_s", "finish_s", "latency_s", "queueing_s", "slo_met")

_Found = dict[str, tuple[Interval | None, int]]


def served_figures(content: Mapping[str, Any], file: Path) -> Iterator[Figure]:
    """All numbers of a summary. What was measured has the interval that the records allow (`time_blocks`), or none.

    Raises:
        UsageError: the records are damaged.
    """
    duration_s = content.get("duration")
    found = _intervals(file.with_name("records.parquet"), float(duration_s) if is_number(duration_s) else 0.0)
    for figure in plain_figures(content, file):
        name = _NAMES.get(figure.name, figure.name)
        is_measured = name.rpartition(".")[2].startswith(_MEASURED) and not name.startswith("config.")
        if name in found:
            interval, count = found[name]
            low, high = interval or (None, None)
            yield Figure(name, figure.value, low, high, count, figure.source)
        else:
            named = replace(figure, name=name)
            yield replace(named, low=None, high=None) if is_measured else named


def _intervals(records: Path, duration_s: float) -> _Found:
    """Interval and number of requests by the name of the figure; nothing without records."""
    if not records.is_file():
        return {}
    table = read_table(records, RECORDS, _COLUMNS)
    order = np.argsort(table["arrival_s"].to_numpy(), kind="stable")
    columns = {name: table[name].to_numpy()[order] for name in _COLUMNS}
    found = _of_requests(columns)
    done_s = columns["finish_s"][~np.isnan(columns["latency_s"])]
    found["throughput"] = rate_interval(done_s, duration_s), len(done_s)
    if "slo_attainment" in found and duration_s > 0:
        # As many requests arrive in another run of the same trace.
        interval, count = found["slo_attainment"]
        scale = count / duration_s
        found["goodput"] = None if interval is None else (interval[0] * scale, interval[1] * scale), count
    sizes = np.stack([columns["width"], columns["height"]], axis=1)
    for width, height in np.unique(sizes, axis=0).tolist():
        mine = (sizes == (width, height)).all(1)
        part = _of_requests({name: column[mine] for name, column in columns.items()})
        # Summaries name this one otherwise within resolutions.
        for name, each in part.items():
            inner = "slo_attainment_rate" if name == "slo_attainment" else name
            found[f"per_resolution.{width}x{height}.{inner}"] = each
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
    flags = np.array([each for each in columns["slo_met"].tolist() if each is not None], dtype=bool)
    if len(flags):
        found["slo_attainment"] = share_interval(flags, memory), len(flags)
    return found
