"""References: images that FLUX.1 Kontext and FLUX.2 see beside the one that they draw, in the same mixed batches.

The reference is the family's own pipeline, which draws each request by itself.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxKontextPipeline
from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import (
    CONDITION_IMAGE_SIZE,
    VAE_IMAGE_SIZE,
    calculate_dimensions,
)
from PIL import Image

from patchedserve.data.edits import EditSpec, Reference
from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.profiling.steps.sides import patched_stepper
from patchedserve.serving.cache.options import CacheOptions
from patchedserve.serving.families.references import (
    CROPPED,
    KONTEXT,
    KONTEXT_SIZES,
    MOST_PIXELS,
    QWEN_EDIT,
    QWEN_EDIT_PLUS,
    VIEW_PIXELS,
    of_area,
)
from patchedserve.serving.models.build import build_model
from patchedserve.serving.models.defaults import read_geometry
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.parallel.options import ParallelOptions

from ...support.edits import edit_request, plain_edit
from ...support.family_kit import BUILDS as ALL_BUILDS
from ...support.family_kit import PASS, STEPS, denoised, served
from ...support.patched_models import relative_error
from ...support.plain import SMALL_PIXELS, plain_image, plain_latents, short_texts
from ...support.tape import Tape
from ...support.tiny_models import save_tiny, tiny_sdxl
from ...support.tiny_qwen import tiny_qwen_edit

BUILDS = ALL_BUILDS | {"qwen-2509": partial(tiny_qwen_edit, is_at_zero=False)}
TAKING = ["kontext", "flux2", "klein", "klein-base", "qwen-edit", "qwen-2509", "qwen-edit-first"]
_MOST = {"kontext": 1, "qwen-edit-first": 1}
_SMALL, _LARGE, _WIDE = Resolution(32, 32), Resolution(64, 64), Resolution(96, 64)
ENGINES = {
    "image": EngineOptions(order="image"),
    "patch": EngineOptions(order="patch"),
    "plain": EngineOptions("plain"),
}


def picture(size: Resolution, seed: int) -> Reference:
    """Return a smooth image of this size."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    image = np.asarray(Image.fromarray(small).resize(size, Image.Resampling.BICUBIC))
    # Only Qwen-Image-Edit reads the view. Its pipeline makes both of the image, which has their size already here.
    return Reference(image, SMALL_EDIT.fitted(image, 16).view)


SMALL_EDIT = replace(
    QWEN_EDIT_PLUS,
    fit=partial(of_area, pixels=SMALL_PIXELS[MOST_PIXELS]),
    view=partial(of_area, pixels=SMALL_PIXELS[VIEW_PIXELS]),
)
_MASK = np.zeros((64, 64), dtype=bool)
_MASK[16:48, 16:48] = True
_A, _B, _C = picture(_LARGE, 0), picture(_WIDE, 1), picture(Resolution(64, 80), 2)
_AS_SCALED = _A, picture(Resolution(96, 32), 1), picture(Resolution(32, 96), 2)
"""References of sizes that Qwen-Image-Edit's pipeline, with `SMALL_PIXELS`, leaves as they are."""


def mixed(family: str, num_steps: Sequence[int]) -> list[Request]:
    """Return drawings and edits by references: of one size with others, and of other sizes with the same."""
    a, b, c = _AS_SCALED if family.startswith("qwen") else (_A, _B, _C)
    if family == "qwen-edit-first":  # whose text encoder sees the same image as its model
        a, b, c = (Reference(each.image) for each in (a, b, c))
    requests = [
        Request(0, "a red apple", _SMALL, num_steps[0], 3.5, seed=20),
        Request(1, "make it night", _LARGE, num_steps[1], 1.0, seed=21, references=(a,)),
        Request(2, "two birds", _SMALL, num_steps[2], 7.0, seed=22, negative_prompt="blur", references=(a, b)),
        Request(3, "", _LARGE, num_steps[3], 2.0, seed=23, references=(c,)),
    ]
    most = _MOST.get(family, 9)
    return [replace(request, references=request.references[:most]) for request in requests]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", TAKING)
