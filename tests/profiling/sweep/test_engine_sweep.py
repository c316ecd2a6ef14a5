"""`psctl bench slo` on a tiny model: compared with the simulator, interrupted and resumed."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from diffusers import DDIMScheduler

from patchedserve.data.resolution import Resolution
from patchedserve.data.tables.schemas import RECORDS, read_rows
from patchedserve.data.workspace import Workspace
from patchedserve.profiling.measure.latency import LatencySettings, profile_latency
from patchedserve.profiling.sweep.engine_side import latency_table
from patchedserve.serving.models.build import build_model
from patchedserve.serving.models.defaults import ModelDefaults
from patchedserve.serving.options import EngineOptions

from ...conftest import RunPsctl
from ...support.psctl_process import start_psctl
from ...support.tiny_models import save_tiny, tiny_sdxl
from ...support.waits import interrupted_when


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with a tiny model, whose steps take a few milliseconds."""
    path = tmp_path_factory.mktemp("models") / "sdxl"
    pipe = tiny_sdxl()
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config)
    save_tiny(path, pipe, num_inference_steps=3, guidance_scale=3.0, resolutions=["32", "48"])
    workspace = tmp_path_factory.mktemp("workspace")
    (workspace / "steps.csv").write_text("combination,ms\n32x32,9\n48x48,9\n2*32x32 + 2*48x48,20\n")
    return {"PSCTL_MODEL": str(path), "PSCTL_WORKSPACE": str(workspace), "STEPS": str(workspace / "steps.csv")}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_both_engines_on_a_real_model(run_psctl: RunPsctl, tiny: dict[str, str]) -> None:
    # 28 requests of 3 steps, 4 at a time, take at least 21 steps; a calibration needs 20.
    options = ("--rates", "8", "--num-prompts", "6", "--warmup-requests", "28", "--combinations", "6")
    options += ("--max-batch-size", "4", "--slo-scale", "1000", "--predictor", tiny["STEPS"])
    arguments = ("bench", "slo", "--on", "both", "--systems", "bucketed,patchedserve", *options)
    run = run_psctl(*arguments, "--json", **tiny)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert (result["num_runs"], result["num_finished"], list(result["engines"])) == (4, 4, ["real", "simulator"])
    for figures in result["engines"].values():
        assert all(point["slo_attainment_rate"] == 1 for point in figures["points"])
        assert all(policy["held_rates"]["0.99"]["where"] == "beyond" for policy in figures["policies"])
    agreed = [row["policy"] for row in result["agreement"]["rows"]]
    assert agreed == ["bucketed", "patchedserve"]
    assert result["agreement"]["max_attainment_difference_points"] == 0
    run_dir = Path(result["run_dir"])
    calibration = json.loads((run_dir / "calibration.json").read_text())
    assert set(calibration) == {"plain", "patched"}
    assert all(each["num_steps"] >= 20 and 0 < each["error"] < math.inf for each in calibration.values())
    # Each engine is calibrated at three loads, between the runs of the sweep.
    loads = {f"{engine}-{load}-0" for engine in ("plain", "patched") for load in ("0.4", "0.8", "1.3")}
    assert {path.name for path in (run_dir / "calibration").iterdir()} == loads
    assert all(len(each["ratios"]) == 3 for each in calibration.values())
    assert all(row["load"] > 0 for row in result["agreement"]["rows"])
    assert set(result["standalone_s"]) == {"32x32", "48x48"}
    for engine in ("real", "simulator"):
        for policy in ("bucketed", "patchedserve"):
            rows = read_rows(run_dir / "runs" / f"{engine}-{policy}-8-0.parquet", RECORDS)
            slos = {f"{row['width']}x{row['height']}": row["slo_s"] for row in rows}
            assert all(slos[size] == pytest.approx(1000 * result["standalone_s"][size]) for size in slos)
    # Another seed uses the existing profiles. The calibration also suffices for the simulator alone.
    again = run_psctl(*arguments, "--num-seeds", "2", "--resume", run_dir, "--json", **tiny)
    assert again.returncode == 0, again.stderr
    assert "Profiling" not in again.stderr
    assert "Measuring" not in again.stderr
    assert json.loads(again.stdout)["num_finished"] == 8
    # The simulator uses all calibration runs, those of the new seed and those of the old one.
    assert again.stderr.count("Calibrating") == 6
    known = json.loads((run_dir / "calibration.json").read_text())
    assert all(len(each["ratios"]) == 6 for each in known.values())
    tables = {name: next((run_dir / "tables" / name).glob("*.parquet")) for name in ("plain", "patched")}
    alone = run_psctl(
        *("bench", "slo", "--on", "simulator", "--latency", tables["patched"], "--plain-latency", tables["plain"]),
        *("--calibration", run_dir / "calibration.json", "--systems", "bucketed,patchedserve"),
        *("--rates", "8", "--json"),
        **tiny,
    )
    assert alone.returncode == 0, alone.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_seeds_may_use_different_resolutions(run_psctl: RunPsctl, tiny: dict[str, str]) -> None:
    # One request per run: seeds 2, 3 and 6 draw 48x48, seed 5 draws 32x32; the warm-up uses the next seed.
    options = ("--rates", "30", "--num-prompts", "1", "--warmup-requests", "1", "--systems", "diffusers", "--json")
    arguments = ("bench", "slo", *options, "--resolutions", "32,48", "--seed")
    alone = run_psctl(*arguments, "5", **tiny)
    assert alone.returncode == 0, alone.stderr
    assert set(json.loads(alone.stdout)["standalone_s"]) == {"32x32", "48x48"}
    first = run_psctl(*arguments, "2", **tiny)
    assert first.returncode == 0, first.stderr
    result = json.loads(first.stdout)
    assert set(result["standalone_s"]) == {"48x48"}
    again = run_psctl(*arguments, "5", "--resume", result["run_dir"], **tiny)
    assert again.returncode == 0, again.stderr
    assert "Measuring 32x32 alone" in again.stderr
    assert "Measuring 48x48 alone" not in again.stderr
    known = json.loads(again.stdout)["standalone_s"]
    assert set(known) == {"32x32", "48x48"}
    assert known["48x48"] == result["standalone_s"]["48x48"]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_changed_file_content_is_a_different_sweep(run_psctl: RunPsctl, tiny: dict[str, str], tmp_path: Path) -> None:
    steps, prompts = tmp_path / "steps.csv", tmp_path / "prompts.txt"
    table = Path(tiny["STEPS"]).read_text()
    steps.write_text(table)
    prompts.write_text("a fox\n")
    options = ("--rates", "30", "--num-prompts", "2", "--warmup-requests", "2", "--resolutions", "32", "--json")
    arguments = ("bench", "slo", *options, "--prompts", prompts, "--cache", "interval", "--cache-patch-size", "4")
    first = run_psctl(*arguments, "--systems", "diffusers", **tiny)
    assert first.returncode == 0, first.stderr
    result = json.loads(first.stdout)
    assert result["settings"]["cache"] is None  # the cache belongs to the patch engine, which has not served yet
    # A policy that needs a predictor may be added later; the predictor is fixed from then on.
    resumed = (*arguments, "--resume", result["run_dir"], "--systems", "diffusers,patchedserve", "--predictor", steps)
    again = run_psctl(*resumed, **tiny)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["predictor"].startswith(f"{steps} (")
    assert json.loads(again.stdout)["settings"]["cache"]["interval"] == 3
    steps.write_text(table.replace("20", "21"))
    refused = run_psctl(*resumed, **tiny)
    assert refused.returncode == 2
    assert f'was begun with predictor file "{steps} (' in refused.stderr
    steps.write_text(table)
    prompts.write_text("a cat\n")
    refused = run_psctl(*resumed, **tiny)
    assert refused.returncode == 2
    assert "was begun with settings prompts" in refused.stderr


