"""Figures that gates see of benchmarks: sweeps as `psctl bench slo` leaves them, rows of the other two."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.files import write_json
from patchedserve.eval.gates.judging import Gate, judge
from patchedserve.eval.gates.metrics import load_figures
from patchedserve.profiling.steps.rows import median_interval
from patchedserve.profiling.sweep.figures import sweep_figures
from patchedserve.psctl.app import main

from ...profiling.sweep.test_figures import three_seeds


def bounds_of(folder: Path, metric: str, **bounds: float) -> str:
    (verdict,) = judge([Gate(metric, bounds, "a gate")], [folder], None)
    return verdict.verdict


def test_a_sweep_of_the_command_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").write_text(
        "combination,ms\n128x128,20\n256x256,30\n128x128 + 256x256,40\n8*128x128 + 8*256x256,200\n"
    )
    options = ("--engine", "simulator", "--latency", "table.csv", "--resolutions", "128,256", "--num-prompts", "60")
    sweep = ("--policies", "bucketed,patchedserve", "--rates", "1,6", "--num-inference-steps", "10", "--num-seeds", "3")
    assert main(["bench", "slo", *options, *sweep, "--json", "--quiet"]) == 0
    result = json.loads(capsys.readouterr().out)
    figures = load_figures(Path(result["run_dir"]))
    for point in result["engines"]["simulator"]["points"]:
        name = f"{point['policy']}@{point['request_rate']:g}"
        figure = figures[f"{name}.slo_attainment"]
        assert (figure.value, figure.low, figure.high, figure.n) == (
            point["slo_attainment_rate"],
            point["interval_low"],
            point["interval_high"],
            180,
        )
        goodput = figures[f"{name}.goodput"]
        assert goodput.value == point["goodput_qps"]
        assert goodput.low is not None
        assert goodput.low <= goodput.value
        # Latencies have no interval in the file, and so are no evidence.
        assert bounds_of(Path(result["run_dir"]), f"{name}.latency_p95", max=1e9) == "not enough evidence"
    file = tmp_path / "gates.toml"
    gate = f'results = ["{result["run_dir"]}"]\n[[gate]]\nmetric = "patchedserve@1.slo_attainment"\n'
    for bound, code in (("min = 0.5", 0), ("max = 0.1", 1)):
        file.write_text(gate + bound)
        assert main(["gate", str(file), "--quiet"]) == code
        capsys.readouterr()


def sweep_file(folder: Path, runs: list[Any], **more: Any) -> Path:
    content = {"standalone_s": {}, "engines": {"real": sweep_figures(runs)}, "agreement": None, **more}
    write_json(folder / "result.json", content)
    return folder


def test_held_rates_and_ratios_have_their_intervals_over_seeds(tmp_path: Path) -> None:
    figures = load_figures(sweep_file(tmp_path, three_seeds()))
    policies = {each["policy"]: each for each in sweep_figures(three_seeds())["policies"]}
    for name, held in (("rate_at_95", policies["patchedserve"]["held_rates"]["0.95"]),):
        figure = figures[f"patchedserve.{name}"]
        assert (figure.value, figure.low, figure.high, figure.n) == (held["rate"], held["low"], held["high"], 3)
    ratio = figures["patchedserve.ratio_at_95"]
    assert ratio.value == policies["patchedserve"]["ratio_at_95"]["value"]
    assert bounds_of(tmp_path, "patchedserve.ratio_at_95", min=0.5) == "pass"
    assert bounds_of(tmp_path, "patchedserve.ratio_at_95", min=1.25) == "not enough evidence"
    assert bounds_of(tmp_path, "patchedserve.ratio_at_95", min=9) == "fail"


def test_one_seed_is_no_evidence(tmp_path: Path) -> None:
    one = [run for run in three_seeds() if run.seed == 0]
    figures = load_figures(sweep_file(tmp_path, one))
    for name in (
        "patchedserve@3.slo_attainment",
        "patchedserve@3.goodput",
        "bucketed.rate_at_95",
        "patchedserve.ratio_at_95",
    ):
        assert (figures[name].low, figures[name].high) == (None, None)
    assert bounds_of(tmp_path, "patchedserve@3.slo_attainment", min=0.1) == "not enough evidence"


def test_the_second_engine_has_its_name_in_front(tmp_path: Path) -> None:
    both = {"real": sweep_figures(three_seeds()), "simulator": sweep_figures(three_seeds(last=0.0))}
    agreement = {"rows": [], "max_attainment_difference_points": 2.0}
    figures = load_figures(sweep_file(tmp_path, three_seeds(), engines=both, agreement=agreement))
    assert figures["patchedserve@3.slo_attainment"].value > figures["simulator.patchedserve@3.slo_attainment"].value
    assert figures["agreement.max_attainment_difference_points"].low is None


STEPS = {
    "seed": 0,
    "mean_ratio_same_resolution_mixed": 1.5,
    "rows": [
        {
            "label": "4S 4M 4L",
            "patched_ms": 100.0,
            "ratio_same_resolution": 1.4,
            "patched_is_plain": False,
            "repeats": 15,
            "intervals": {"ratio_same_resolution": [1.3, 1.5], "ratio_one_by_one": None},
        }
    ],
}
CACHE = {
    "rows": [
        {
            "label": "SML",
            "rounds": 6,
            "sides": [
                {"label": "off", "image_ms": 9.0, "speedup": 1.0, "num_images": 18, "intervals": {}},
                {
                    "label": "interval 3",
                    "speedup": 1.6,
                    "ssim": 0.99,
                    "num_images": 18,
                    "clip_change": {"mean": 0.1, "low": -0.1, "high": 0.3},
                    "saved_by_block": {"mid": 0.5},
                    "intervals": {"speedup": [1.5, 1.7], "ssim": [0.98, 0.995]},
                },
            ],
        }
    ]
}


def test_rows_of_steps_and_cache(tmp_path: Path) -> None:
    write_json(tmp_path / "steps.json", STEPS)
    write_json(tmp_path / "cache.json", CACHE)
    figures = load_figures(tmp_path)
    found = figures["4S 4M 4L.ratio_same_resolution"]
    assert (found.value, found.low, found.high, found.n) == (1.4, 1.3, 1.5, 15)
    assert figures["4S 4M 4L.patched_ms"].low is None
    assert figures["mean_ratio_same_resolution_mixed"].low is None
    assert figures["seed"].is_exact
    found = figures["SML.interval 3.speedup"]
    assert (found.value, found.low, found.high, found.n) == (1.6, 1.5, 1.7, 18)
    found = figures["SML.interval 3.clip_change"]
    assert (found.value, found.low, found.high) == (0.1, -0.1, 0.3)
    assert figures["SML.off.image_ms"].low is None
    assert "4S 4M 4L.patched_is_plain" not in figures
    assert bounds_of(tmp_path, "SML.interval 3.speedup", min=1.4) == "pass"
    assert bounds_of(tmp_path, "4S 4M 4L.ratio_same_resolution", min=1.6) == "fail"


@pytest.mark.parametrize(
    "name", ["steps-emoji-xl-bfloat16", "cache-emoji-xl-bfloat16", "slo-emoji-xl-bfloat16", "slo-emoji-3-bfloat16"]
)
def test_committed_results_of_before_have_figures_that_prove_nothing(name: str) -> None:
    figures = load_figures(Path(__file__).parents[2] / "benchmarks" / "results" / f"{name}.json")
    measured = [
        figure
        for metric, figure in figures.items()
        if metric.endswith((".slo_attainment", ".speedup", "_ratio_mixed")) or ".ratio_" in metric
    ]
    assert measured
    assert all(math.isfinite(figure.value) and figure.low is None for figure in measured)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"standalone_s": {}, "engines": {"real": {"points": [{}], "policies": []}}}, "bench slo is damaged"),
        ({"rows": [{"label": "S", "sides": [1]}]}, "the sides of row 'S'"),
        ({"rows": [{"label": "S", "x": 1, "intervals": {"x": [1]}}]}, "two numbers or null"),
        ({"rows": [{"label": "S", "x": 1, "intervals": 3}]}, "must be a mapping"),
    ],
)
def test_damaged_benchmarks_are_named(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    write_json(tmp_path / "result.json", content)
    with pytest.raises(UsageError, match=message) as caught:
        load_figures(tmp_path)
    assert "result.json" in str(caught.value)


def test_interval_of_a_median_holds_it_95_times_in_100() -> None:
    assert median_interval([1.0, 2.0, 3.0, 4.0, 5.0]) is None
    assert median_interval([]) is None
    # With six values: below the smallest or above the largest with 2 / 64.
    assert median_interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == [1.0, 6.0]
    rng = np.random.default_rng(0)
    found = [median_interval(rng.exponential(size=15).tolist()) or [9, 9] for _ in range(2000)]
    assert 0.95 < np.mean([low <= math.log(2) <= high for low, high in found]) < 0.98