def test_one_pass_equals_the_pipeline(family: str, engine: str) -> None:
    pipe, requests = BUILDS[family](), mixed(family, [1] * 4)
    texts = short_texts(pipe)
    expected = [plain_latents(pipe, request, **texts) for request in requests]
    found = denoised(served(pipe, ENGINES[engine], **texts), requests)
    assert relative_error(found, expected) <= PASS
    without = denoised(served(pipe, ENGINES[engine], **texts), [replace(requests[1], references=())])
    assert relative_error(without, expected[1:2]) > 10 * STEPS, "references have an effect"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", TAKING)
def test_requests_join_and_leave(family: str, engine: str) -> None:
    pipe, requests = BUILDS[family](), mixed(family, [20, 5, 6, 8])
    texts = short_texts(pipe)
    expected = [plain_latents(pipe, request, **texts) for request in requests]
    found = denoised(served(pipe, ENGINES[engine], **texts), requests, joins=[0, 1, 2, 2])
    assert relative_error(found, expected) <= STEPS


def with_masks(family: str, num_steps: Sequence[int]) -> list[Request]:
    """Return `mixed` with edits by masks among them, of images that are references themselves, alone or with others."""
    drawing, by_one, by_two, _ = mixed(family, num_steps)
    masked = [
        edit_request(4, _LARGE, "box", num_steps=num_steps[3], seed=24),
        edit_request(5, _WIDE, "ellipse", 0.6, num_steps=num_steps[4], guidance_scale=1.0, seed=25),
        edit_request(6, _SMALL, "speckles", num_steps=num_steps[5], seed=26),
    ]
    rule = KONTEXT if family == "kontext" else CROPPED
    found = []
    for request, others in zip(masked, ((), (_B,), (_A,)), strict=True):
        assert request.edit is not None
        found.append(replace(request, references=rule.beside(request.edit.image, others)))
    return [drawing, by_one, *found, by_two]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", ["kontext", "klein", "klein-base"])
def test_edits_by_masks_see_references(family: str, engine: str) -> None:
    """Beside drawings and edits by reference, with joins and leaves, as the inpainting pipelines draw each alone."""
    pipe, requests = BUILDS[family](), with_masks(family, [20, 5, 8, 9, 6, 7])
    texts = short_texts(pipe)
    expected = [(plain_edit if each.edit else plain_latents)(pipe, each, **texts) for each in requests]
    found = denoised(served(pipe, ENGINES[engine], **texts), requests, joins=[0, 1, 2, 2, 4, 5])
    assert relative_error(found, expected) <= STEPS


def test_masked_edits_of_dev_are_those_of_its_engines() -> None:
    """diffusers has no inpainting of FLUX.2 dev, whose edits are as Klein's: the engines agree, the mask holds."""
    pipe, requests = BUILDS["flux2"](), with_masks("flux2", [6, 5, 8, 9, 6, 7])
    texts = short_texts(pipe)
    first, *others = (denoised(served(pipe, options, **texts), requests) for options in ENGINES.values())
    assert all(relative_error(found, first) <= STEPS for found in others)
    model = served(pipe, **texts)
    known = model.prepare(requests[2]).known_area
    assert known is not None
    outside = (known.weights == 0).expand_as(known.clean)
    assert torch.equal(first[2][outside[0]], known.clean[outside])


@pytest.mark.parametrize("order", ["image", "patch"])
@pytest.mark.parametrize("family", ["kontext", "flux2", "klein-base", "qwen-edit", "qwen-2509"])
def test_recorded_passes_serve_other_references(family: str, order: str) -> None:
    """Padded batches of one bucket replay one pass, whatever their references."""
    pipe = BUILDS[family]()
    texts, tape = short_texts(pipe), Tape()
    model = served(pipe, EngineOptions(order=order), **texts)  # type: ignore[arg-type]  both are orders
    patched_stepper(model).model.use_graphs(tape, patience=1)
    first = mixed(family, [3] * 4)
    second = [replace(each, references=each.references[::-1], seed=each.seed + 9) for each in first]
    third = [replace(each, references=tuple(picture(ref.resolution, 7) for ref in each.references)) for each in first]
    for requests in (first, second, third):
        expected = [plain_latents(pipe, request, **texts) for request in requests]
        assert relative_error(denoised(model, requests), expected) <= STEPS
    assert model.stepper.recording_failure is None  # type: ignore[union-attr]  as above
    assert tape.recorded >= 1
    assert tape.played > tape.recorded


