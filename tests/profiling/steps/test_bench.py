"""Benchmarks of single steps on tiny models with random weights: their sides, rows and summary."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, DPMSolverMultistepScheduler, EulerAncestralDiscreteScheduler
from PIL import Image
from torch._dynamo.utils import counters

from patchedserve.data.workspace import ModelWorkspace
from patchedserve.profiling.steps.bench import STEPS, StepBench, step_experiment, summarize
from patchedserve.profiling.steps.lanes import BenchSettings
from patchedserve.profiling.steps.sides import (
    BOTH,
    COMPILED,
    EAGER,
    GRAPHS,
    OneByOne,
    RequestPool,
    StepperSide,
    efforts_of,
    plain_models,
    plain_side,
)
from patchedserve.serving.models.build import build_model
from patchedserve.serving.models.served import ServedModel

from ...support.bench_cases import FAST, ROW, SIZES, latents_of, squares, steps_by_diffusers
from ...support.tape import Tape
from ...support.tiny_models import largest_error, tiny_sd, tiny_sd3, tiny_sdxl

HEAD = {
    *("model", "dtype", "device", "device_name", "cpu", "threads", "torch", "guidance_scale", "is_guided"),
    *("resolutions", "efforts", "mean_ratio_mixed", "min_ratio"),
    *("is_plain_for_one_resolution", "was_interrupted", "run_dir", "rows"),
}
SIDES = ("one_by_one", "same_resolution", "patched")


def with_scheduler(pipe: Any, scheduler: Any, **config: Any) -> Any:
    pipe.scheduler = scheduler.from_config(pipe.scheduler.config, **config)
    return pipe


@pytest.fixture(scope="module")
def sdxl() -> ServedModel:
    return build_model(tiny_sdxl(), name="tiny")


@pytest.mark.product(most=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [tiny_sdxl, tiny_sd, tiny_sd3, lambda: with_scheduler(tiny_sdxl(), DDIMScheduler)],
    ids=["sdxl-euler", "sd-ddim", "sd3-flow", "sdxl-ddim"],
)
def test_all_sides_take_the_same_steps(make: Callable[[], Any]) -> None:
    model = build_model(make(), name="tiny")
    requests = RequestPool(model).take(squares(2, 1, 2))
    # Grouped by resolution in the given order, so that all sides return latents in the same order.
    forms = plain_models(model)
    plain = [
        OneByOne(model, forms["default"], requests),
        *(plain_side(model, each, requests) for each in forms.values()),
    ]
    assert len(plain) == (3 if make is tiny_sd3 else 4)
    patched = StepperSide(model.stepper, requests)
    for side in (*plain, patched):
        side.begin()
        for _ in range(3):
            side.step()
        assert side.steps_left == 247
    found = [steps_by_diffusers(model, prepared, 3) for prepared in requests]
    for side in (*plain, patched):
        assert largest_error(latents_of(side), found) < 1e-4
    moved = [float((prepared.latents - each).abs().max()) for prepared, each in zip(requests, found, strict=True)]
    assert min(moved) > 1e-3


def test_each_side_runs_in_its_own_memory_format(sdxl: ServedModel) -> None:
    forms = plain_models(sdxl)
    for models in forms.values():
        side = plain_side(sdxl, models, RequestPool(sdxl).take(squares(1, 0, 0)))
        side.begin()
        side.step()
    copied = forms["channels-last"].channels_last
    assert forms["default"].channels_last is None
    assert copied is not None
    for (name, one), other in zip(sdxl.denoiser.named_parameters(), copied.parameters(), strict=True):
        assert torch.equal(one, other), name
        assert (one is other) == (one.dim() != 4)
    for model, layout in ((copied, torch.channels_last), (sdxl.denoiser, torch.contiguous_format)):
        assert dict(model.named_parameters())["conv_in.weight"].is_contiguous(memory_format=layout)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("scheduler", [DDIMScheduler, DPMSolverMultistepScheduler, EulerAncestralDiscreteScheduler])
def test_requests_restart_when_their_schedule_ends(scheduler: Any) -> None:
    # Ten steps, with five left in the middle.
    model = build_model(with_scheduler(tiny_sdxl(), scheduler, num_train_timesteps=20), name="tiny")
    row = StepBench(model, BenchSettings(repeats=8, warmup=2)).measure(squares(1, 1, 0))
    assert row["repeats"] == 8
    assert min(row["one_by_one_ms"], row["same_resolution_ms"], row["patched_ms"]) > 0


def ends_ms(row: dict[str, Any], side: str) -> tuple[float, float]:
    """Return the shorter and the longer of the two timings of a side's fastest contender, computed from percentiles."""
    fastest = min((each for each in row["times"] if each["side"] == side), key=lambda each: each["ms"])
    low, high = fastest["p10_ms"], fastest["p90_ms"]
    return low - (high - low) / 8, high + (high - low) / 8


