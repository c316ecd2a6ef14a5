"""The figures that gates look at, from any result file: evaluations, comparisons, serve summaries, benchmarks.

A figure comes with the interval that its file allows: what the evaluation computed, blocks of time of a served run,
seeds of a sweep, repeats of a benchmark. What was measured once and has none is no evidence; numbers of other files
count as exact. What figures are called:

    results.json  fid, clip[JUDGE], ...           compare.json  psnr, clip[JUDGE].difference, clip[JUDGE].win_rate
    summary.json  slo_attainment, throughput, goodput, latency_p95, per_resolution.128x128.latency_p95, ...
    result.json   slack@2.slo_attainment, slack@2.goodput, slack.rate_at_95, slack.ratio_at_95, ... (bench slo)
    steps.json    SML.ratio_same_resolution, ...   cache.json   SML.interval 3.speedup, SML.interval 3.clip_change, ...
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...data.errors import UsageError
from ...data.statistics import student_interval
from ..result_files import COMPARE_FILE, COMPARE_KIND, RESULTS_FILE, RESULTS_KIND, EvalResults, read_json
from .benches import is_rows, is_sweep, row_figures, sweep_figures
from .figures import Figure, is_number, plain_figures
from .served import served_figures

BASELINE_KIND = "psctl-baseline"
RESULT_FILES = (RESULTS_FILE, COMPARE_FILE, "summary.json", "result.json", "steps.json", "cache.json")
"""What a folder of a run may hold."""


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
    values = [figure.value for figure in figures]
    low, high = student_interval(values) or (None, None)
    sources = ", ".join(figure.source for figure in figures)
    return Figure(figures[0].name, math.fsum(values) / len(values), low, high, len(values), sources)


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
        found = list(served_figures(content, file))
    elif is_sweep(content):
        found = list(sweep_figures(content, file))
    elif is_rows(content):
        found = list(row_figures(content, file))
    else:
        found = list(plain_figures(content, file))
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
    if not is_number(numbers[0]) or any(each is not None and not is_number(each) for each in numbers[1:]):
        raise UsageError(f"{file}: {name} must have a number as {value}, and numbers or null as {low} and {high}")
    return Figure(name, *numbers, count if isinstance(count, int) else None, str(file))  # type: ignore[arg-type]
