"""Quality gates: figures of every kind of result file, verdicts by intervals, reports, and the command."""

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import scipy.stats

from patchedserve.data.errors import UsageError
from patchedserve.data.files import write_json
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.data.tables import RECORDS, write_table
from patchedserve.eval.gate_file import read_gates
from patchedserve.eval.gate_metrics import load_figures, wilson_interval
from patchedserve.eval.gates import Gate, GateVerdict, judge, write_baseline
from patchedserve.eval.paired import compare_values
from patchedserve.eval.result_files import EvalResults
from patchedserve.eval.results import MetricResult
from patchedserve.serving.lifecycle import RequestRecord
from patchedserve.serving.metrics import summarize

from .conftest import RunPsctl


def _results(path: Path, **figures: tuple[float, float | None, float | None]) -> Path:
    """A result file with these figures: value, low, high."""
    names = {name.replace("__", "[emoji-clip]"): figure for name, figure in figures.items()}
    EvalResults({name: MetricResult(name, *figure, n=256) for name, figure in names.items()}).save(path)
    return path


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return _results(
        tmp_path / "results.json", fid=(30.0, 28.0, 32.0), clip__=(31.0, 30.8, 31.2), kid=(-0.001, -0.003, 0.001)
    )


def _one(results: Path, baseline: Path | None = None, *, metric: str = "fid", **bounds: float) -> GateVerdict:
    (verdict,) = judge([Gate(metric, bounds, "a gate")], [results], baseline)
    return verdict


# Verdicts


@pytest.mark.parametrize(
    ("bounds", "verdict"),
    [
        ({"max": 33}, "pass"),
        ({"max": 32}, "pass"),
        ({"max": 31}, "not enough evidence"),
        ({"max": 29}, "not enough evidence"),
        ({"max": 27.9}, "fail"),
        ({"min": 27}, "pass"),
        ({"min": 29}, "not enough evidence"),
        ({"min": 33}, "fail"),
        ({"min": 20, "max": 40}, "pass"),
        ({"min": 20, "max": 31}, "not enough evidence"),
        ({"min": 33, "max": 31}, "fail"),
    ],
)
def test_a_gate_fails_only_if_the_interval_is_beyond_the_bound(
    results: Path, bounds: dict[str, float], verdict: str
) -> None:
    found = _one(results, **bounds)  # type: ignore[arg-type]
    assert found.verdict == verdict
    assert (found.value, found.low, found.high, found.n) == (30, 28, 32, 256)


def test_relative_bounds_count_the_baselines_own_interval(tmp_path: Path, results: Path) -> None:
    exact = tmp_path / "exact.json"
    write_json(
        exact, {"kind": "psctl-baseline", "version": 1, "metrics": {"fid": {"value": 29, "low": 29, "high": 29}}}
    )
    # The interval 28 to 32 against 29 x 1.12 = 32.48, and against 29 x 1.08 = 31.32.
    assert _one(results, exact, max_ratio=1.12).verdict == "pass"
    assert _one(results, exact, max_ratio=1.08).verdict == "not enough evidence"
    assert _one(results, exact, max_ratio=0.9).verdict == "fail"
    assert _one(results, exact, min_ratio=0.95).verdict == "pass"
    assert _one(results, exact, max_increase=3.0).verdict == "pass"
    assert _one(results, exact, max_increase=2.9).verdict == "not enough evidence"
    assert _one(results, exact, max_decrease=1.0).verdict == "pass"
    assert _one(results, exact, max_decrease=0.5).verdict == "not enough evidence"
    # An unsure baseline: the difference 1 has an interval of sqrt(2^2 + 3^2) = 3.606 around it.
    unsure = _results(tmp_path / "unsure.json", fid=(29.0, 26.0, 32.0))
    assert _one(results, unsure, max_increase=4.61).verdict == "pass"
    assert _one(results, unsure, max_increase=4.60).verdict == "not enough evidence"
    # Of two uneven sides the ends that matter count: figure's high end, baseline's low end.
    uneven = _results(tmp_path / "uneven.json", fid=(29.0, 28.0, 40.0))
    assert _one(results, uneven, max_increase=1 + math.hypot(2, 1) + 0.001).verdict == "pass"
    assert _one(results, uneven, max_increase=1 + math.hypot(2, 1) - 0.001).verdict == "not enough evidence"
    shown = _one(results, exact, max_ratio=1.12).bounds
    assert shown == ("<= 32.48 (baseline 29, max_ratio 1.12)",)


