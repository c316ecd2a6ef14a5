"""The figures that gates read from every kind of result file."""

import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.figures import write_figures
from patchedserve.data.files import write_json
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.data.statistics import wilson_interval
from patchedserve.eval.compare.comparison import ComparedSide, Comparison
from patchedserve.eval.compare.paired import compare_values
from patchedserve.eval.gates.judging import Gate, judge
from patchedserve.eval.result_files import EvalResults
from patchedserve.eval.results import MetricResult
from patchedserve.serving.core.metrics import summarize
from patchedserve.serving.core.request_state import RequestRecord
from patchedserve.serving.runs.figures import run_figures

from ...support.gate_results import figures_in


def _run(
    latencies: Sequence[float | None], slo_s: float = 2.0, gap_s: float = 0.25
) -> tuple[dict[str, Any], list[RequestRecord]]:
    """Return summary and records of a run whose requests arrive at equal intervals; those without a latency fail."""
    records = []
    for i, latency in enumerate(latencies):
        record = RequestRecord.of(Request(i, "a hat", Resolution(64, 64), arrival_s=i * gap_s, slo_s=slo_s))
        record.admitted_s = i * gap_s + 0.1
        record.close("failed" if latency is None else "completed", i * gap_s + (latency or 1.0))
        records.append(record)
    duration_s = max(record.finish_s or 0.0 for record in records)
    summary = summarize(records, duration_s, slo_scale=5.0, model="tiny", dataset="poisson")
    return summary | {"config": {"seed": 3, "duration": 10.0}, "num_steps": 7}, records


def _served(folder: Path, latencies: Sequence[float | None]) -> Path:
    """Write the folder of such a run."""
    folder.mkdir()
    summary, records = _run(latencies)
    write_json(folder / "summary.json", write_figures(summary, run_figures(summary, records)))
    return folder


def test_serve_run_figures_have_intervals_from_records(tmp_path: Path) -> None:
    drawn = np.random.default_rng(0).uniform(0.5, 2.5, 1000).tolist()
    latencies: list[float | None] = [*drawn, None]
    run = _served(tmp_path / "serve-1", latencies)
    figures = figures_in(run)
    met = sum(1 for latency in drawn if latency <= 2.0)
    slo = figures["slo_attainment"]
    assert slo.value == pytest.approx(met / 1001)
    assert slo.n == 1001
    wilson = wilson_interval(met, 1001)
    for figure, value in ((slo, 0.75), (figures["latency_p95"], 2.4), (figures["latency_mean"], 1.5)):
        assert figure.low is not None
        assert figure.high is not None
        assert figure.low < value < figure.high
        assert figure.low < figure.value < figure.high
    assert slo.low is not None
    assert slo.high is not None
    assert slo.low <= wilson[0]
    assert slo.high >= wilson[1]
    p95 = figures["latency_p95"]
    assert p95.value == pytest.approx(np.percentile(drawn, 95))
    assert p95.n == 1000
    # Images arrive evenly, so the rate is well known; goodput is that rate times the share in time.
    throughput, goodput = figures["throughput"], figures["goodput"]
    assert throughput.low is not None
    assert throughput.high is not None
    assert throughput.low < throughput.value < throughput.high
    assert throughput.high - throughput.low < 0.2
    duration_s = figures["duration"].value
    assert (goodput.low, goodput.high) == pytest.approx((slo.low * 1001 / duration_s, slo.high * 1001 / duration_s))
    alike = figures["per_resolution.64x64.latency_p95"]
    assert (alike.value, alike.low, alike.high) == (p95.value, p95.low, p95.high)
    assert figures["per_resolution.64x64.slo_attainment_rate"].low == slo.low
    # Counts and settings are exact; a single measurement without an interval is no evidence.
    for name in ("per_resolution.64x64.requests", "num_steps", "config.seed", "config.duration"):
        assert figures[name].is_exact
    assert figures["duration"].low is None
    assert "throughput_qps" not in figures
    # A run by an earlier version has no intervals.
    write_json(run / "summary.json", _run(latencies)[0])
    with pytest.raises(UsageError, match=r"summary\.json: is of an older version .*; run psctl serve or"):
        figures_in(run)


