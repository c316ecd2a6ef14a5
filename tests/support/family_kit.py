"""The guarantees of every model family, checked on a tiny pipeline of its real classes: `check_family(build)`.

The reference is always the family's own diffusers pipeline, which draws each request by itself.
"""

import copy
import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import QwenImageEditPipeline
from torch import Tensor

from patchedserve.data.errors import RunError, UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.profiling.steps.sides import patched_stepper
from patchedserve.serving.cache.options import CacheOptions
from patchedserve.serving.cache.patch_cache import PatchCache
from patchedserve.serving.conflicts import conflict_in
from patchedserve.serving.core.prepared import PreparedRequest
from patchedserve.serving.models.build import build_model
from patchedserve.serving.models.defaults import ModelDefaults, read_geometry
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions, ModelOptions
from patchedserve.serving.parallel.options import ParallelOptions

from .cached_models import PlaceRule
from .patched_models import relative_error
from .plain import plain_image, plain_latents, short_texts
from .tiny_families import (
    tiny_aura,
    tiny_chroma,
    tiny_flux,
    tiny_flux2,
    tiny_klein,
    tiny_klein_base,
    tiny_kontext,
    tiny_lumina2,
    tiny_ovis,
    tiny_pixart,
    tiny_schnell,
    tiny_z_image,
)
from .tiny_models import save_tiny, tiny_sd, tiny_sd3, tiny_sdxl
from .tiny_qwen import tiny_qwen, tiny_qwen_edit

Build = Callable[[], Any]
PASS, STEPS = 1e-5, 1e-3
"""Largest relative error in float32 of one pass, and of 20 steps."""
BUILDS: dict[str, Build] = {
    "sd": tiny_sd,
    "sdxl": tiny_sdxl,
    "sd3": tiny_sd3,
    "flux": tiny_flux,
    "schnell": tiny_schnell,
    "kontext": tiny_kontext,
    "flux2": tiny_flux2,
    "klein": tiny_klein,
    "klein-base": tiny_klein_base,
    "aura": tiny_aura,
    "chroma": tiny_chroma,
    "ovis": tiny_ovis,
    "pixart": tiny_pixart,
    "lumina2": tiny_lumina2,
    "qwen": tiny_qwen,
    "qwen-edit": tiny_qwen_edit,
    "qwen-edit-first": partial(tiny_qwen_edit, pipeline=QwenImageEditPipeline, is_at_zero=False),
    "z-image": tiny_z_image,
}
_SMALL, _LARGE, _WIDE = Resolution(32, 32), Resolution(64, 64), Resolution(96, 32)
_WAYS = {"image": EngineOptions(order="image"), "patch": EngineOptions(order="patch")}
_CACHE = CacheOptions("patch", 0.1, warmup_steps=1, max_reuse=2, full_above=1)
OPTIONS = {
    "--cache": EngineOptions(cache=CacheOptions("patch", 0.1)),
    "--parallel": EngineOptions("parallel", parallel=ParallelOptions("virtual:2")),
    "--adapter": EngineOptions(model=ModelOptions(adapter=["ink=ink.safetensors"])),
}


def mixed(num_steps: Sequence[int]) -> list[Request]:
    """Return four requests that differ in everything, with these numbers of steps."""
    return [
        Request(0, "a red apple", _SMALL, num_steps[0], 3.5, seed=20),
        Request(1, "a car in the rain, at night", _LARGE, num_steps[1], 1.0, seed=21),
        Request(2, "two birds", _SMALL, num_steps[2], 7.0, seed=22, negative_prompt="blur"),
        Request(3, "", _WIDE, num_steps[3], 2.0, seed=23),
    ]


def denoised(model: ServedModel, requests: Sequence[Request], joins: Sequence[int] | None = None) -> list[Tensor]:
    """Return the final latents of requests that share batches; each joins at a step and leaves at its end."""
    starts = dict(enumerate(joins or [0] * len(requests)))
    active, ended, found, step = [], 0, [model.prepare(request) for request in requests], 0
    while ended < len(requests):
        active += [found[index] for index, start in starts.items() if start == step]
        failed = model.stepper.step(active)
        assert failed == {}, failed
        ended += sum(prepared.state.is_finished for prepared in active)
        active = [prepared for prepared in active if not prepared.state.is_finished]
        step += 1
    return [prepared.latents[0] for prepared in found]


def served(pipe: Any, options: EngineOptions | None = None, **defaults: Any) -> ServedModel:
    return build_model(pipe, name="tiny", options=options, defaults=ModelDefaults(**defaults))