def test_qwen_takes_neither_masks_nor_strengths() -> None:
    model, image = served(BUILDS["qwen-edit"]()), picture(_LARGE, 1)
    for edit, references in ((EditSpec.of_whole_image(image.image, 0.5), ()), (EditSpec(image.image, _MASK), (image,))):
        with pytest.raises(UsageError, match="tiny edits by references alone, not by a mask or a strength"):
            model.check_request(Request(0, "a hat", _LARGE, 4, 1.0, edit=edit, references=references))


@pytest.mark.parametrize("size", [(64, 64), (70, 100), (1500, 900), (300, 2000), (1024, 1024), (2000, 1999)])
def test_references_of_qwen_have_the_sizes_of_the_pipelines(size: tuple[int, int]) -> None:
    image = np.asarray(Image.fromarray(picture(Resolution(64, 64), 3).image).resize(size))
    processor = tiny_qwen_edit().image_processor
    fitted = QWEN_EDIT_PLUS.fitted(image, 16)
    for array, pixels in ((fitted.image, VAE_IMAGE_SIZE), (fitted.view, CONDITION_IMAGE_SIZE)):
        width, height = calculate_dimensions(pixels, size[0] / size[1])
        expected = np.asarray(processor.resize(Image.fromarray(image), height, width))
        assert array is not None
        assert np.array_equal(array, expected)
    assert np.array_equal(QWEN_EDIT.fitted(image, 16).image, fitted.image)
    assert QWEN_EDIT.fitted(image, 16).view is None


@pytest.mark.slow
def test_compiled_blocks_take_references() -> None:
    pipe, requests = BUILDS["klein"](), mixed("klein", [3] * 4)
    texts = short_texts(pipe)
    model = served(pipe, **texts)
    patched_stepper(model).model.compile(backend="eager")
    expected = [plain_latents(pipe, request, **texts) for request in requests]
    assert relative_error(denoised(model, requests), expected) <= STEPS


@pytest.mark.parametrize("engine", ENGINES)
def test_adapters_apply_to_references_too(engine: str, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the extra lora is not installed")
    from ...support.adapters import EACH, saved, serving
    from ...support.loras import alone

    pipe, loras, folder = saved("klein-base", tmp_path)
    requests = [replace(each, adapters=own) for each, own in zip(mixed("klein-base", [4] * 4), EACH, strict=True)]
    options = ENGINES[engine]
    model = serving(folder, loras, engine=options.engine, order=options.order)
    assert relative_error(denoised(model, requests), alone(pipe, loras, requests)) <= STEPS


@pytest.mark.parametrize("family", ["kontext", "flux2", "qwen-edit"])
def test_images_are_those_of_the_pipeline(family: str) -> None:
    pipe, request = BUILDS[family](), mixed(family, [2] * 4)[1]
    model = served(pipe)
    found = np.asarray(model.decode(denoised(model, [request])[0][None]), dtype=int)
    assert np.abs(found - np.asarray(plain_image(pipe, request))).max() <= 1


def test_references_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, calls = BUILDS["flux2"](), list[Any]()
    encode = pipe.vae.encode
    monkeypatch.setattr(pipe.vae, "encode", lambda pixels: calls.append(pixels.shape) or encode(pixels))
    model = served(pipe, **short_texts(pipe))
    request = mixed("flux2", [2] * 4)[2]
    first = denoised(model, [request])
    assert len(calls) == 2
    again = replace(request, references=tuple(Reference(each.image.copy()) for each in request.references))
    assert relative_error(denoised(model, [again]), first) == 0
    assert len(calls) == 2
    model.clear_cache()
    denoised(model, [again])
    assert len(calls) == 4
    small = served(pipe, EngineOptions(prompt_cache_mb=0), **short_texts(pipe))
    for _ in range(2):
        small.prepare(request)
    assert len(calls) == 8


def test_what_a_model_does_not_take_is_refused() -> None:
    pipe = BUILDS["kontext"]()
    model, request = served(pipe), mixed("kontext", [2] * 4)[1]
    model.check_request(request)
    with pytest.raises(UsageError, match="2 references are given, but tiny takes one reference at most"):
        model.check_request(replace(request, references=(_A, _B)))
    with pytest.raises(UsageError, match="resolution 40x64: width and height must be multiples of 16 pixels for tiny"):
        model.check_request(replace(request, references=(picture(Resolution(40, 64), 0),)))
    huge = Reference(np.broadcast_to(np.zeros(3, dtype=np.uint8), (8208, 8192, 3)))
    with pytest.raises(UsageError, match="resolution 8192x8208: it may have at most 64 times the pixels"):
        model.check_request(replace(request, references=(huge,)))
    with pytest.raises(UsageError, match="tiny takes no references"):
        build_model(tiny_sdxl(), name="tiny").check_request(replace(request, resolution=Resolution(64, 64)))
    pixels = np.zeros((64, 64, 3), dtype=np.uint8)
    with pytest.raises(UsageError, match="references are of new images and of exact edits by a mask"):
        replace(request, edit=EditSpec.of_whole_image(pixels, 0.5))
    with pytest.raises(UsageError, match=r"a reference is .*, but it must be"):
        Reference(pixels[..., 0])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            EngineOptions(cache=CacheOptions("accumulated", 0.1, patch_size=2)),
            "a request with references does not work with --cache",
        ),
        (EngineOptions("parallel", parallel=ParallelOptions("virtual:2")), "references does not work with --parallel"),
    ],
)
def test_engines_that_do_not_take_references_refuse_them(options: EngineOptions, reason: str) -> None:
    pipe = BUILDS["klein"]()
    model = served(pipe, options)
    try:
        model.check_request(mixed("klein", [2] * 4)[0])
        with pytest.raises(UsageError, match=reason):
            model.check_request(mixed("klein", [2] * 4)[1])
    finally:
        model.close()


