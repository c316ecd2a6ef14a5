"""Quality gates: verdicts by intervals, the file of gates, and baselines."""

import json
import math
from pathlib import Path

import pytest
import scipy.stats

from patchedserve.data.errors import UsageError
from patchedserve.data.files import write_json
from patchedserve.eval.gates.file import read_gates
from patchedserve.eval.gates.judging import Gate, GateVerdict, judge, write_baseline
from patchedserve.eval.gates.results import Statistic
from patchedserve.eval.result_files import EvalResults
from patchedserve.eval.results import MetricResult

from ...support.gate_results import write_results, write_usual_results


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return write_usual_results(tmp_path)


def _one(results: Path, baseline: Path | None = None, *, metric: str = "fid", **bounds: float) -> GateVerdict:
    (verdict,) = judge([Gate(metric, bounds, "a gate")], [results], baseline)
    return verdict


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
def test_gate_fails_only_if_the_interval_is_beyond_the_bound(
    results: Path, bounds: dict[str, float], verdict: str
) -> None:
    found = _one(results, **bounds)  # type: ignore[arg-type]
    assert found.verdict == verdict
    assert (found.value, found.low, found.high, found.n) == (30, 28, 32, 256)


def test_relative_bounds_include_the_interval_of_the_baseline(tmp_path: Path, results: Path) -> None:
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
    # An uncertain baseline: the difference 1 has an interval of +- sqrt(2^2 + 3^2) = 3.606.
    unsure = write_results(tmp_path / "unsure.json", fid=(29.0, 26.0, 32.0))
    assert _one(results, unsure, max_increase=4.61).verdict == "pass"
    assert _one(results, unsure, max_increase=4.60).verdict == "not enough evidence"
    # With two asymmetric intervals, the relevant ends count: the figure's high end and the baseline's low end.
    uneven = write_results(tmp_path / "uneven.json", fid=(29.0, 28.0, 40.0))
    assert _one(results, uneven, max_increase=1 + math.hypot(2, 1) + 0.001).verdict == "pass"
    assert _one(results, uneven, max_increase=1 + math.hypot(2, 1) - 0.001).verdict == "not enough evidence"
    shown = _one(results, exact, max_ratio=1.12).bounds
    assert shown == ("<= 32.48 (baseline 29, max_ratio 1.12)",)


def test_ratio_needs_a_positive_baseline_that_has_the_metric(tmp_path: Path, results: Path) -> None:
    with pytest.raises(UsageError, match=r"positive baseline, but it is -0\.001"):
        _one(results, results, metric="kid", max_ratio=1.1)
    assert _one(results, results, metric="kid", max_increase=0.01).verdict == "pass"
    other = write_results(tmp_path / "other.json", psnr=(30.0, 29.0, 31.0))
    with pytest.raises(UsageError, match=r"has no 'fid'; there: psnr"):
        _one(results, other, max_ratio=1.1)
    with pytest.raises(UsageError, match="no baseline is named"):
        _one(results, max_ratio=1.1)


def test_too_few_samples_are_not_enough_evidence(tmp_path: Path, results: Path) -> None:
    gate = Gate("fid", {"max": 100.0}, "a", min_samples=257)
    assert judge([gate], [results], None)[0].verdict == "not enough evidence"
    assert judge([Gate("fid", {"max": 100.0}, "a", min_samples=256)], [results], None)[0].verdict == "pass"
    single = write_results(tmp_path / "single.json", fid=(30.0, None, None))
    assert _one(single, max=100.0).verdict == "not enough evidence"


def test_bare_metric_name_refers_to_the_only_judge(tmp_path: Path, results: Path) -> None:
    assert _one(results, metric="clip", min=30).metric == "clip[emoji-clip]"
    two = write_results(tmp_path / "two.json", clip__=(31.0, 30.0, 32.0), **{"clip[other]": (29.0, 28.0, 30.0)})
    with pytest.raises(UsageError, match=r"no metric 'clip'.*there: clip\[emoji-clip\], clip\[other\]"):
        _one(two, metric="clip", min=30)
    assert _one(two, metric="clip[other]", min=28).verdict == "pass"


def test_metric_in_several_files_must_be_qualified_or_is_a_repeat(tmp_path: Path) -> None:
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


def _per_image(path: Path, values: list[float], name: str = "psnr") -> Path:
    """Write a result whose mean has a wide interval."""
    images = {f"{i:03}": value for i, value in enumerate(values)}
    mean = sum(values) / len(values)
    metric = MetricResult(name, mean, mean - 15, mean + 15, len(values), direction="higher")
    EvalResults({name: metric}, {name: images}).save(path)
    return path


def test_statistic_over_images_is_exact(tmp_path: Path) -> None:
    """One wrong image of twelve: the mean gives no evidence, the worst image fails."""
    file = _per_image(tmp_path / "results.json", [94.0] * 11 + [36.0])

    def one(statistic: Statistic, min_samples: int = 0, **bounds: float) -> GateVerdict:
        gate = Gate("psnr", bounds, "a gate", min_samples=min_samples, statistic=statistic)
        return judge([gate], [file], None)[0]

    assert one("mean", min=75).verdict == "not enough evidence"
    worst = one("min", min=75)
    assert (worst.verdict, worst.metric, worst.value, worst.low, worst.high, worst.n) == (
        "fail",
        "psnr.min",
        36,
        36,
        36,
        12,
    )
    assert one("min", min=36).verdict == "pass"
    assert one("min", min=36.001).verdict == "fail"
    assert one("max", max=94).verdict == "pass"
    assert one("max", max=93.9).verdict == "fail"
    # Fewer images than required are still no evidence.
    assert one("min", min=75, min_samples=13).verdict == "not enough evidence"
    assert one("min", min=75, min_samples=12).verdict == "fail"


