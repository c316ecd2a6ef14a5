"""The figures that gates look at, from every kind of result file."""

from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from patchedserve.data.errors import UsageError
from patchedserve.data.files import write_json
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.data.tables import RECORDS, write_table
from patchedserve.eval.gate_metrics import load_figures
from patchedserve.eval.paired import compare_values
from patchedserve.eval.results import MetricResult
from patchedserve.serving.lifecycle import RequestRecord
from patchedserve.serving.metrics import summarize


def _served(folder: Path, latencies: list[float | None], slo_s: float = 2.0) -> Path:
    records = []
    for i, latency in enumerate(latencies):
        record = RequestRecord.of(Request(i, "a hat", Resolution(64, 64), slo_s=slo_s))
        record.admitted_s = 0.1
        record.close("failed" if latency is None else "completed", latency or 1.0)
        records.append(record)
    folder.mkdir()
    summary = summarize(records, 10.0, slo_scale=5.0, model="tiny", dataset="poisson")
    write_json(folder / "summary.json", summary | {"config": {"seed": 3}})
    write_table(folder / "records.parquet", RECORDS, [record.to_row() for record in records])
    return folder


def test_figures_of_a_serve_run_have_intervals_from_its_records(tmp_path: Path) -> None:
    latencies: list[float | None] = [*np.linspace(0.5, 2.5, 40).tolist(), None]
    run = _served(tmp_path / "serve-1", latencies)
    figures = load_figures(run)
    met = sum(1 for latency in latencies if latency is not None and latency <= 2.0)
    slo = figures["slo_attainment"]
    assert slo.value == pytest.approx(met / 41)
    wilson = scipy.stats.binomtest(met, 41).proportion_ci(method="wilson")
    assert (slo.low, slo.high) == pytest.approx((wilson.low, wilson.high), rel=1e-5)
    assert slo.n == 41
    p95 = figures["latency_p95"]
    assert p95.low is not None
    assert p95.high is not None
    assert p95.value == pytest.approx(np.percentile(np.linspace(0.5, 2.5, 40), 95))
    assert p95.low < p95.value <= p95.high
    assert p95.n == 40
    # Nothing is known of the spread of one run's throughput.
    throughput = figures["throughput"]
    assert throughput.value == 4.0
    assert throughput.is_exact
    assert figures["per_resolution.64x64.requests"].value == 41
    assert "throughput_qps" not in figures
    # Without records all figures count as exact.
    (run / "records.parquet").unlink()
    assert load_figures(run)["latency_p95"].is_exact


def test_figures_of_comparisons_and_plain_files(tmp_path: Path) -> None:
    values = {"a": 1.0, "b": 2.0, "c": 3.0}
    paired = compare_values("clip[emoji-clip]", values, {"a": 2.0, "b": 2.0, "c": 2.5}, "higher")
    content = {
        "kind": "psctl-compare",
        "metrics": {"psnr": MetricResult("psnr", 44.0, 43.0, 45.0, 3).to_json()},
        "differences": {"clip[emoji-clip]": paired.to_json()},
    }
    write_json(tmp_path / "compare.json", content)
    figures = load_figures(tmp_path)
    assert set(figures) == {"psnr", "clip[emoji-clip].difference", "clip[emoji-clip].win_rate"}
    assert figures["clip[emoji-clip].difference"].value == pytest.approx(0.5 / 3)
    assert figures["clip[emoji-clip].win_rate"].value == 0.5
    write_json(tmp_path / "steps.json", {"min_ratio": 1.25, "rows": [1], "is_fast": True, "name": "x", "none": None})
    assert set(load_figures(tmp_path / "steps.json")) == {"min_ratio"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must hold a JSON object"),
        ('{"kind": "psctl-eval", "version": 9, "metrics": {}}', "version 9"),
        ('{"kind": "psctl-eval", "version": 1, "metrics": [1]}', "must be a mapping"),
        ('{"kind": "psctl-eval", "version": 1, "metrics": {"fid": {"name": "fid"}}}', "'high' is missing"),
        ('{"kind": "psctl-baseline", "metrics": {"fid": {"value": "3"}}}', "must have a number"),
        ('{"kind": "psctl-baseline", "metrics": {"fid": 3}}', "mapping of mappings"),
    ],
)
def test_damaged_result_files_are_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content)
    with pytest.raises(UsageError, match=message) as caught:
        load_figures(file)
    assert "bad.json" in str(caught.value)


def test_missing_result_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.json: cannot be read: no such file"):
        load_figures(tmp_path / "none.json")
    with pytest.raises(UsageError, match="holds no result file"):
        load_figures(tmp_path)