def test_ratio_needs_a_positive_baseline_and_the_baseline_the_metric(tmp_path: Path, results: Path) -> None:
    with pytest.raises(UsageError, match=r"positive baseline, but it is -0\.001"):
        _one(results, results, metric="kid", max_ratio=1.1)
    assert _one(results, results, metric="kid", max_increase=0.01).verdict == "pass"
    other = _results(tmp_path / "other.json", psnr=(30.0, 29.0, 31.0))
    with pytest.raises(UsageError, match=r"has no 'fid'; there: psnr"):
        _one(results, other, max_ratio=1.1)
    with pytest.raises(UsageError, match="no baseline is named"):
        _one(results, max_ratio=1.1)


def test_too_few_samples_are_no_evidence(tmp_path: Path, results: Path) -> None:
    gate = Gate("fid", {"max": 100.0}, "a", min_samples=257)
    assert judge([gate], [results], None)[0].verdict == "not enough evidence"
    assert judge([Gate("fid", {"max": 100.0}, "a", min_samples=256)], [results], None)[0].verdict == "pass"
    single = _results(tmp_path / "single.json", fid=(30.0, None, None))
    assert _one(single, max=100.0).verdict == "not enough evidence"


def test_bare_name_stands_for_the_only_judge(tmp_path: Path, results: Path) -> None:
    assert _one(results, metric="clip", min=30).metric == "clip[emoji-clip]"
    two = _results(tmp_path / "two.json", clip__=(31.0, 30.0, 32.0), **{"clip[other]": (29.0, 28.0, 30.0)})
    with pytest.raises(UsageError, match=r"no metric 'clip'.*there: clip\[emoji-clip\], clip\[other\]"):
        _one(two, metric="clip", min=30)
    assert _one(two, metric="clip[other]", min=28).verdict == "pass"


def test_metric_in_several_files_must_be_told_apart_or_are_repeats(tmp_path: Path) -> None:
    files = []
    for i, throughput in enumerate((1.9, 2.0, 2.1)):
        write_json(tmp_path / f"{i}.json", {"throughput": throughput})
        files.append(tmp_path / f"{i}.json")
    with pytest.raises(UsageError, match=r"is in .*0\.json and in .*2\.json; name one with file"):
        judge([Gate("throughput", {"min": 1.5}, "a")], files, None)
    (one,) = judge([Gate("throughput", {"min": 1.5}, "a", file=files[1])], files, None)
    assert (one.value, one.verdict) == (2.0, "pass")
    (all_runs,) = judge([Gate("throughput", {"min": 1.5}, "a", repeats=True)], files, None)
    interval = scipy.stats.t.interval(0.95, 2, 2.0, 0.1 / math.sqrt(3))
    assert (all_runs.low, all_runs.high) == pytest.approx(interval)
    assert all_runs.n == 3
    (run,) = judge([Gate("throughput", {"min": 1.5}, "a", repeats=True)], files[:1], None)
    assert run.verdict == "not enough evidence"


# Figures of result files


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


def test_wilson_interval_is_scipys_at_the_ends_too() -> None:
    for successes, total in ((0, 5), (5, 5), (1, 40), (20, 40)):
        expected = scipy.stats.binomtest(successes, total).proportion_ci(method="wilson")
        assert wilson_interval(successes, total) == pytest.approx((expected.low, expected.high), abs=1e-6)


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


