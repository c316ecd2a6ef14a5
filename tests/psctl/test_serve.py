"""`psctl serve` as users run it, on a tiny model: results, files, bad input, Ctrl-C."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler
from PIL import Image

from patchedserve.data.tables.schemas import RECORDS, STEPS, read_rows
from patchedserve.data.traces.edits import with_pixels
from patchedserve.data.traces.files import load_trace
from patchedserve.psctl.app import main
from patchedserve.serving.patched.patched_model import PatchedModel

from ..conftest import RunPsctl
from ..support.psctl_process import start_psctl
from ..support.tiny_models import save_tiny, tiny_sdxl
from ..support.waits import interrupted_when

# Steps of the tiny model take a few milliseconds; the scheduler's decisions do not matter here.
STEPS_CSV = "combination,ms\n32x32,5\n48x48,5\n64x32,5\n2*32x32 + 48x48 + 64x32,12\n"

KEYS = (
    *("duration", "completed_requests", "failed_requests", "throughput_qps", "latency_mean", "latency_median"),
    *("latency_p50", "latency_p95", "latency_p99", "slo_attainment_rate", "slo_met_success", "slo_scale", "model"),
    *("dataset", "per_resolution", "queueing_mean", "goodput_qps"),
)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace shared by the tests of this module, so that standalone latencies are measured once."""
    return tmp_path_factory.mktemp("workspace")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, workspace: Path) -> dict[str, str]:
    path = tmp_path_factory.mktemp("models") / "sdxl"
    pipe = tiny_sdxl()
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config)
    save_tiny(path, pipe, num_inference_steps=2, guidance_scale=3.0, resolutions=["32", "48", "64x32"])
    prompts = path.parent / "prompts.txt"
    prompts.write_text("a hat\na car\ntwo birds\n")
    return {"PSCTL_MODEL": str(path), "PSCTL_WORKSPACE": str(workspace), "PSCTL_SERVE_PROMPTS": str(prompts)}


@pytest.fixture
def serve(run_psctl: RunPsctl, environment: dict[str, str]) -> RunPsctl:
    def run(*arguments: str | Path, **options: str):
        return run_psctl("serve", *arguments, **(environment | options))

    return run


def run_dirs(workspace: Path) -> list[Path]:
    return sorted(workspace.glob("*/cpu/runs/*"), key=lambda path: path.stat().st_mtime)


def summary_of(run: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.slow
def test_poisson_run_writes_all_results(serve: RunPsctl, tmp_path: Path) -> None:
    # The SLOs are long enough for none to be dropped on a busy machine.
    options = ("--num-prompts", "6", "--request-rate", "20", "--slo-scale", "500")
    run = serve(*options, "--json", "--output-file", "s.json", "--save-dir", "out")
    summary = summary_of(run)
    assert json.loads((tmp_path / "s.json").read_text()) == summary
    assert set(KEYS) <= set(summary)
    assert (summary["completed_requests"], summary["slo_scale"]) == (6, 500.0)
    assert summary["dataset"] == "poisson, prompts.txt"
    folder = Path(summary["run_dir"])
    assert json.loads((folder / "summary.json").read_text()) == summary
    records = read_rows(folder / "records.parquet", RECORDS)
    assert [record["status"] for record in records] == ["completed"] * 6
    for record in records:
        # No request is prepared before its arrival time.
        assert record["prepare_start_s"] >= record["arrival_s"] > 0
        assert record["slo_s"] > 0
        assert Image.open(tmp_path / record["image_path"]).size == (record["width"], record["height"])
    steps = read_rows(folder / "steps.parquet", STEPS)
    assert sum(step["active"] for step in steps) == 6 * 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *(f"00{i}.png" for i in range(6)),
        "report.html",
    ]
    report = (folder / "report.html").read_text()
    assert report == (tmp_path / "out" / "report.html").read_text()
    assert "data:image/png" in report


