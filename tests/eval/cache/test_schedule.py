"""`psctl train-predictor schedule`: the search, the output and the files of the command."""

import json
from pathlib import Path
from typing import Any

import pytest

from patchedserve.data.errors import RunError, UsageError
from patchedserve.eval.cache.schedule import ScheduleSettings, search_schedule
from patchedserve.serving.models.loading import load_model
from patchedserve.training.cache.schedule import CacheSchedule

from ...support.tiny_models import save_tiny, tiny_sd3


def model_of(folder: Path) -> Any:
    save_tiny(folder / "model", tiny_sd3(), guidance_scale=3.0, resolutions=["64", "96"])
    return load_model(str(folder / "model"), "cpu", "float32")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_search_finds_the_fewest_steps_that_reach_the_target(tmp_path: Path) -> None:
    model, drawn = model_of(tmp_path), list[int]()
    settings = ScheduleSettings(0.9, (8, 5), num_prompts=4)
    schedule = search_schedule(model, settings, on_draw=drawn.append)
    assert sum(drawn) <= settings.num_draws
    assert set(schedule.plans) == {5, 8}
    for number, plan in schedule.plans.items():
        figures = schedule.report["by_steps"][str(number)]
        assert figures["computed"] == len(plan.steps) < number
        tried = {row["computed"]: row["ssim"] for row in figures["tried"]}
        assert tried[len(plan.steps)] >= 0.9
        assert all(ssim < 0.9 for count, ssim in tried.items() if count < len(plan.steps))
        assert figures["ssim_min"] <= figures["ssim"] <= 1
    assert search_schedule(model, settings).plans == schedule.plans
    with pytest.raises(RunError, match="8 steps: no list reaches SSIM 1; the closest is 0"):
        search_schedule(model, ScheduleSettings(1 - 1e-12, (8,), num_prompts=4))


def test_settings_are_validated() -> None:
    for message, given in {
        "target-ssim is 1.5": {"target_ssim": 1.5},
        "num-prompts is 3": {"num_prompts": 3},
        "steps are .1.": {"num_steps": (1,)},
    }.items():
        with pytest.raises(UsageError, match=message):
            ScheduleSettings(**given)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_train_schedule_from_the_command_line(run_psctl: Any, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", tiny_sd3(), guidance_scale=3.0, resolutions=["64", "96"], num_inference_steps=6)
    common = ("--model", tmp_path / "model", "-w", tmp_path / "w", "--device", "cpu")
    draw = ("generate", "a hat", *common, "--cache", "schedule", "-o", tmp_path / "hat.png", "--json")
    done = run_psctl(*draw)
    assert done.returncode == 2
    assert "there is no cache schedule" in done.stderr
    command = ("train-predictor", "schedule", *common, "--steps", "6", "--num-prompts", 4, "--target-ssim", 0.9)
    done = run_psctl(*command, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    schedule = CacheSchedule.load(result["schedule"])
    assert result["plans"] == {"6": list(schedule.plans[6].steps)}
    done = run_psctl(*draw)
    assert done.returncode == 0, done.stderr
    assert "The cache goes by the schedule of the workspace" in done.stderr

    before = Path(result["schedule"]).read_bytes()
    done = run_psctl(*command[:-1], "0.9999999999999", "-q")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: 6 steps: no list reaches SSIM 1; the closest is 0.")
    assert Path(result["schedule"]).read_bytes() == before
    Path(result["schedule"]).write_bytes(before[:60])
    done = run_psctl(*draw, "-q", "--overwrite")
    assert done.returncode == 2
    assert "not valid JSON, perhaps half-written" in done.stderr
    assert "Traceback" not in done.stderr