def one_pass_is_exact(build: Build) -> None:
    pipe, requests = build(), mixed([1] * 4)
    expected = [plain_latents(pipe, request) for request in requests]
    for name, options in _WAYS.items():
        assert relative_error(denoised(served(pipe, options), requests), expected) <= PASS, name


def twenty_steps_stay_exact(build: Build) -> None:
    pipe, requests = build(), mixed([20] * 4)
    texts = short_texts(pipe)
    expected = [plain_latents(pipe, request, **texts) for request in requests]
    assert relative_error(denoised(served(pipe, **texts), requests), expected) <= STEPS


def requests_join_and_leave_at_any_step(build: Build) -> None:
    pipe, requests = build(), mixed([6, 2, 3, 4])
    texts = short_texts(pipe)
    expected = [plain_latents(pipe, request, **texts) for request in requests]
    assert relative_error(denoised(served(pipe, **texts), requests, joins=[0, 1, 2, 2]), expected) <= STEPS


def the_plain_engine_serves_it(build: Build) -> None:
    pipe, requests = build(), mixed([3, 4, 3, 2])
    texts = short_texts(pipe)
    expected = [plain_latents(pipe, request, **texts) for request in requests]
    assert relative_error(denoised(served(pipe, EngineOptions("plain"), **texts), requests), expected) <= STEPS


def bfloat16_is_as_accurate_as_the_pipeline(build: Build) -> None:
    """Both are compared with float32 results for the same weights, texts and initial latents."""
    low = build().to(torch.bfloat16)
    high = copy.deepcopy(low).to(torch.float32)
    texts = short_texts(low)
    model, requests = served(low, **texts), mixed([2] * 4)
    inputs = [model.prepare(request) for request in requests]

    def run(other: ServedModel) -> list[Tensor]:
        active = [_first_step_of(other, prepared) for prepared in inputs]
        while not active[0].state.is_finished:
            assert other.stepper.step(active) == {}
        return [prepared.latents[0] for prepared in active]

    exact = run(served(high, EngineOptions("plain"), **texts))
    allowed = 1.5 * _rms(run(served(low, EngineOptions("plain"), **texts)), exact)
    assert allowed > 1e-4
    assert _rms(run(model), exact) <= allowed


def images_are_those_of_the_pipeline(build: Build) -> None:
    pipe, request = build(), mixed([2] * 4)[1]
    model = served(pipe)
    found = np.asarray(model.decode(denoised(model, [request])[0][None]), dtype=int)
    assert found.std() > 1
    assert np.abs(found - np.asarray(plain_image(pipe, request))).max() <= 1


def parameters_have_an_effect(build: Build) -> None:
    """Otherwise equality would not show that two requests were mixed up."""
    pipe, first = build(), mixed([2] * 4)[0]
    model = served(pipe)
    changed = [replace(first, prompt="two birds"), replace(first, seed=1), replace(first, num_inference_steps=3)]
    if not model.family.is_distilled or getattr(pipe.transformer.config, "guidance_embeds", False):
        changed.append(replace(first, guidance_scale=9.0))
    before = denoised(model, [first])
    for request in changed:
        assert relative_error(denoised(model, [request]), before) > 10 * STEPS, request


def the_cache_is_exact_where_nothing_is_reused(build: Build) -> None:
    pipe = build()
    for requests, bound in ((mixed([1] * 4), PASS), (mixed([6, 2, 3, 4]), STEPS)):
        expected = [plain_latents(pipe, request, **short_texts(pipe)) for request in requests]
        model, cache = _cached(pipe, replace(_CACHE, threshold=0.0))
        assert relative_error(denoised(model, requests, joins=[0, 1, 2, 2]), expected) <= bound
        assert cache.stats.skipped == 0
        assert tuple(cache.stats.by_block) == model.block_facts(None).blocks


def the_cache_reuses_a_requests_own_outputs(build: Build) -> None:
    """Independent of the other requests in the batch and of the lengths of their texts.

    Checked patch by patch, and for the whole model as one block.
    """
    pipe, requests = build(), mixed([8, 3, 5, 6])
    exact = denoised(served(pipe, **short_texts(pipe)), requests)
    for options in (_CACHE, CacheOptions("accumulated", 1e9, warmup_steps=1, max_reuse=2)):
        model, cache = _cached(pipe, options)
        found = denoised(model, requests, joins=[0, 1, 2, 2])
        assert min(skipped for _, skipped in cache.stats.by_block.values()) > 0
        assert (cache.stats.masked > 0) == (options is _CACHE)
        assert relative_error(found, exact) > 10 * STEPS
        alone = [denoised(_cached(pipe, options)[0], [request])[0] for request in requests]
        assert relative_error(found, alone) <= STEPS