def measured_quietly(table: Path, times: float = 1.0, **changes: str) -> None:
    """Rewrite a table, because other tests run at the same time: samples agree, and no thread waited for a core."""
    content = json.loads(table.read_text())
    for row in content["rows"]:
        row |= {"samples_s": [times * row["latency_s"]] * 3, "waited": 0.0, **changes}
    table.write_text(json.dumps(content))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_standalone_latencies_are_measured_once(serve: RunPsctl, workspace: Path) -> None:
    options = ("--num-prompts", "3", "--request-rate", "inf", "--resolutions", "32")
    serve(*options)
    table = next(workspace.glob("*/cpu/tables/standalone.json"))
    measured_quietly(table)
    again = serve(*options)
    assert again.returncode == 0
    assert "Measuring" not in again.stderr
    # Two known sizes: both are measured again, although each is written when it is done.
    two = ("--num-prompts", "3", "--request-rate", "inf", "--resolutions", "32,48", "--remeasure")
    for _ in range(2):
        said = serve(*two).stderr
        assert "Measuring 32x32 alone" in said
        assert "Measuring 48x48 alone" in said
    assert "Measuring 32x32 alone" in serve(*options, "--num-inference-steps", "3").stderr
    # A damaged table is renamed and measured again.
    table.write_text(table.read_text()[:-20])
    with pytest.warns(UserWarning, match=r"standalone\.json is damaged"):
        run = serve(*options)
    assert run.returncode == 0
    assert "Measuring 32x32 alone" in run.stderr
    measured_quietly(table)
    assert "Measuring" not in serve(*options).stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_slos_measured_on_a_busy_machine_give_a_warning(serve: RunPsctl, workspace: Path) -> None:
    options = ("--num-prompts", "3", "--request-rate", "2", "--resolutions", "40", "--policy", "continuous", "--json")
    first = serve(*options)
    assert "SLOs are far too long" not in first.stderr
    assert "standalone_times_served" not in summary_of(first)
    table = next(workspace.glob("*/cpu/tables/standalone.json"))
    text = table.read_text()
    measured_quietly(table, times=200)
    again = serve(*options)
    rows = json.loads(table.read_text())["rows"]
    # This also holds if all SLOs are given, so that the run itself measures nothing.
    measured_quietly(table, doubted="no")
    given = serve(*options, "--slo", "60")
    table.write_text(text)
    assert given.returncode == 0, given.stderr
    assert "40x40 was served in" in given.stderr
    assert [row["doubted"] for row in rows if row["key"]["resolution"] == "40x40"] == ["yes"]
    assert "40x40 was served in" in again.stderr
    assert "SLOs are far too long: 40x40 alone took" in again.stderr
    summary = summary_of(again)
    assert summary["standalone_times_served"]["40x40"] > 5
    assert "measured on a busy machine" in (Path(summary["run_dir"]) / "report.html").read_text()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_edits_keep_pixels_outside_their_masks(serve: RunPsctl, tmp_path: Path) -> None:
    pytest.importorskip("resvg_py", reason="pictures are drawn with psctl[train]")
    traffic = ("--num-prompts", "6", "--request-rate", "20", "--slo-scale", "500", "--policy", "continuous")
    edits = ("--edits", "0.7", "--mask-ratios", "viton", "--templates", "2", "--seed", "1")
    images = tmp_path / "images"
    summary = summary_of(serve(*traffic, *edits, "--save-dir", images, "--json"))
    assert summary["completed_requests"] == 6
    assert summary["config"]["edits"]["share"] == 0.7
    run_dir = Path(summary["run_dir"])
    records = read_rows(run_dir / "records.parquet", RECORDS)
    trace = load_trace(run_dir / "trace.jsonl")
    assert {request.traced is None for request in trace} == {True, False}
    for request, record in zip(map(with_pixels, trace), records, strict=True):
        drawn = np.asarray(Image.open(images / f"{request.request_id:03}.png"))
        if request.edit is None:
            assert record["mask_ratio"] is None
        else:
            assert record["mask_ratio"] == pytest.approx(request.edit.mask_ratio)
            assert np.array_equal(drawn[~request.edit.mask], request.edit.image[~request.edit.mask])
            assert not np.array_equal(drawn, request.edit.image)


