"""On a device as on a CPU, a request in any batch gives the result of plain diffusers for it alone."""

from typing import Any

import pytest

from patchedserve.eval.metrics.psnr import psnr
from patchedserve.serving.models.build import with_engine
from patchedserve.serving.options import EngineOptions

from ..support.family_kit import BUILDS, STEPS, denoised
from ..support.family_kit import mixed as tiny_requests
from ..support.family_kit import served as tiny
from ..support.patched_models import relative_error
from ..support.plain import plain_image, plain_latents
from .cases import BUNDLED, EXACT, JOINS, alone, loaded, mixed, served, served_together

SAMPLERS = ("ddim", "euler", "euler-ancestral", "dpm++")
LEAST_DB = 35.0
"""Least PSNR of float16 images to those alone: rounding changes single pixels by a grey level or two."""
WAYS: list[dict[str, Any]] = [
    {},
    {"order": "image", "strategy": "stitch"},
    {"order": "image", "strategy": "regroup"},
    {"order": "patch", "strategy": "stitch", "kernels": "torch"},
    {"order": "patch", "strategy": "regroup", "kernels": "torch"},
    {"order": "patch", "strategy": "stitch", "kernels": "triton"},
    {"order": "patch", "strategy": "regroup", "kernels": "triton"},
    {"order": "patch", "strategy": "stitch", "patch_size": 4},
    {"order": "patch", "strategy": "regroup", "patch_size": 8},
]


def _name(way: dict[str, Any]) -> str:
    return "-".join(map(str, way.values())) or "auto"


@pytest.mark.parametrize("way", WAYS, ids=_name)
@pytest.mark.parametrize("name", BUNDLED)
def test_every_engine_option_equals_the_pipeline_alone(name: str, way: dict[str, Any], device: str) -> None:
    if device == "cpu" and way.get("kernels") == "triton":
        pytest.skip("on a CPU triton has its interpreter only")
    model = served(name, device, EngineOptions(**way))
    requests = mixed()
    expected = [plain_latents(model.pipe, request) for request in requests]
    assert relative_error(denoised(model, requests, JOINS), expected) <= EXACT


@pytest.mark.parametrize("engine", ["patched", "plain"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers_equal_the_pipeline_alone(sampler: str, engine: Any, device: str) -> None:
    model = served("emoji-xl", device, EngineOptions(engine), sampler=sampler)
    for num_steps in ([1] * 4, (6, 2, 3, 4)):
        requests = mixed(num_steps)
        expected = [plain_latents(model.pipe, request) for request in requests]
        assert relative_error(denoised(model, requests, JOINS), expected) <= EXACT


@pytest.mark.parametrize("sampler", ["heun", "kdpm2-ancestral", "unipc"])
def test_unbatched_and_multistep_samplers_equal_the_pipeline(sampler: str, device: str) -> None:
    model = served("emoji-xl", device, sampler=sampler)
    requests = mixed((4, 4, 3, 4))
    expected = [plain_latents(model.pipe, request) for request in requests]
    result = served_together(model, requests)
    found = [result.latents[request.request_id][0] for request in requests]
    assert relative_error(found, expected) <= EXACT


@pytest.mark.parametrize("name", BUNDLED)
def test_float32_images_equal_the_pipeline(name: str, device: str) -> None:
    model, requests = served(name, device), mixed()
    result = served_together(model, requests)
    for request in requests:
        assert psnr(result.images[request.request_id], plain_image(model.pipe, request)) >= 55.0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", BUNDLED)
def test_half_precision_images_are_close_to_those_alone(name: str, dtype: str, device: str) -> None:
    if device == "cpu" and dtype == "float16":
        pytest.skip("convolutions in float16 take a CPU minutes")
    model = served(name, device, dtype=dtype)
    exact, requests = loaded(name, device), mixed((6, 6, 6, 6))
    result = served_together(model, requests)
    plain = with_engine(model, EngineOptions("plain"))
    for request, expected in zip(requests, alone(exact, requests), strict=True):
        image = result.images[request.request_id]
        own = served_together(plain, [request]).images[request.request_id]
        ours, theirs = (psnr(each, exact.decode(expected[None])) for each in (image, own))
        # As close to float32 as plain diffusers in this dtype; in float16 also close to plain diffusers itself.
        assert ours >= min(theirs - 3.0, LEAST_DB)
        if dtype == "float16":
            assert psnr(image, own) >= LEAST_DB


@pytest.mark.parametrize("name", BUILDS)
def test_tiny_models_of_all_families_equal_their_pipelines(name: str, device: str) -> None:
    pipe, requests = BUILDS[name]().to(device), tiny_requests([6, 2, 3, 4])
    expected = [plain_latents(pipe, request) for request in requests]
    for options in (EngineOptions(), EngineOptions(order="image"), EngineOptions("plain")):
        assert relative_error(denoised(tiny(pipe, options), requests, JOINS), expected) <= STEPS, options