# Paired comparison


def test_paired_comparison_by_hand() -> None:
    first = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}
    second = {"d": 4.0, "c": 5.0, "b": 2.5, "a": 0.0}
    found = compare_values("x", first, second, "higher", seed=1)
    assert (found.first, found.second, found.difference) == pytest.approx((2.5, 2.875, 0.375))
    assert (found.win_rate, found.tie_rate, found.n) == (0.625, 0.25, 4)  # two wins, one tie, one loss
    assert compare_values("x", first, second, "lower").win_rate == 0.375
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0.375 < found.high
    same = compare_values("x", first, first, "higher")
    assert (same.difference, same.low, same.high, same.win_rate, same.tie_rate) == (0, 0, 0, 0.5, 1)


def test_pairs_find_what_separate_figures_cannot() -> None:
    rng = np.random.default_rng(0)
    prompts = rng.normal(30, 5, 100)
    first = {str(i): value for i, value in enumerate(prompts)}
    second = {str(i): value + 0.2 + rng.normal(0, 0.3) for i, value in enumerate(prompts)}
    found = compare_values("clip", first, second, "higher")
    assert found.low is not None
    assert found.low > 0.1  # although either side's own interval is about 2 wide


def test_pairs_must_be_pairs() -> None:
    with pytest.raises(UsageError, match="1 are on one side only; b is on the second"):
        compare_values("x", {"a": 1.0}, {"a": 1.0, "b": 2.0}, "higher")
    with pytest.raises(UsageError, match="no pair"):
        compare_values("x", {}, {}, "higher")
    assert compare_values("x", {"a": 1.0}, {"a": 2.0}, "higher").low is None


def test_fid_difference_is_paired() -> None:
    import torch

    from patchedserve.eval.fid_stats import frechet_distance
    from patchedserve.eval.paired import compare_fid

    rng = np.random.default_rng(0)
    reference, first = (torch.from_numpy(rng.normal(size=(120, 6))) for _ in range(2))
    worse = first + 0.4
    found = compare_fid(first, worse, reference, num_resamples=60)
    expected = frechet_distance(reference, worse) - frechet_distance(reference, first)
    assert found.difference == pytest.approx(expected)
    assert found.low is not None
    assert found.low > 0
    same = compare_fid(first, first, reference, num_resamples=20)
    assert (same.difference, same.low, same.high) == (0, 0, 0)
    with pytest.raises(UsageError, match="pairs need as many"):
        compare_fid(first[:5], worse, reference)


# The gate file

GATES = """\
results = ["results.json"]
baseline = "baseline.json"

[[gate]]
metric = "fid"
max = 35
min_samples = 100

[[gate]]
name = "text still fits"
metric = "clip"
min_ratio = 0.98
"""


