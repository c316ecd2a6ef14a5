"""Engines that the server builds from recipes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.data.workspace import ModelWorkspace
from patchedserve.profiling.measure.for_serving import measure_latencies
from patchedserve.serving.options import EngineOptions, LoadOptions, TemplateOptions
from patchedserve.serving.patched.stepper import PatchedStepper
from patchedserve.serving.runs.http.engine import EngineRecipe, build_engine
from patchedserve.serving.scheduling.systems import get_system

from ....support.http_server import small_model


@pytest.mark.product(most=1)
@pytest.mark.parametrize(
    "templates",
    [TemplateOptions("first", "kv"), TemplateOptions("never"), TemplateOptions(loads=LoadOptions(10.0, "paper")), None],
)
def test_template_options_control_reading_and_recording(templates: TemplateOptions | None, tmp_path: Path) -> None:
    place = ModelWorkspace(tmp_path / "workspace")
    built = build_engine(
        EngineRecipe(
            "tiny",
            str(small_model(tmp_path / "tiny")),
            "cpu",
            "float32",
            EngineOptions(),
            place,
            get_system("patched-fcfs"),
            (Resolution(32, 32),),
            needs_standalone=False,
            templates=templates,
        ),
        measure_latencies,
    )
    store = built.model.reuse.store
    assert (None if store is None else store.folder) == (None if templates is None else place.templates)
    assert built.facts.model.reuses_templates == (templates is not None)
    assert built.setup.records_templates == (templates is not None and templates.record == "first")
    stepper = built.model.stepper
    assert isinstance(stepper, PatchedStepper)
    assert stepper.masked.keep == ("all" if templates is None else templates.keep)
    assert (stepper.planner is not None) == (templates is not None and templates.loads is not None)


SIZES = (Resolution(32, 32), Resolution(64, 32))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_tuning_reports_its_progress(tmp_path: Path) -> None:
    model, place = str(small_model(tmp_path / "tiny")), ModelWorkspace(tmp_path / "workspace")
    fcfs = get_system("patched-fcfs")
    recipe = EngineRecipe("tiny", model, "cpu", "float32", EngineOptions(), place, fcfs, SIZES, needs_standalone=False)

    def steps() -> list[tuple[str, int, int]]:
        found: list[tuple[str, int, int]] = []
        build_engine(recipe, measure_latencies, on_progress=lambda *step: found.append(step)).model.close()
        return found

    assert steps() == [("tuning", number, 3) for number in range(3)]
    assert steps() == [], "kept in the workspace"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_calibration_is_bounded_or_left_out_or_repeated(tmp_path: Path) -> None:
    place = ModelWorkspace(tmp_path / "workspace")
    options = EngineOptions(strategy="regroup")
    model, system = str(small_model(tmp_path / "tiny")), get_system("patched-slack")
    recipe = EngineRecipe("tiny", model, "cpu", "float32", options, place, system, SIZES, 2, calibrate_s=1e6)
    request = Request(0, "a cat", SIZES[1], 4, 3.0)

    def build(**changes: Any) -> tuple[float | None, list[str], list[tuple[str, int, int]]]:
        warnings: list[str] = []
        steps: list[tuple[str, int, int]] = []
        built = build_engine(
            replace(recipe, **changes),
            measure_latencies,
            on_progress=lambda *step: steps.append(step),
            on_warning=warnings.append,
        )
        built.model.close()
        return built.facts.alone.latency_s(request), [each for each in warnings if "not measured" in each], steps

    with pytest.raises(UsageError, match="--calibrate off measures nothing, and no step latencies of this model"):
        build(calibrate="off")
    fcfs = get_system("patched-fcfs").overridden(engine="patched", policy="fcfs")
    alone_s, [warning], steps = build(calibrate="off", system=fcfs)
    assert alone_s is None
    assert "32x32, 64x32 is not measured" in warning
    assert "do not exist unless requests or --slo set them" in warning
    assert steps == []
    # Without any time, a table has each size alone and one more batch, and no request is measured alone.
    alone_s, [warning], steps = build(calibrate_s=0.0)
    assert alone_s is None
    assert [what for what, _, _ in steps] == ["measuring step latencies"] * 3
    # The next start continues with what is missing, and the one after it has everything.
    alone_s, warnings, steps = build()
    assert (alone_s is not None, warnings) == (True, [])
    assert steps == [("measuring standalone latencies", 0, 2), ("measuring standalone latencies", 1, 2)]
    assert build(calibrate="off")[0] is not None
    _, warnings, steps = build(calibrate="force")
    assert warnings == []
    assert {what for what, _, _ in steps} == {"measuring step latencies", "measuring standalone latencies"}
    assert steps.count(("measuring standalone latencies", 1, 2)) == 1
    done, total = [step[1:] for step in steps if step[0] == "measuring step latencies"][-1]
    assert 3 <= done <= total