@pytest.mark.parametrize("size", [(64, 64), (70, 100), (1500, 900), (300, 2000), (1024, 1024), (2000, 1999)])
def test_references_have_the_sizes_of_the_pipelines(size: tuple[int, int]) -> None:
    image = np.asarray(Image.fromarray(picture(Resolution(64, 64), 3).image).resize(size))
    pipe: Any = BUILDS["kontext"]()
    fitted = KONTEXT.fitted(image, 16)
    assert fitted.resolution in KONTEXT_SIZES
    seen = _seen_by(pipe, Image.fromarray(image))
    assert fitted.resolution == Resolution(seen.shape[3], seen.shape[2])
    assert np.abs(fitted.image.transpose(2, 0, 1) / 127.5 - 1 - seen[0].numpy()).max() <= 1e-5

    pipe = BUILDS["flux2"]()
    fitted, processor = CROPPED.fitted(image, 16), pipe.image_processor
    expected = processor._resize_if_exceeds_area(Image.fromarray(image), 1024 * 1024)
    width, height = (side // 16 * 16 for side in expected.size)
    seen = processor.preprocess(expected, height=height, width=width, resize_mode="crop")
    assert np.abs(fitted.image.transpose(2, 0, 1) / 127.5 - 1 - seen[0].numpy()).max() <= 1e-5


def _seen_by(pipe: FluxKontextPipeline, image: Image.Image) -> torch.Tensor:
    """Return the pixels that the pipeline encodes."""

    class _SeenError(Exception):
        pass

    seen: list[torch.Tensor] = []

    def encode(pixels: torch.Tensor) -> Any:
        seen.append(pixels)
        raise _SeenError

    pipe.vae.encode = encode  # type: ignore[method-assign]
    with pytest.raises(_SeenError):
        pipe(image=image, prompt="a hat", num_inference_steps=1, max_area=64 * 64, height=64, width=64)
    return seen[0]


def test_sizes_of_kontext_are_those_of_the_pipeline() -> None:
    assert {tuple(size) for size in KONTEXT_SIZES} == set(PREFERRED_KONTEXT_RESOLUTIONS)
    assert len(KONTEXT_SIZES) == len(PREFERRED_KONTEXT_RESOLUTIONS)


def test_small_images_are_refused() -> None:
    with pytest.raises(UsageError, match="the reference has 8x40 pixels, but it must have 16x16 or more"):
        CROPPED.fitted(np.zeros((40, 8, 3), dtype=np.uint8), 16)


@pytest.mark.parametrize("family", TAKING)
def test_the_rule_is_known_from_the_files(family: str, tmp_path: Path) -> None:
    pipe = BUILDS[family]()
    geometry = read_geometry(save_tiny(tmp_path, pipe))
    assert geometry == served(BUILDS[family]()).family.geometry
    rules = dict.fromkeys(("qwen-edit", "qwen-2509"), QWEN_EDIT_PLUS) | {
        "kontext": KONTEXT,
        "qwen-edit-first": QWEN_EDIT,
    }
    assert geometry.references is rules.get(family, CROPPED)
