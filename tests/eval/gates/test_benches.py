"""Figures of benchmarks for gates: sweeps of `psctl bench slo`, and rows of the other two benchmarks."""

import json
from pathlib import Path
from typing import Any

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.figures import write_figures
from patchedserve.data.files import write_json
from patchedserve.eval.gates.judging import Gate, judge
from patchedserve.profiling.experiment.rows import row_figures
from patchedserve.profiling.sweep.figures import estimates, sweep_figures
from patchedserve.psctl.app import main

from ...profiling.sweep.test_figures import three_seeds
from ...support.gate_results import figures_in


def bounds_of(folder: Path, metric: str, **bounds: float) -> str:
    (verdict,) = judge([Gate(metric, bounds, "a gate")], [folder], None)
    return verdict.verdict


@pytest.mark.slow
def test_sweep_of_the_bench_command_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").write_text(
        "combination,ms\n128x128,20\n256x256,30\n128x128 + 256x256,40\n8*128x128 + 8*256x256,200\n"
    )
    options = ("--on", "simulator", "--latency", "table.csv", "--resolutions", "128,256", "--num-prompts", "60")
    sweep = ("--systems", "bucketed,patchedserve", "--rates", "1,6", "--num-inference-steps", "10", "--num-seeds", "3")
    assert main(["bench", "slo", *options, *sweep, "--json", "--quiet"]) == 0
    result = json.loads(capsys.readouterr().out)
    figures = figures_in(Path(result["run_dir"]))
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
        # Latencies have no interval in the file and so are no evidence.
        assert bounds_of(Path(result["run_dir"]), f"{name}.latency_p95", max=1e9) == "not enough evidence"
    file = tmp_path / "gates.toml"
    gate = f'results = ["{result["run_dir"]}"]\n[[gate]]\nmetric = "patchedserve@1.slo_attainment"\n'
    for bound, code in (("min = 0.5", 0), ("max = 0.1", 1)):
        file.write_text(gate + bound)
        assert main(["gate", str(file), "--quiet"]) == code
        capsys.readouterr()


def sweep_file(folder: Path, runs: list[Any], **more: Any) -> Path:
    content = {"standalone_s": {}, "engines": {"real": sweep_figures(runs)}, "agreement": None, **more}
    write_json(folder / "result.json", write_figures(content, estimates(content["engines"], content["agreement"])))
    return folder


def test_held_rates_and_ratios_have_intervals_over_seeds(tmp_path: Path) -> None:
    figures = figures_in(sweep_file(tmp_path, three_seeds()))
    policies = {each["policy"]: each for each in sweep_figures(three_seeds())["policies"]}
    for name, held in (("rate_at_95", policies["patchedserve"]["held_rates"]["0.95"]),):
        figure = figures[f"patchedserve.{name}"]
        assert (figure.value, figure.low, figure.high, figure.n) == (held["rate"], held["low"], held["high"], 3)
    ratio = figures["patchedserve.ratio_at_95"]
    assert ratio.value == policies["patchedserve"]["ratio_at_95"]["value"]
    assert bounds_of(tmp_path, "patchedserve.ratio_at_95", min=0.5) == "pass"
    assert bounds_of(tmp_path, "patchedserve.ratio_at_95", min=1.25) == "not enough evidence"
    assert bounds_of(tmp_path, "patchedserve.ratio_at_95", min=9) == "fail"


def test_one_seed_is_not_enough_evidence(tmp_path: Path) -> None:
    one = [run for run in three_seeds() if run.seed == 0]
    figures = figures_in(sweep_file(tmp_path, one))
    for name in (
        "patchedserve@3.slo_attainment",
        "patchedserve@3.goodput",
        "bucketed.rate_at_95",
        "patchedserve.ratio_at_95",
    ):
        assert (figures[name].low, figures[name].high) == (None, None)
    assert bounds_of(tmp_path, "patchedserve@3.slo_attainment", min=0.1) == "not enough evidence"


def test_figures_of_the_second_engine_are_prefixed(tmp_path: Path) -> None:
    both = {"real": sweep_figures(three_seeds()), "simulator": sweep_figures(three_seeds(last=0.0))}
    agreement = {"rows": [], "max_attainment_difference_points": 2.0}
    figures = figures_in(sweep_file(tmp_path, three_seeds(), engines=both, agreement=agreement))
    assert figures["patchedserve@3.slo_attainment"].value > figures["simulator.patchedserve@3.slo_attainment"].value
    assert figures["agreement.max_attainment_difference_points"].low is None


STEPS: dict[str, Any] = {
    "seed": 0,
    "mean_ratio_mixed": 1.5,
    "rows": [
        {
            "label": "4S 4M 4L",
            "patched_ms": 100.0,
            "ratio": 1.4,
            "patched_is_plain": False,
            "repeats": 15,
            "intervals": {"ratio": [1.3, 1.5]},
        }
    ],
}
CACHE: dict[str, Any] = {
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
    for name, content in (("steps.json", STEPS), ("cache.json", CACHE)):
        head = {name: value for name, value in content.items() if name != "rows"}
        write_json(tmp_path / name, write_figures(dict(content), row_figures(head, content["rows"])))
    figures = figures_in(tmp_path)
    found = figures["4S 4M 4L.ratio"]
    assert (found.value, found.low, found.high, found.n) == (1.4, 1.3, 1.5, 15)
    assert figures["4S 4M 4L.patched_ms"].low is None
    assert figures["mean_ratio_mixed"].low is None
    assert figures["seed"].is_exact
    found = figures["SML.interval 3.speedup"]
    assert (found.value, found.low, found.high, found.n) == (1.6, 1.5, 1.7, 18)
    found = figures["SML.interval 3.clip_change"]
    assert (found.value, found.low, found.high) == (0.1, -0.1, 0.3)
    assert figures["SML.off.image_ms"].low is None
    assert "4S 4M 4L.patched_is_plain" not in figures
    assert bounds_of(tmp_path, "SML.interval 3.speedup", min=1.4) == "pass"
    assert bounds_of(tmp_path, "4S 4M 4L.ratio", min=1.6) == "fail"


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("steps-emoji-xl-bfloat16", "psctl bench steps"),
        ("slo-emoji-3-bfloat16", "psctl bench slo"),
    ],
)
def test_results_of_older_versions_name_the_command_to_rerun(tmp_path: Path, name: str, command: str) -> None:
    content = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / f"{name}.json").read_text())
    content.pop("figures", None)
    file = tmp_path / f"{name}.json"
    write_json(file, content)
    with pytest.raises(UsageError, match=rf"{name}\.json: is of an older version .*; run {command}"):
        figures_in(file)


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ([1], "figures must be a mapping"),
        ({"S.x": {"value": 1, "low": 2}}, "S.x: the interval is 2 to None; give both ends"),
        ({"S.x": {"value": "1"}}, "S.x: value is '1', but it must be a finite number"),
        ({"S.x": {"value": 1, "intervals": 3}}, "S.x: field 'intervals' is unknown"),
        ({"S.x": {"low": 1, "high": 3}}, "S.x: field 'value' is missing"),
    ],
)
def test_damaged_figures_are_named(tmp_path: Path, figures: Any, message: str) -> None:
    write_json(tmp_path / "result.json", {"rows": [], "figures": figures})
    with pytest.raises(UsageError, match=message) as caught:
        figures_in(tmp_path)
    assert "result.json" in str(caught.value)
