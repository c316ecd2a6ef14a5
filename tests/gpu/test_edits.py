"""Edits on a device: exact edits equal the plain engine's; edits that read records equal the same edits alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from patchedserve.data.edits import TemplateSpec
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.data.templates import KEEPS, Keep
from patchedserve.profiling.steps.sides import patched_stepper
from patchedserve.serving.editing.templates import TemplateStore
from patchedserve.serving.models.build import build_model, with_engine
from patchedserve.serving.options import EngineOptions, TemplateTiers

from ..serving.editing.test_exact import mixed as tiny_edits
from ..serving.editing.test_exact import pipeline
from ..support.edits import edit_request, plain_edit
from ..support.family_kit import denoised
from ..support.patched_models import relative_error
from ..support.plain import plain_latents
from ..support.template_records import LARGE as TINY
from ..support.template_records import TEMPLATE, edits, model_with, serve, with_records
from .cases import BUNDLED, EXACT, alone, loaded, served

SMALL, WIDE, LARGE = Resolution(128, 128), Resolution(256, 128), Resolution(256, 256)
FAMILIES = ("sd", "sdxl", "sd3", "flux", "flux2", "aura", "chroma", "pixart", "lumina2", "qwen", "z-image")


def _mixed(template: TemplateSpec | None = None) -> list[Request]:
    given: dict[str, Any] = {} if template is None else {"template": template}
    return [
        edit_request(0, LARGE, "line", **given),
        edit_request(1, SMALL, "box", num_steps=4, seed=1, **given),
        edit_request(2, WIDE, "ellipse", 0.5, num_steps=9, guidance_scale=1.0, seed=2, **given),
        Request(3, "a car", LARGE, 5, 4.0, seed=3),
    ]


@pytest.fixture(params=[2000.0, 0.0], ids=["memory", "files"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> TemplateStore:
    """A store whose records are in memory, or read from files step by step."""
    return TemplateStore(tmp_path, TemplateTiers(memory_mb=request.param))


@pytest.mark.parametrize(
    "options", [EngineOptions(order="image"), EngineOptions(order="patch"), EngineOptions("plain")]
)
@pytest.mark.parametrize("name", BUNDLED)
def test_edits_batched_with_new_images_equal_those_alone(name: str, options: EngineOptions, device: str) -> None:
    result = serve(served(name, device, options), _mixed())
    for request, expected in zip(_mixed(), alone(loaded(name, device), _mixed()), strict=True):
        assert relative_error([result.latents[request.request_id][0]], [expected]) <= EXACT
        assert request.edit is None or result.images[request.request_id].size == tuple(request.resolution)


@pytest.mark.parametrize("family", ["sd", "sdxl", "sd3", "flux"])
def test_edits_equal_diffusers_inpainting(family: str, device: str) -> None:
    pipe = pipeline(family).to(device)
    result = serve(build_model(pipe, name="tiny"), tiny_edits())
    for request in tiny_edits():
        expected = plain_latents(pipe, request) if request.edit is None else plain_edit(pipe, request)
        assert relative_error([result.latents[request.request_id][0]], [expected]) <= 1e-3


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("name", BUNDLED)
def test_edit_of_the_whole_image_equals_its_exact_twin(
    name: str, keep: Keep, store: TemplateStore, device: str
) -> None:
    """An edit reads nothing for cells in the mask."""
    requests = [edit_request(0, SMALL, "all", template=TEMPLATE, num_steps=5)]
    model = with_records(served(name, device), store, requests, keep)
    assert model.prepare(requests[0]).template is not None
    twin = serve(with_engine(model, EngineOptions()), requests)
    assert relative_error([serve(model, requests).latents[0]], [twin.latents[0]]) <= 1e-3


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("name", BUNDLED)
def test_edits_that_read_records_in_a_mixed_batch_equal_those_alone(
    name: str, keep: Keep, store: TemplateStore, device: str
) -> None:
    requests = _mixed(TEMPLATE)
    model = with_records(served(name, device), store, requests[:3], keep)
    together = serve(model, requests)
    # Records that another store has written, as in another process.
    again = serve(with_records(served(name, device), TemplateStore(store.folder), (), keep), requests)
    for request in requests:
        own = serve(model, [replace(request, request_id=0)]).latents[0]
        for found in (together, again):
            assert relative_error([found.latents[request.request_id]], [own]) <= EXACT
    assert relative_error([together.latents[3][0]], alone(model, requests[3:])) <= EXACT


@pytest.mark.parametrize("family", FAMILIES)
def test_families_read_records_in_a_mixed_batch_as_alone(family: str, device: str, tmp_path: Path) -> None:
    pipe = pipeline(family).to(device)
    model = model_with(pipe, tmp_path, edits())
    together = serve(model, [*edits(), Request(3, "a car", TINY, 5, 4.0, seed=2)])
    for request in edits():
        alone = serve(model, [replace(request, request_id=0)])
        assert relative_error([together.latents[request.request_id]], [alone.latents[0]]) <= EXACT


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("name", BUNDLED)
def test_replayed_masked_passes_equal_eager_ones(name: str, keep: Keep, store: TemplateStore, cuda: str) -> None:
    requests = [replace(each, num_inference_steps=each.num_inference_steps + 6) for each in _mixed(TEMPLATE)[:3]]
    eager = with_records(served(name, cuda, EngineOptions(cuda_graphs=False)), store, requests, keep)
    played = with_records(served(name, cuda, EngineOptions(cuda_graphs=True)), store, (), keep)
    assert relative_error(denoised(played, requests, [0, 5, 0]), denoised(eager, requests, [0, 5, 0])) <= 1e-5
    assert patched_stepper(played).recording_failure is None