def test_one_short_run_is_not_enough_evidence_but_repeats_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    runs = [_served(tmp_path / f"serve-{i}", rng.uniform(0.5, 2.5, 60).tolist()) for i in range(4)]
    for metric in ("throughput", "goodput", "slo_attainment", "latency_p95", "latency_mean"):
        assert figures_in(runs[0])[metric].low is None
        (one,) = judge([Gate(metric, {"min": 0.001}, "a gate")], runs[:1], None)
        (all_four,) = judge([Gate(metric, {"min": 0.001}, "a gate", repeats=True)], runs, None)
        assert (one.verdict, all_four.verdict) == ("not enough evidence", "pass")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_reading_a_long_run_needs_little_memory() -> None:
    summary, records = _run(np.random.default_rng(2).uniform(0.5, 2.5, 100_000).tolist())
    tracemalloc.start()
    figures = run_figures(summary, records)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert figures["latency_p99"].low is not None
    # A thousand resamples of all records at once would take 800 MB for the indices alone.
    assert peak < 60e6


def test_figures_of_comparisons_and_plain_files(tmp_path: Path) -> None:
    values = {"a": 1.0, "b": 2.0, "c": 3.0}
    paired = compare_values("clip[emoji-clip]", values, {"a": 2.0, "b": 2.0, "c": 2.5}, "higher")
    side = ComparedSide("images", {}, {}, None)
    distances = {"psnr": MetricResult("psnr", 44.0, 43.0, 45.0, 3)}
    Comparison(side, side, distances, {"clip[emoji-clip]": paired}).save(tmp_path / "compare.json")
    figures = figures_in(tmp_path)
    assert set(figures) == {"psnr", "clip[emoji-clip].difference", "clip[emoji-clip].win_rate"}
    assert figures["clip[emoji-clip].difference"].value == pytest.approx(0.5 / 3)
    assert figures["clip[emoji-clip].win_rate"].value == 0.5
    write_json(tmp_path / "steps.json", {"min_ratio": 1.25, "rows": [1], "is_fast": True, "name": "x", "none": None})
    assert set(figures_in(tmp_path / "steps.json")) == {"min_ratio"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "holds a list, but a result must be an object"),
        ('{"kind": "psctl-eval", "version": 9, "metrics": {}}', "of an older version .*; run psctl eval again"),
        ('{"kind": "psctl-compare", "version": 1, "metrics": {}}', "run psctl eval compare again"),
        ('{"figures": {}, "per_image": {"psnr": {"a": "3"}}}', "per_image: psnr.a is '3', but it must be a number"),
        ('{"figures": {}, "per_image": [1]}', r"per_image: content is \[1\], but it must be a mapping"),
        ('{"kind": "psctl-baseline", "metrics": {"fid": {"value": "3"}}}', "must be a finite number"),
        ('{"kind": "psctl-baseline", "metrics": {"fid": [3]}}', r"fid: value is \[3\]"),
        ('{"kind": "psctl-baseline", "metrics": 3}', "metrics must be a mapping of figures"),
    ],
)
def test_damaged_result_files_are_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content)
    with pytest.raises(UsageError, match=message) as caught:
        figures_in(file)
    assert "bad.json" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"kind": "psctl-eval", "version": 9, "metrics": {}}, "version 9"),
        ({"kind": "psctl-eval", "version": 1, "metrics": [1]}, r"metrics is \[1\], but it must be a mapping"),
        ({"kind": "psctl-eval", "version": 1, "metrics": {"fid": {"name": "fid"}}}, "'metrics.fid.value' is missing"),
        ({"kind": "psctl-eval", "version": 1}, "'metrics' is missing"),
        ({"version": 1, "metrics": {}}, "is not a result of psctl eval"),
    ],
)
def test_damaged_evaluations_are_named(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    write_json(tmp_path / "bad.json", content)
    with pytest.raises(UsageError, match=rf"bad\.json: .*{message}"):
        EvalResults.load(tmp_path / "bad.json")


def test_missing_result_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.json: cannot read a result: No such file"):
        figures_in(tmp_path / "none.json")
    with pytest.raises(UsageError, match="holds no result file"):
        figures_in(tmp_path)