@pytest.mark.parametrize(("count", "place"), [(1, 0), (19, 0), (20, 0), (21, 1), (100, 4), (140, 6), (141, 7)])
def test_p05_is_the_5_percent_quantile_of_images(tmp_path: Path, count: int, place: int) -> None:
    file = _per_image(tmp_path / "results.json", [float(value) for value in reversed(range(count))])
    (found,) = judge([Gate("psnr", {"min": 0}, "a", statistic="p05")], [file], None)
    assert (found.metric, found.value, found.n) == ("psnr.p05", place, count)


def test_statistic_needs_values_per_image(tmp_path: Path, results: Path) -> None:
    with pytest.raises(UsageError, match=r"gate 'a': for min, no values of single images of 'fid' in .*; there: -"):
        judge([Gate("fid", {"min": 1}, "a", statistic="min")], [results], None)
    file = _per_image(tmp_path / "clip.json", [31.0, 29.0], "clip[emoji-clip]")
    (found,) = judge([Gate("clip", {"min": 29}, "a", statistic="min")], [file], None)
    assert (found.metric, found.verdict) == ("clip[emoji-clip].min", "pass")


def test_statistic_has_its_own_baseline(tmp_path: Path) -> None:
    file, baseline = _per_image(tmp_path / "results.json", [90.0, 94.0]), tmp_path / "baseline.json"
    gates = [
        Gate("psnr", {"max_decrease": 1}, "worst", statistic="min"),
        Gate("psnr", {"max_decrease": 99}, "mean"),
    ]
    assert write_baseline(baseline, gates, [file]) == ["psnr", "psnr.min"]
    assert [each.verdict for each in judge(gates, [file], baseline)] == ["pass", "pass"]
    _per_image(file, [88.9, 94.0])
    assert [each.verdict for each in judge(gates, [file], baseline)] == ["fail", "pass"]


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

[[gate]]
metric = "psnr"
statistic = "min"
min = 75
"""


def test_gate_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "gates.toml").write_text(GATES)
    read = read_gates(tmp_path / "gates.toml")
    assert read.gates == (
        Gate("fid", {"max": 35.0}, "fid max 35", min_samples=100),
        Gate("clip", {"min_ratio": 0.98}, "text still fits"),
        Gate("psnr", {"min": 75.0}, "psnr.min min 75", statistic="min"),
    )
    assert read.results == (tmp_path / "results.json",)
    assert read.baseline == tmp_path / "baseline.json"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("results = [\n'a'\n[[gate", r"not valid TOML: .*line 3"),
        ("", r"no gate; write \[\[gate\]\]"),
        ("gate = 3", "gate is 3, but it must be a list"),
        ("gate = []", "no gate"),
        ("results = 'a'\n[[gate]]\nmetric = 'fid'\nmax = 1", "results is 'a', but it must be a list"),
        ("baseline = 1\n[[gate]]\nmetric = 'fid'\nmax = 1", "baseline is 1, but it must be text"),
        ("gates = 1", "unknown key 'gates'"),
        ("[[gate]]\nmetric = 'fid'", "line 1: the gate of fid has no bound; give one of max, min"),
        ("\n\n[[gate]]\nmax = 3", "line 3: a gate needs a metric"),
        ("[[gate]]\nmetric = 'fid'\nmax = 1\n\n[[gate]]\nmetric = 'fid'\nmaxx = 2", "line 5: unknown key 'maxx'"),
        ("[[gate]]\nmetric = 'fid'\nmax = '3'", "max is '3', but it must be a number"),
        ("[[gate]]\nmetric = 'fid'\nmax = nan", "max is nan, but it must be a finite number"),
        ("[[gate]]\nmetric = 'fid'\nmax = true", "max is True, but it must be a number"),
        ("[[gate]]\nmetric = 'fid'\nmax_ratio = -1", "max_ratio is -1, but it must not be negative"),
        ("[[gate]]\nmetric = 'fid'\nmax = 1\nrepeats = 2", "repeats is 2, but it must be true or false"),
        ("[[gate]]\nmetric = 'fid'\nmax = 1\nmin_samples = -2", "min_samples is -2, but it must not be negative"),
        (
            "[[gate]]\nmetric = 'fid'\nmax = 1\nstatistic = 'median'",
            "line 1: statistic is 'median', but it must be 'mean', 'min', 'max' or 'p05'",
        ),
        (
            "[[gate]]\nmetric = 'x'\nmax = 1\nstatistic = 'max'\nrepeats = true",
            "line 1: statistic 'max' is of the",
        ),
        ("[[gate]]\nmetric = 3\nmax = 1", "line 1: metric is 3, but it must be text"),
        ("gate = [{metric = 'fid'}]", "gate 1: the gate of fid has no bound"),
        ("[[gate]]\nmetric = 'fid'\nmax = 1\n[[gate]]\nmetric = 'fid'\nmax = 1", "two gates are called 'fid max 1'"),
    ],
)
def test_malformed_gate_files_name_the_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "gates.toml").write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        read_gates(tmp_path / "gates.toml")
    assert "gates.toml" in str(caught.value)


def test_baseline_keeps_other_metrics_and_is_unchanged_on_errors(tmp_path: Path, results: Path) -> None:
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
    other = write_results(tmp_path / "other.json", fid=(3.0, 2.0, 4.0))
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
    # Two gates may use the same file.
    gates[0] = Gate("fid", {"max": 9.0}, "a", other)
    assert write_baseline(baseline, gates, [results]) == ["fid", "kid"]
    assert json.loads(baseline.read_text())["metrics"]["fid"]["value"] == 3.0