@pytest.mark.slow
def test_table_of_smaller_batches_is_not_used(tmp_path: Path) -> None:
    options = EngineOptions("plain")
    model = build_model(tiny_sdxl(), name="tiny", fingerprint="f", defaults=ModelDefaults(), options=options)
    workspace = Workspace(tmp_path / "ws").for_model("tiny", "cpu")
    two = LatencySettings((Resolution(32, 32),), 2, 2, 1, one_resolution=True)
    known = profile_latency(model, two, workspace).table_file
    assert latency_table(model, workspace, two, tmp_path / "sweep")[1] == known
    assert latency_table(model, workspace, replace(two, max_batch_size=1), tmp_path / "sweep")[1] == known
    table, path = latency_table(model, workspace, replace(two, max_batch_size=3), tmp_path / "sweep")
    assert path.parent == tmp_path / "sweep"
    assert max(row.num_requests for row in table.rows) == 3


@pytest.mark.exhaustive
@pytest.mark.slow
def test_ctrl_c_and_resume_on_a_real_model(tiny: dict[str, str], tmp_path: Path) -> None:
    # The last rate takes an hour; engines warm up at the middle one.
    options = ["--rates", "50,40,0.001", "--num-prompts", "2", "--warmup-requests", "2", "--systems", "diffusers"]
    workspace = tmp_path / "workspace"
    environment = tiny | {"PSCTL_WORKSPACE": str(workspace)}
    process = start_psctl("bench", "slo", *options, "--json", env=environment)
    stdout, stderr = interrupted_when(process, lambda: any(workspace.rglob("real-diffusers-40-0.parquet")))
    assert process.returncode == 130, stderr
    result = json.loads(stdout)
    assert (result["num_finished"], result["num_runs"], result["was_interrupted"]) == (2, 3, True)
    assert f"--resume {result['run_dir']} continues from here" in stderr
    assert "1 of 3 runs are not finished" in (Path(result["run_dir"]) / "report.html").read_text()
    rest = ["--rates", "50,40", *options[2:], "--json", "--resume", result["run_dir"]]
    process = start_psctl("bench", "slo", *rest, env=environment)
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert json.loads(stdout)["num_finished"] == 2
