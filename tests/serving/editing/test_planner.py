"""Load plans of batches of edits, made from measured passes and followed by the engine."""

import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from patchedserve.data.requests import Request
from patchedserve.data.templates import KEEPS, LOAD_PLANS, Keep, LoadPlan
from patchedserve.data.work import Work
from patchedserve.serving.editing.planner import LoadPlanner
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import LoadOptions, TemplateOptions
from patchedserve.serving.patched.part_times import MeasuredPass
from patchedserve.serving.patched.stepper import PatchedStepper

from ...support.edits import edit_request
from ...support.patched_models import relative_error
from ...support.template_records import LARGE, TEMPLATE, build_tiny, model_with, serve, some
from .test_exact import pipeline


def request() -> Request:
    return edit_request(0, LARGE, num_steps=3, template=TEMPLATE)


def planned(family: str, folder: Path, loads: LoadOptions, keep: Keep = "all") -> ServedModel:
    """Return a model with the record of `request`, which it reads with the given options."""
    model = model_with(pipeline(family), folder / "records", [request()], keep)
    (folder / "tables").mkdir(exist_ok=True)
    model.reuse.open_store(folder / "records", TemplateOptions(loads=loads))
    model.reuse.plan_loads(loads, model.tuning([LARGE], folder / "tables"))
    return model


def stepper_of(model: ServedModel) -> PatchedStepper:
    assert isinstance(model.stepper, PatchedStepper)
    return model.stepper


@pytest.mark.product(most=1)
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("family", ["sdxl", "sd3"])
def test_edit_with_all_parts_equals_a_fast_link_and_with_none_the_twin(family: str, keep: Keep, tmp_path: Path) -> None:
    fast = serve(model_with(pipeline(family), tmp_path / "records", [request()], keep), [request()]).latents[0]
    strawman = serve(planned(family, tmp_path, LoadOptions(1e6, "strawman"), keep), [request()]).latents[0]
    assert torch.equal(strawman, fast)
    twin = serve(build_tiny(pipeline(family)), [request()]).latents[0]
    start_s = time.perf_counter()
    # At this bandwidth, a single part would take hours.
    none = serve(planned(family, tmp_path, LoadOptions(1e-6, "none"), keep), [replace(request(), request_id=0)])
    assert time.perf_counter() - start_s < 600
    assert relative_error([none.latents[0]], [twin]) <= 1e-4 < relative_error([strawman], [twin])


@pytest.mark.parametrize("plan", LOAD_PLANS)
def test_plan_is_computed_per_batch(plan: LoadPlan, tmp_path: Path) -> None:
    model = planned("sd3", tmp_path, LoadOptions(1.0, plan))
    stepper = stepper_of(model)
    first, second = (model.prepare(replace(request(), request_id=number, seed=number)) for number in range(2))
    assert not stepper.step([first])
    alone = some(stepper.plan)
    assert not stepper.step([first, second])
    both = some(stepper.plan)
    assert alone is not both
    assert len(alone.reuses) == len(both.reuses) == len(stepper.masked.parts)
    # The lines are fitted to measured times, whose noise may leave no slope.
    assert 0 < alone.latency_s <= both.latency_s
    # The two edits are at different steps of the record, and both steps are loaded.
    assert not stepper.step([first, second])
    assert stepper.plan is None  # the first one has finished
    if plan == "strawman":
        assert both.latency_s == pytest.approx(2 * alone.latency_s)
        assert all(both.reuses)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("keep", ["outputs", "all"])
def test_link_bandwidth_determines_the_number_of_parts_read(keep: Keep, tmp_path: Path) -> None:
    counts = []
    for mbps in (1e-6, 1e6):
        model = planned("sdxl", tmp_path, LoadOptions(mbps), keep)
        assert not model.stepper.step([model.prepare(request())])
        counts.append(sum(some(stepper_of(model).plan).reuses))
    assert counts[0] == 0
    assert len(list((tmp_path / "tables").glob("parts-*.json"))) == 1  # measured once


def test_pass_times_are_fitted_by_a_line_in_computed_work() -> None:
    def passes(rows: int, share: float, size: int = 256) -> MeasuredPass:
        images = rows * size**2 / 256**2
        whole_s = [0.01 + 0.02 * images, 0.03 * images]
        return MeasuredPass(size, size, rows, share, whole_s, [share * each for each in whole_s], [100.0, 300.0])

    measured = [passes(rows, share) for rows in (2, 8) for share in (0.1, 0.4)]
    rows, cells = [Work(256, 256, 0.2)] * 4, 4 * 64
    for returns, return_s in ((True, 0.0), (False, math.inf)):
        units = LoadPlanner(measured, "optimal", 0.1, returns=returns).units(rows, cells)
        assert [unit.return_s for unit in units] == [return_s] * 2
        assert [unit.all_s for unit in units] == pytest.approx([0.09, 0.12])
        assert [unit.load_s for unit in units] == pytest.approx([0.256, 0.768])
    planners = {name: LoadPlanner(measured, name, 3.0, returns=True) for name in LOAD_PLANS}
    plans = {name: planner.plan(rows, cells).latency_s for name, planner in planners.items()}
    fewer = {name: planner.plan(rows[:2], cells // 2).latency_s for name, planner in planners.items()}
    assert all(0 < fewer[name] < plans[name] for name in LOAD_PLANS)
    assert plans["none"] == pytest.approx(0.21)
    assert plans["optimal"] == min(plans.values())
    assert plans["optimal"] < plans["none"]
