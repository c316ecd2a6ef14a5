"""Engines that the server builds from recipes."""

from pathlib import Path

import pytest

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