@pytest.mark.exhaustive
@pytest.mark.slow
def test_rows_and_summary(sdxl: ServedModel, tmp_path: Path) -> None:
    seen: list[str] = []
    workspace, chosen = ModelWorkspace(tmp_path), [squares(2, 0, 0), squares(1, 1, 1), squares(2, 0, 1)]
    experiment = step_experiment(STEPS, sdxl, chosen, workspace, FAST)
    outcome = experiment.run(workspace, on_start=lambda combination: seen.append(experiment.label(combination)))
    result = outcome.result
    assert seen == ["SS", "SML", "SSL"]
    assert not outcome.was_interrupted
    assert set(result) >= HEAD
    assert json.loads((outcome.run_dir / "steps.json").read_text()) == result
    assert Image.open(outcome.run_dir / "steps.png").width > 500
    single, *mixed = result["rows"]
    for row in result["rows"]:
        assert set(row) == ROW
        assert row["patched_p10_ms"] <= row["patched_ms"] <= row["patched_p90_ms"]
        assert row["baseline"] in ("one_by_one", "same_resolution")
        best = min(row["one_by_one_ms"], row["same_resolution_ms"])
        assert row[f"{row['baseline']}_ms"] == best
        baseline, patched = (ends_ms(row, side) for side in (row["baseline"], "patched"))
        assert baseline[0] / patched[1] <= row["ratio"] * 1.001
        assert row["ratio"] * 0.999 <= baseline[1] / patched[0]
        assert row["same_resolution_format"] in ("default", "channels-last")
    assert (single["patched_is_plain"], single["combination"]) == (True, {"32x32": 2, "48x48": 0, "64x64": 0})
    assert [row["patched_is_plain"] for row in mixed] == [False, False]
    assert result["mean_ratio_mixed"] == pytest.approx(statistics.geometric_mean(row["ratio"] for row in mixed))
    assert result["min_ratio"] == min(row["ratio"] for row in result["rows"])
    assert result["is_plain_for_one_resolution"] is True
    # Without mixed rows there is no mean; without rows of one resolution the last figure is unknown.
    assert summarize([single])["mean_ratio_mixed"] is None
    assert summarize(mixed)["is_plain_for_one_resolution"] is None
    # The convolutions' strategies were measured and stored.
    assert list((tmp_path / "tables").glob("convolutions-*.json"))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.usefixtures("traced_only")
def test_every_side_runs_with_every_effort_level(tmp_path: Path) -> None:
    model, recorders = build_model(tiny_sdxl(), name="tiny"), list[Tape]()

    def make_recorder(_: torch.device) -> Tape:
        recorders.append(Tape())
        return recorders[-1]

    efforts = efforts_of(compiled=True, recorded=True)
    assert efforts == (EAGER, GRAPHS, COMPILED, BOTH)
    bench = StepBench(model, BenchSettings(repeats=2, warmup=2), efforts=efforts, make_recorder=make_recorder)
    bench.tune(SIZES[:2], tmp_path)
    (recorder,), before = recorders, counters["stats"]["unique_graphs"]
    row = bench.measure(squares(1, 2, 0))
    found = {(each["side"], each["effort"], each["format"]) for each in row["times"]}
    forms = ("default", "channels-last")
    assert found == {
        *(("one_by_one", effort.name, None) for effort in efforts),
        *(("same_resolution", effort.name, form) for effort in efforts for form in forms),
        *(("patched", effort.name, None) for effort in efforts),
    }
    assert recorder.played > 0
    assert counters["stats"]["unique_graphs"] > 0
    assert counters["stats"]["unique_graphs"] == before, "tuning had not made all graphs"
    fastest_ms = {side: min(each["ms"] for each in row["times"] if each["side"] == side) for side in SIDES}
    assert fastest_ms == {side: row[f"{side}_ms"] for side in SIDES}
    assert row["baseline"] == min(SIDES[:2], key=fastest_ms.__getitem__)
    # All sides compute the same result with every optimisation.
    ends = {}
    for contender, lane in bench.lanes(squares(1, 2, 0)).items():
        lane.side.begin()
        for _ in range(3):
            lane.side.step()
        assert isinstance(lane.side, StepperSide | OneByOne)
        ends[contender] = latents_of(lane.side)
    expected = [steps_by_diffusers(model, each, 3) for each in RequestPool(model).take(squares(1, 2, 0))]
    for contender, latents in ends.items():
        assert largest_error(latents, expected) < 1e-4, contender


@pytest.mark.exhaustive
@pytest.mark.slow
def test_side_that_cannot_be_recorded_is_omitted(sdxl: ServedModel) -> None:
    class Refuses(Tape):
        def __call__(self, work: Callable[..., torch.Tensor]) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    bench = StepBench(sdxl, FAST, efforts=(EAGER, GRAPHS), make_recorder=lambda _: Refuses())
    row = bench.measure(squares(1, 1, 0))
    assert {each["effort"] for each in row["times"]} == {"eager"}
    assert row["left_out"] == dict.fromkeys(
        (
            "one by one, graphs",
            "same resolution, graphs, default",
            "same resolution, graphs, channels-last",
            "patched, graphs",
        ),
        "recording a pass: RuntimeError: operation not permitted when stream is capturing",
    )
