"""The figures that gates look at, from any result file: evaluations, comparisons, serve summaries, benchmarks.

A figure comes with the interval that its file allows: what the evaluation computed, Wilson's interval of a share of
requests, bootstraps over the requests of a serve run. A figure without one counts as exact.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..data.errors import UsageError
from ..data.wilson import wilson_interval
from .result_files import COMPARE_FILE, COMPARE_KIND, RESULTS_FILE, RESULTS_KIND, EvalResults, read_json
from .results import CONFIDENCE

BASELINE_KIND = "psctl-baseline"
RESULT_FILES = (RESULTS_FILE, COMPARE_FILE, "summary.json", "steps.json")
"""What a folder of a run may hold."""

# Names as people say them, for those of the benchmark clients.
_SERVE_NAMES = {
    "slo_attainment_rate": "slo_attainment",
    "throughput_qps": "throughput",
    "goodput_qps": "goodput",
}
_PERCENTILES = {"latency_p50": 50, "latency_median": 50, "latency_p95": 95, "latency_p99": 99}
_NUM_RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with what is known about how sure it is.

    Attributes:
        name: of the metric.
        value: the number.
        low, high: 95 % interval; both equal to the value if it counts as exact, None if its sample is too small.
        n: number of images, requests or runs behind it; None if the file does not say.
        source: the file.
    """

    name: str
    value: float
    low: float | None
    high: float | None
    n: int | None
    source: str

    @property
    def is_exact(self) -> bool:
        """Whether nothing is known of its spread."""
        return self.low == self.value == self.high


def load_figures(path: Path) -> dict[str, Figure]:
    """Read all figures of a result file, or of the result files in a run's folder.

    Raises:
        UsageError: there is no such file, it is no JSON object, or a folder holds none of `RESULT_FILES`.
    """
    if not path.is_dir():
        return _figures_of(path)
    files = [path / name for name in RESULT_FILES if (path / name).is_file()]
    if not files:
        raise UsageError(f"{path}: the folder holds no result file ({', '.join(RESULT_FILES)})")
    return {name: figure for file in files for name, figure in _figures_of(file).items()}


def repeated(figures: Sequence[Figure]) -> Figure:
    """Several runs of one metric as one figure: their mean with Student's interval over the runs."""
    from scipy import stats

    values = np.array([figure.value for figure in figures])
    mean, count = float(values.mean()), len(values)
    half = None
    if count > 1:
        half = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1) * values.std(ddof=1) / math.sqrt(count))
    low, high = (None, None) if half is None else (mean - half, mean + half)
    return Figure(figures[0].name, mean, low, high, count, ", ".join(figure.source for figure in figures))


def _figures_of(file: Path) -> dict[str, Figure]:
    content = read_json(file)
    kind = content.get("kind")
    if kind == RESULTS_KIND:
        results = EvalResults.from_json(content, file).metrics
        found = [Figure(name, each.value, each.low, each.high, each.n, str(file)) for name, each in results.items()]
    elif kind == COMPARE_KIND:
        found = list(_compared(content, file))
    elif kind == BASELINE_KIND:
        found = list(_baseline(content, file))
    elif "slo_attainment_rate" in content and "throughput_qps" in content:
        found = list(_served(content, file))
    else:
        found = list(_plain(content, file))
    return {figure.name: figure for figure in found}


def _compared(content: Mapping[str, Any], file: Path) -> Iterator[Figure]:
    """Distances between the two sides by their own names, differences as `clip[...].difference` and `.win_rate`."""
    for name, each in _entries(content, "metrics", file):
        yield _figure(name, each, file, "value", "low", "high")
    for name, each in _entries(content, "differences", file):
        yield _figure(f"{name}.difference", each, file, "difference", "low", "high")
        if each.get("win_rate") is not None:
            yield _figure(f"{name}.win_rate", each, file, "win_rate", "win_low", "win_high")


def _baseline(content: Mapping[str, Any], file: Path) -> Iterator[Figure]:
    for name, each in _entries(content, "metrics", file):
        yield _figure(name, each, file, "value", "low", "high")


def _entries(content: Mapping[str, Any], key: str, file: Path) -> list[tuple[str, Mapping[str, Any]]]:
    entries = content.get(key, {})
    if not isinstance(entries, Mapping) or not all(isinstance(each, Mapping) for each in entries.values()):
        raise UsageError(f"{file}: {key} must be a mapping of mappings")
    return list(entries.items())


def _figure(name: str, entry: Mapping[str, Any], file: Path, value: str, low: str, high: str) -> Figure:
    numbers = [entry.get(key) for key in (value, low, high)]
    count = entry.get("n")
    if not _is_number(numbers[0]) or any(each is not None and not _is_number(each) for each in numbers[1:]):
        raise UsageError(f"{file}: {name} must have a number as {value}, and numbers or null as {low} and {high}")
    return Figure(name, *numbers, count if isinstance(count, int) else None, str(file))  # type: ignore[arg-type]


def _served(content: Mapping[str, Any], file: Path) -> Iterator[Figure]:
    spreads = _request_intervals(file.with_name("records.parquet"))
    for figure in _plain(content, file):
        name = _SERVE_NAMES.get(figure.name, figure.name)
        low, high, count = spreads.get(name, (figure.low, figure.high, figure.n))
        yield Figure(name, figure.value, low, high, count, figure.source)


def _request_intervals(records: Path) -> dict[str, tuple[float, float, int]]:
    """Intervals from the records beside a summary, treating requests as independent; none where they are missing."""
    if not records.is_file():
        return {}
    from ..data.tables import RECORDS, read_rows

    rows = read_rows(records, RECORDS)
    met = [row["slo_met"] for row in rows if row["slo_met"] is not None]
    found: dict[str, tuple[float, float, int]] = {}
    if met:
        found["slo_attainment"] = (*wilson_interval(sum(met), len(met)), len(met))
    latencies = np.array([row["latency_s"] for row in rows if row["latency_s"] is not None])
    if len(latencies) > 1:
        rng = np.random.default_rng(0)
        resamples = latencies[rng.integers(0, len(latencies), (_NUM_RESAMPLES, len(latencies)))]
        ends = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
        figures = {"latency_mean": (resamples.mean(1), latencies.mean())}
        for name, percent in _PERCENTILES.items():
            figures[name] = (np.percentile(resamples, percent, axis=1), np.percentile(latencies, percent))
        for name, (values, value) in figures.items():
            low, high = np.quantile(values, ends)
            found[name] = (float(min(low, value)), float(max(high, value)), len(latencies))
    return found


def _plain(content: Mapping[str, Any], file: Path, prefix: str = "") -> Iterator[Figure]:
    """Every number of an object by its path, as `per_resolution.128x128.latency_p95`; such numbers count as exact."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _plain(value, file, f"{prefix}{key}.")
        elif _is_number(value):
            yield Figure(prefix + key, float(value), float(value), float(value), None, str(file))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