@pytest.mark.product(most=1)
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["slack", "fcfs", "static", "continuous"])
def test_policies_and_gamma(serve: RunPsctl, tmp_path: Path, policy: str) -> None:
    options = ["--trace", "gamma", "--cv", "3", "--num-prompts", "5", "--request-rate", "50", "--policy", policy]
    if policy == "slack":
        (tmp_path / "steps.csv").write_text(STEPS_CSV)
        options += ["--predictor", "steps.csv"]
    run = serve(*options, "--max-batch-size", "4", "--seed", "3")
    assert run.returncode == 0, run.stderr
    # A pipe receives one line when serving starts, with the length of the trace, and one when it ends.
    assert "\nrequests: 5 to do, less than a minute ...\nrequests: 5 done in " in run.stderr
    for word in ("throughput", "SLO attainment", "By resolution", "scheduling mean", "patch cache", policy):
        assert word in run.stdout


@pytest.mark.exhaustive
@pytest.mark.slow
def test_batches_larger_than_the_latency_table_are_reported(serve: RunPsctl, tmp_path: Path) -> None:
    (tmp_path / "steps.csv").write_text(STEPS_CSV)
    options = ("--trace", "poisson", "--request-rate", "inf", "--num-prompts", "8", "--slo-scale", "1000", "--json")
    slack = ("--policy", "slack", "--predictor", "steps.csv", *options)
    run = serve(*slack, "--max-batch-size", "8")
    assert summary_of(run)["predictions_outside"]["too_large"] > 0
    assert "--max-batch-size is 8, but the largest batch in steps.csv has 4" in run.stderr.replace("\n", " ")
    small = serve(*slack, "--max-batch-size", "4")
    assert summary_of(small)["predictions_outside"]["too_large"] == 0
    assert "largest batch" not in small.stderr
    assert "predictions_outside" not in summary_of(serve("--policy", "fcfs", *options))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_failing_batches_are_halved_and_reported(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = PatchedModel.__call__

    def fails_if_large(self: PatchedModel, patches: torch.Tensor, timesteps: torch.Tensor, **rest: Any) -> torch.Tensor:
        if len(timesteps) > 2:  # guided: two rows per request
            raise torch.OutOfMemoryError("too large")
        return original(self, patches, timesteps, **rest)

    monkeypatch.setattr(PatchedModel, "__call__", fails_if_large)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["serve", "--num-prompts", "6", "--request-rate", "inf", "--policy", "continuous", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["completed_requests"] == 6
    count = json.loads(out)["batch_failures"]["count"]
    assert f"{count} steps of whole batches failed and were repeated in halves; denoising: OutOfMemoryError" in err


@pytest.mark.exhaustive
@pytest.mark.slow
def test_trace_file_keeps_its_timestamps(serve: RunPsctl, tmp_path: Path) -> None:
    lines = [
        "Request(request_id=7, timestamp=0.2, height=32, width=48, num_frames=1, prompt='a hat', negative_prompt='x', "
        "num_inference_steps=3, seed=4, slo_ms=90000)",
        "Request(request_id=9, timestamp=0.9, height=32, width=32, num_frames=1, prompt='a car')",
    ]
    (tmp_path / "trace.txt").write_text("\n".join(lines))
    summary = summary_of(serve("--trace", "trace.txt", "--json", "--num-inference-steps", "2"))
    records = read_rows(Path(summary["run_dir"]) / "records.parquet", RECORDS)
    assert [record["request_id"] for record in records] == [7, 9]
    assert [record["arrival_s"] for record in records] == [0.2, 0.9]
    assert [record["num_inference_steps"] for record in records] == [3, 2]
    assert (records[0]["slo_s"], records[0]["width"], records[0]["seed"]) == (90.0, 48, 4)
    assert records[1]["prepare_start_s"] >= 0.9
    assert summary["duration"] > 0.9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--request-rate", "-1"], "request rate is -1"),
        (["--num-prompts", "0"], "number of prompts is 0"),
        (["--slo-scale", "0"], "SLO scale is 0"),
        (["--policy", "magic"], "fcfs, static, continuous"),
        (["--system", "distrifusion-fcfs"], "only in the simulator"),
        (["--policy", "slack", "--predictor", "nowhere.csv"], "nowhere.csv: cannot read the latencies table"),
        (["--trace", "azure"], "--trace azure replays recorded arrivals: name their file with --arrivals"),
        (["--amplitude", "0.5"], "--amplitude is 0.5, but it belongs to --trace diurnal, not poisson"),
        (["--resolutions", "100"], "multiple of 8"),
        (["--mix", "1,2"], "mix has 2 weights"),
        (["--prompts", "empty.txt"], "empty.txt"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--trace", "bad.jsonl"], "bad.jsonl:2:"),
        (["--trace", "back.jsonl"], "back.jsonl:2:"),
        (["--cv", "2"], "cv"),
        (["--edits", "2"], "--edits is 2, but it must be a share of the requests, from 0 to 1"),
        (["--mask-ratios", "public"], "of edits, and there are none: add --edits"),
        (["--edits", "1", "--mask-ratios", "nowhere.csv"], "mask ratios are production, public, viton or a file"),
        (["--edits", "1", "--templates", "0"], "number of templates is 0"),
        (["--edits", "1", "--edit-strength", "0.1"], "strength is 0.1, but with 2 steps it must be at least 0.5"),
        (["--max-batch-size", "0"], "max-batch-size"),
        (["--model", "emoji-xxl"], "emoji-xl, emoji-3"),
        (["--num-inference-steps", "1001", "--num-prompts", "1", "--resolutions", "32"], "1001"),
    ],
)
def test_bad_usage_gives_a_one_line_error(
    serve: RunPsctl, tmp_path: Path, workspace: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "empty.txt").touch()
    good = json.dumps({"arrival_s": 1, "prompt": "a", "width": 32, "height": 32})
    (tmp_path / "bad.jsonl").write_text(f"{good}\n{{")
    (tmp_path / "back.jsonl").write_text(f"{good}\n{good.replace('1', '0', 1)}")
    before = run_dirs(workspace)
    run = serve(*arguments, "--quiet", "--json")
    assert run.returncode == 2, run.stderr
    assert run.stdout == ""
    assert message in run.stderr
    assert len(run.stderr.splitlines()) == 1
    assert run_dirs(workspace) == before


@pytest.mark.slow
def test_ctrl_c_keeps_finished_requests(environment: dict[str, str], tmp_path: Path) -> None:
    # One request arrives at once, one does not end, one would arrive in an hour.
    trace = [{"arrival_s": 0, "num_inference_steps": 2}, {"arrival_s": 0.01, "num_inference_steps": 900}]
    # Requests have their own SLOs, so that nothing is measured before and none is discarded on a slow machine.
    trace.append({"arrival_s": 3600, "num_inference_steps": 2})
    text = "\n".join(json.dumps({"prompt": "a", "width": 32, "height": 32, "slo_s": 3600, **line}) for line in trace)
    (tmp_path / "trace.jsonl").write_text(text)
    command = ("serve", "--trace", "trace.jsonl", "--save-dir", "out", "--json", "--output-file", "s.json")
    process = start_psctl(*command, cwd=tmp_path, env=environment)
    stdout, stderr = interrupted_when(process, (tmp_path / "out" / "000.png").exists, every_s=0.02)
    assert process.returncode == 130, stderr
    assert "Error: interrupted" in stderr
    summary = json.loads(stdout)
    assert json.loads((tmp_path / "s.json").read_text()) == summary
    assert summary["was_interrupted"]
    assert (summary["completed_requests"], summary["cancelled_requests"]) == (1, 2)
    records = read_rows(Path(summary["run_dir"]) / "records.parquet", RECORDS)
    assert [record["status"] for record in records] == ["completed", "cancelled", "cancelled"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["000.png", "report.html"]