def test_gate_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "gates.toml").write_text(GATES)
    read = read_gates(tmp_path / "gates.toml")
    assert read.gates == (
        Gate("fid", {"max": 35.0}, "fid max 35", min_samples=100),
        Gate("clip", {"min_ratio": 0.98}, "text still fits"),
    )
    assert read.results == (tmp_path / "results.json",)
    assert read.baseline == tmp_path / "baseline.json"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("results = [\n'a'\n[[gate", r"not valid TOML: .*line 3"),
        ("", r"no gate; write \[\[gate\]\]"),
        ("gate = 3", "no gate"),
        ("gate = []", "no gate"),
        ("results = 'a'\n[[gate]]\nmetric = 'fid'\nmax = 1", "list of file names"),
        ("baseline = 1\n[[gate]]\nmetric = 'fid'\nmax = 1", "must be a file name"),
        ("gates = 1", "unknown key 'gates'"),
        ("[[gate]]\nmetric = 'fid'", "line 1: the gate of fid has no bound; give one of max, min"),
        ("\n\n[[gate]]\nmax = 3", "line 3: a gate needs a metric"),
        ("[[gate]]\nmetric = 'fid'\nmax = 1\n\n[[gate]]\nmetric = 'fid'\nmaxx = 2", "line 5: unknown key 'maxx'"),
        ("[[gate]]\nmetric = 'fid'\nmax = '3'", "max is '3', but it must be a finite number"),
        ("[[gate]]\nmetric = 'fid'\nmax = nan", "max is nan"),
        ("[[gate]]\nmetric = 'fid'\nmax = true", "max is True"),
        ("[[gate]]\nmetric = 'fid'\nmax_ratio = -1", "must not be negative"),
        ("[[gate]]\nmetric = 'fid'\nmax = 1\nrepeats = 2", "repeats is 2"),
        ("[[gate]]\nmetric = 'fid'\nmax = 1\nmin_samples = -2", "min_samples is -2"),
        ("gate = [{metric = 'fid'}]", "gate 1: the gate of fid has no bound"),
        ("[[gate]]\nmetric = 'fid'\nmax = 1\n[[gate]]\nmetric = 'fid'\nmax = 1", "two gates are called 'fid max 1'"),
    ],
)
def test_malformed_gate_files_name_the_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "gates.toml").write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        read_gates(tmp_path / "gates.toml")
    assert "gates.toml" in str(caught.value)


def test_baseline_keeps_other_metrics_and_survives_errors(tmp_path: Path, results: Path) -> None:
    baseline = tmp_path / "baseline.json"
    assert write_baseline(baseline, [Gate("fid", {"max": 1.0}, "a")], [results]) == ["fid"]
    assert write_baseline(baseline, [Gate("clip", {"min_ratio": 1.0}, "a")], [results]) == ["clip[emoji-clip]"]
    stored = json.loads(baseline.read_text())["metrics"]
    assert stored == {
        "clip[emoji-clip]": {"value": 31.0, "low": 30.8, "high": 31.2, "n": 256},
        "fid": {"value": 30.0, "low": 28.0, "high": 32.0, "n": 256},
    }
    before = baseline.read_bytes()
    with pytest.raises(UsageError, match="no metric 'lpips'"):
        write_baseline(baseline, [Gate("lpips", {"max": 1.0}, "a")], [results])
    assert baseline.read_bytes() == before


def test_baseline_has_no_metric_of_several_files(tmp_path: Path, results: Path) -> None:
    baseline = tmp_path / "baseline.json"
    other = _results(tmp_path / "other.json", fid=(3.0, 2.0, 4.0))
    gates = [
        Gate("fid", {"max": 99.0}, "a", results),
        Gate("fid", {"max": 9.0}, "b", other),
        Gate("kid", {"max": 1}, "c"),
    ]
    assert write_baseline(baseline, gates, [results]) == ["kid"]
    before = baseline.read_bytes()
    gates[1] = Gate("fid", {"max_ratio": 1.1}, "b", other)
    with pytest.raises(UsageError, match="gate 'b': fid is taken from several files"):
        write_baseline(baseline, gates, [results])
    assert baseline.read_bytes() == before
    # Of one file two gates may speak.
    gates[0] = Gate("fid", {"max": 9.0}, "a", other)
    assert write_baseline(baseline, gates, [results]) == ["fid", "kid"]
    assert json.loads(baseline.read_text())["metrics"]["fid"]["value"] == 3.0


# The command


def _write_gates(folder: Path, *gates: str) -> Path:
    file = folder / "gates.toml"
    file.write_text(
        'results = ["results.json"]\nbaseline = "baseline.json"\n' + "".join(f"[[gate]]\n{g}\n" for g in gates)
    )
    return file


