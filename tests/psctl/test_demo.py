"""`psctl demo`: all systems serve the same requests, and one page compares the results."""

import json
from pathlib import Path

import pytest
from PIL import Image

from ..conftest import RunPsctl
from ..support.tiny_models import save_tiny, tiny_sdxl


@pytest.mark.exhaustive
@pytest.mark.slow
def test_demo_serves_one_trace_with_three_systems(run_psctl: RunPsctl, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny", tiny_sdxl(), guidance_scale=3.0, resolutions=["32", "48"])
    arguments = ("demo", "--model", model, "--dtype", "float32", "--duration", "1", "--num-inference-steps", "3")
    done = run_psctl(*arguments, "--load", "0.5", "--output-dir", "shown", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert list(result["systems"]) == ["bucketed", "patched-slack", "patched-schedule"]
    runs = [
        [json.loads(line) for line in (tmp_path / summary["run_dir"] / "trace.jsonl").read_text().splitlines()]
        for summary in result["systems"].values()
    ]
    assert runs[0] == runs[1] == runs[2], "not the same requests and SLOs"
    assert {summary["total_requests"] for summary in result["systems"].values()} == {len(runs[0])}
    # The last line states the conclusion with the numbers of the runs.
    met = [summary["slo_met_success"] for summary in result["systems"].values()]
    assert done.stderr.splitlines()[-1] == result["headline"]
    assert f"patched-schedule: {met[2]} of {len(runs[0])} requests in time" in result["headline"]
    assert f"patched-slack: {met[1]} (" in result["headline"]
    assert f"bucketed: {met[0]} (" in result["headline"]
    page = (tmp_path / "shown" / "comparison.html").read_text()
    assert result["headline"] in page
    with Image.open(tmp_path / "shown" / "overview.png") as picture:
        assert picture.size[0] > 1000
    for name, summary in result["systems"].items():
        assert len(list((tmp_path / "shown" / name).glob("*.png"))) == summary["completed_requests"]


def test_unwritable_output_folder_is_reported_before_loading(run_psctl: RunPsctl, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run_psctl("demo", "--output-dir", "file/shown")
    assert done.returncode != 0
    assert "Loading" not in done.stderr