def text_lengths_are_those_of_the_model(build: Build) -> None:
    pipe, request = build(), mixed([2] * 4)[0]
    if not hasattr(pipe, "transformer"):
        with pytest.raises(UsageError, match="max_sequence_length is 24"):
            served(pipe, max_sequence_length=24)
        return
    found = [denoised(served(pipe, max_sequence_length=length), [request])[0] for length in (24, 40)]
    expected = [plain_latents(pipe, request, max_sequence_length=length) for length in (24, 40)]
    assert relative_error(found, expected) <= STEPS
    assert found[0].shape == found[1].shape


def a_saved_folder_loads(build: Build) -> None:
    pipe, request = build(), mixed([2] * 4)[1]
    with TemporaryDirectory() as folder:
        save_tiny(Path(folder), pipe)
        if "processor" in pipe.components and importlib.util.find_spec("torchvision") is None:
            file, kind = Path(folder) / "model_index.json", type(pipe.processor).__name__
            file.write_text(json.dumps(json.loads(file.read_text()) | {"processor": ["transformers", kind]}))
            (Path(folder) / "processor").mkdir()
            with pytest.raises(RunError, match=f"its {kind} reads images, too, and needs torchvision"):
                load_model(folder, "cpu", "float32")
            return
        loaded = load_model(folder, "cpu", "float32")
        assert relative_error(denoised(loaded, [request]), [plain_latents(pipe, request)]) <= STEPS
        assert read_geometry(Path(folder)) == loaded.family.geometry
        for option in _refused_with(pipe):
            with pytest.raises(UsageError, match=f"{option} does not work with"):
                load_model(folder, "cpu", "float32", OPTIONS[option])


def unsupported_options_are_refused(build: Build) -> None:
    pipe = build()
    name = type(pipe).__name__
    for option in _refused_with(pipe):
        with pytest.raises(UsageError, match=f"{option} does not work with a {name}: ") as refusal:
            served(pipe, OPTIONS[option])
        assert "\n" not in str(refusal.value)


def _refused_with(pipe: Any) -> list[str]:
    return [option for option in OPTIONS if conflict_in(dict.fromkeys((option, type(pipe).__name__), ""))]


PROMISES: tuple[Callable[[Build], None], ...] = (
    one_pass_is_exact,
    twenty_steps_stay_exact,
    requests_join_and_leave_at_any_step,
    the_plain_engine_serves_it,
    bfloat16_is_as_accurate_as_the_pipeline,
    images_are_those_of_the_pipeline,
    parameters_have_an_effect,
    the_cache_is_exact_where_nothing_is_reused,
    the_cache_reuses_a_requests_own_outputs,
    text_lengths_are_those_of_the_model,
    a_saved_folder_loads,
    unsupported_options_are_refused,
)


def check_family(build: Build) -> None:
    """Check all guarantees for the family of a tiny pipeline. Raises AssertionError at the first that is broken."""
    for promise in PROMISES:
        promise(build)


def _cached(pipe: Any, options: CacheOptions) -> tuple[ServedModel, PatchCache]:
    """Return a served model with a cache of patches as large as a small image.

    Where it reuses single patches, it decides by their step and place only.
    """
    size, _ = served(pipe).family.geometry.latent_size(_SMALL)
    model = served(pipe, EngineOptions(cache=replace(options, patch_size=size)), **short_texts(pipe))
    cache = patched_stepper(model).model.cache
    assert cache is not None
    if options is _CACHE:
        cache.rule = PlaceRule()
        # Otherwise the first step in which any request needs a mask would be computed in full.
        cache.uses_masks[:] = [True] * len(cache.names)
    return model, cache


def _first_step_of(model: ServedModel, prepared: PreparedRequest) -> PreparedRequest:
    """Return the same request at its first step, for a model of another dtype."""
    own = model.prepare(prepared.request)
    own.latents = prepared.latents.clone()
    own.conditioning = {name: part.to(own.conditioning[name].dtype) for name, part in prepared.conditioning.items()}
    return own


def _rms(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    error = sum(float((one.float() - other.float()).square().sum()) for one, other in zip(found, expected, strict=True))
    return (error / sum(float(other.square().sum()) for other in expected)) ** 0.5