@pytest.mark.parametrize(
    ("gates", "code", "verdict"),
    [
        (["metric = 'fid'\nmax = 33"], 0, "pass"),
        (["metric = 'fid'\nmax = 33", "metric = 'clip'\nmin = 31.1"], 3, "not enough evidence"),
        (["metric = 'fid'\nmax = 20", "metric = 'clip'\nmin = 31.1"], 1, "fail"),
    ],
)
def test_exit_codes_and_reports(
    run_psctl: RunPsctl, results: Path, tmp_path: Path, gates: list[str], code: int, verdict: str
) -> None:
    file = _write_gates(tmp_path, *gates)
    (tmp_path / "summary.md").write_text("# before\n")
    done = run_psctl(
        "gate",
        file,
        "--json",
        "--junit",
        "ci/gates.xml",
        "--markdown",
        "ci/gates.md",
        GITHUB_STEP_SUMMARY=str(tmp_path / "summary.md"),
    )
    assert done.returncode == code, done.stderr
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["verdict"] == verdict
    found = [each["verdict"] for each in report["gates"]]
    assert len(found) == len(gates)
    suite = ElementTree.parse(tmp_path / "ci" / "gates.xml").getroot()[0]
    assert suite.get("tests") == str(len(gates))
    assert suite.get("failures") == str(found.count("fail"))
    assert suite.get("errors") == str(found.count("not enough evidence"))
    assert len(suite.findall("testcase/failure")) == found.count("fail")
    assert len(suite.findall("testcase/error")) == found.count("not enough evidence")
    markdown = (tmp_path / "ci" / "gates.md").read_text()
    assert len([line for line in markdown.splitlines() if line.startswith("|")]) == len(gates) + 2
    assert (tmp_path / "summary.md").read_text() == "# before\n" + markdown


def test_people_see_a_table_and_a_bar_in_a_name_is_kept(run_psctl: RunPsctl, results: Path, tmp_path: Path) -> None:
    file = _write_gates(tmp_path, "metric = 'clip'\nname = 'a|b [bold]'\nmin = 30")
    done = run_psctl("gate", file, "--markdown", "gates.md")
    assert done.returncode == 0, done.stderr
    assert "a|b [bold]" in done.stdout
    assert ">= 30" in done.stdout
    row = (tmp_path / "gates.md").read_text().splitlines()[-1]
    assert "a\\|b [bold]" in row
    assert row.replace("\\|", "").count("|") == 9


def test_baseline_is_written_and_then_held(run_psctl: RunPsctl, results: Path, tmp_path: Path) -> None:
    file = _write_gates(tmp_path, "metric = 'fid'\nmax_increase = 5", "metric = 'clip'\nmin = 20")
    done = run_psctl("gate", file)
    assert done.returncode == 2
    assert "baseline.json: cannot be read" in done.stderr
    done = run_psctl("gate", file, "--update-baseline", "--json")
    assert (done.returncode, json.loads(done.stdout)["verdict"]) == (0, "pass")
    assert [each["verdict"] for each in json.loads(done.stdout)["gates"]] == ["updated", "pass"]
    assert run_psctl("gate", file, "-q").returncode == 0
    # Worse by 15, and so is the whole interval.
    _results(results, fid=(45.0, 43.0, 47.0), clip__=(31.0, 30.8, 31.2))
    assert run_psctl("gate", file, "-q").returncode == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gates.toml"], "gates.toml: cannot be read: no such file"),
        (["good.toml", "--results", "none.json"], "none.json: cannot be read"),
        (["unknown.toml"], "no metric 'sharpness' in"),
        (["good.toml", "--update-baseline"], "--update-baseline needs a file"),
        ([], "Missing argument"),
    ],
)
def test_bad_usage_is_one_line(
    run_psctl: RunPsctl, results: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    head = 'results = ["results.json"]\n[[gate]]\n'
    (tmp_path / "good.toml").write_text(head + "metric = 'fid'\nmax = 3\n")
    (tmp_path / "unknown.toml").write_text(head + "metric = 'sharpness'\nmax = 3\n")
    done = run_psctl("gate", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
