"""Edits that read a template's record: exact where nothing is read, close where the rest of the image is the same."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from patchedserve.data.edits import TemplateSpec
from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.templates import KEEPS, Keep
from patchedserve.serving.patched.stepper import PatchedStepper

from ...support.edits import edit_request
from ...support.family_kit import denoised
from ...support.patched_models import relative_error
from ...support.plain import plain_latents, short_texts
from ...support.tape import Tape
from ...support.template_records import LARGE, SMALL, TEMPLATE, build_tiny, edits, model_with, serve, some
from ...support.tiny_models import SAMPLERS
from .test_exact import pipeline


@pytest.mark.product(most=2)
@pytest.mark.parametrize(
    ("family", "sampler", "keep"),
    [
        *(
            (family, None, "all")
            for family in ("sd", "sd3", "flux", "flux2", "aura", "chroma", "pixart", "lumina2", "qwen", "z-image")
        ),
        *(("sdxl", name, "all") for name in SAMPLERS),
        *((family, None, keep) for family in ("sd", "sdxl", "sd3") for keep in ("outputs", "kv")),
    ],
)
def test_edit_of_the_whole_image_equals_its_exact_twin(
    family: str, sampler: str | None, keep: Keep, tmp_path: Path
) -> None:
    pipe, requests = pipeline(family, sampler), [edit_request(0, LARGE, "all", template=TEMPLATE, num_steps=5)]
    reused = serve(model_with(pipe, tmp_path, requests, keep), requests)
    twin = serve(build_tiny(pipe), requests)
    assert relative_error([reused.latents[0]], [twin.latents[0]]) <= 1e-3


@pytest.mark.product(most=2)
@pytest.mark.parametrize(
    ("family", "keep"),
    [
        *(
            (each, "all")
            for each in ("sd", "sdxl", "sd3", "flux", "flux2", "aura", "chroma", "pixart", "lumina2", "qwen", "z-image")
        ),
        *((family, keep) for family in ("sdxl", "sd3") for keep in ("outputs", "kv")),
    ],
)
def test_edits_in_a_mixed_batch_equal_those_alone(family: str, keep: Keep, tmp_path: Path) -> None:
    pipe = pipeline(family)
    requests = edits()
    model = model_with(pipe, tmp_path, requests, keep)
    shares = [model.family.geometry.active_share(request.edit) for request in requests if request.edit]
    assert max(shares) < 1
    new = Request(3, "a car", LARGE, 5, 4.0, seed=2)
    exact = edit_request(4, SMALL, seed=1)
    together = serve(model, [*requests, new, exact])
    for request in requests:
        alone = serve(model, [replace(request, request_id=0)])
        assert relative_error([together.latents[request.request_id]], [alone.latents[0]]) <= 1e-5
    assert relative_error([together.latents[3][0]], [plain_latents(pipe, new, **short_texts(pipe))]) <= 1e-3


@pytest.mark.parametrize("family", ["sdxl", "sd3", "flux"])
def test_latents_equal_the_image_outside_the_mask_and_approach_the_twin(family: str, tmp_path: Path) -> None:
    pipe, request = pipeline(family), edit_request(0, LARGE, template=TEMPLATE)
    model = model_with(pipe, tmp_path, [request])
    prepared = model.prepare(request)
    assert prepared.template is not None
    known = prepared.known_area
    assert known is not None
    reused = serve(model, [request]).latents[0]
    twin = serve(build_tiny(pipe), [request]).latents[0]
    outside = (known.weights == 0).expand_as(known.clean)
    assert torch.equal(reused[outside], known.clean[outside])
    # The weights are random; trained ones are measured elsewhere.
    # FLUX has few positions in few blocks here, so less of the edit spreads outwards.
    assert (1e-4 if family == "flux" else 1e-3) <= relative_error([reused], [twin]) <= 0.5


def test_large_masks_use_no_masked_pass(tmp_path: Path) -> None:
    requests = [edit_request(index, LARGE, kind, template=TEMPLATE) for index, kind in enumerate(("box", "all"))]
    model = model_with(pipeline("sdxl"), tmp_path, requests[:1])
    model.reuse.masked_up_to = 0.9
    shares = [model.family.geometry.active_share(request.edit) for request in requests if request.edit]
    assert shares[0] < 0.9 < shares[1]
    assert [model.prepare(request).template is None for request in requests] == [False, True]


def test_edit_without_a_record_equals_one_without_template(tmp_path: Path) -> None:
    request, plain = edit_request(0, LARGE, template=TEMPLATE), edit_request(0, LARGE)
    model = model_with(pipeline("sdxl"), tmp_path)
    assert model.prepare(request).template is None
    assert model.prepare(replace(request, edit=None)).template is None
    assert torch.equal(serve(model, [request]).latents[0], serve(model, [plain]).latents[0])
    model.reuse.store = None
    assert not torch.equal(serve(model, [request]).latents[0], serve(model, [plain]).latents[0])


def test_record_is_bound_to_image_schedule_prompt_seed_and_rows(tmp_path: Path) -> None:
    request = edit_request(0, LARGE, template=TEMPLATE)
    model = model_with(pipeline("sdxl"), tmp_path, [request])
    edit = request.edit
    assert edit is not None
    same = [
        replace(request, seed=9, prompt="a dog"),
        replace(request, guidance_scale=9.0),
        replace(request, edit=edit_request(0, LARGE, "ellipse", template=TEMPLATE).edit),
        replace(request, edit=replace(edit, strength=0.5)),
    ]
    others = [
        replace(request, num_inference_steps=7),
        replace(request, guidance_scale=1.0),
        replace(request, edit=replace(edit, template=None)),
        replace(request, edit=replace(edit, template=TemplateSpec("", 5))),
        replace(request, edit=replace(edit, template=TemplateSpec("a picture", 6))),
        replace(request, edit=edit_request(0, LARGE, seed=1, template=TEMPLATE).edit),
        # It starts at step 1, from the noised image.
        replace(request, num_inference_steps=6, edit=replace(edit, strength=0.99)),
    ]
    assert [model.prepare(each).template is None for each in same] == [False] * len(same)
    assert model.family.geometry.first_step(others[-1]) == 1
    assert [model.prepare(each).template is None for each in others[:-1]] == [True] * (len(others) - 1)


def test_records_with_other_contents_are_distinct(tmp_path: Path) -> None:
    pipe, request = pipeline("sdxl"), edit_request(0, LARGE, template=TEMPLATE)
    sizes = {}
    for keep in KEEPS:
        model = model_with(pipe, tmp_path, keep=keep)
        assert model.prepare(request).template is None
        model = model_with(pipe, tmp_path, [request], keep)
        assert model.prepare(request).template is not None
        assert model.reuse.store is not None
        sizes[keep] = model.reuse.store.list()[0]["bytes"]
    assert model.reuse.store is not None
    assert {each["about"]["keep"]: each["bytes"] for each in model.reuse.store.list()} == sizes
    assert 2 * sizes["outputs"] < sizes["kv"] < sizes["all"]


@pytest.mark.parametrize("keep", ["outputs", "kv"])
def test_computing_more_pixels_is_closer_to_the_twin(keep: Keep, tmp_path: Path) -> None:
    """Convolutions over all pixels see how an edit spreads outwards."""
    pipe, request = pipeline("sdxl"), edit_request(0, LARGE, template=TEMPLATE)
    twin = serve(build_tiny(pipe), [request]).latents[0]
    errors = {
        kept: relative_error([serve(model_with(pipe, tmp_path, [request], kept), [request]).latents[0]], [twin])
        for kept in (keep, "all")
    }
    assert 1e-4 < errors[keep] < errors["all"]


@pytest.mark.product(most=1)
@pytest.mark.parametrize(("family", "sampler"), [("sdxl", "dpm++"), ("sd3", None)])
def test_fully_computed_steps_equal_the_twin(family: str, sampler: str | None, tmp_path: Path) -> None:
    pipe, request = pipeline(family, sampler), edit_request(0, LARGE, template=TEMPLATE)
    twin = serve(build_tiny(pipe), [request]).latents[0]
    model, errors = model_with(pipe, tmp_path, [request]), []
    for count in (0, 2, 4, 6):
        edit = replace(some(request.edit), full_steps=count)
        found = serve(model, [replace(request, edit=edit)]).latents[0]
        errors.append(relative_error([found], [twin]))
        # In a batch with edits that read records at every step.
        together = serve(model, [replace(request, edit=edit, request_id=9), *edits()]).latents[9]
        assert relative_error([together], [found]) <= 1e-5
    assert torch.equal(found, twin)
    assert errors[0] > errors[2] > errors[3] == 0
    with pytest.raises(UsageError, match="full_steps is 7, but the edit takes 6 steps"):
        model.check_request(replace(request, edit=replace(some(request.edit), full_steps=7)))


def test_context_cells_are_computed_and_do_not_change(tmp_path: Path) -> None:
    pipe, request = pipeline("sd3"), edit_request(0, LARGE, "line", template=TEMPLATE)
    twin = serve(build_tiny(pipe), [request]).latents[0]
    model, shares, errors = model_with(pipe, tmp_path, [request]), [], []
    known = some(model.prepare(request).known_area)
    outside = (known.weights == 0).expand_as(known.clean)
    for dilate in (0, 1, 2, 64):
        edit = replace(some(request.edit), dilate=dilate)
        shares.append(model.family.geometry.active_share(edit))
        found = serve(model, [replace(request, edit=edit)]).latents[0]
        assert torch.equal(found[outside], known.clean[outside])
        errors.append(relative_error([found], [twin]))
    assert shares == sorted(set(shares))
    assert shares[-1] == 1
    assert errors[0] > errors[-1]
    assert errors[-1] <= 1e-3


@pytest.mark.product(most=1)
@pytest.mark.parametrize(
    ("family", "keep"),
    [
        *((each, "all") for each in ("sd", "sdxl", "sd3", "flux", "flux2", "chroma", "pixart", "lumina2", "z-image")),
        *((family, keep) for family in ("sdxl", "sd3") for keep in ("outputs", "kv")),
    ],
)
def test_replayed_masked_passes_equal_eager_ones(family: str, keep: Keep, tmp_path: Path) -> None:
    requests = [replace(each, num_inference_steps=each.num_inference_steps + 6) for each in edits()]
    model = model_with(pipeline(family), tmp_path, requests, keep)
    # Two edits of one image at the same step; edits join and leave.
    requests.append(replace(requests[1], request_id=3, seed=9))
    joins = [0, 5, 0, 5]
    expected = denoised(model, requests, joins)
    stepper, recorder = model.stepper, Tape()
    assert isinstance(stepper, PatchedStepper)
    # Chroma copies a constant to the device, once for a number of rows.
    stepper.model.use_graphs(recorder, patience=1 if family == "chroma" else 0)
    found = denoised(model, requests, joins)
    for own, other in zip(found, expected, strict=True):
        assert relative_error([own], [other]) <= 1e-5
    assert stepper.recording_failure is None
    # All passes but the first are replayed, in few buckets.
    assert recorder.recorded <= 4
    assert recorder.played >= (8 if family == "chroma" else 11)
