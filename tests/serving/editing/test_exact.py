"""Edits equal diffusers' inpainting, whatever else is in their batch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import IPNDMScheduler

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.engine.run_result import RunResult
from patchedserve.serving.options import EngineOptions

from ...support.edits import MASKS, edit_request, plain_edit, redraw_request
from ...support.patched_models import relative_error
from ...support.plain import plain_latents, short_texts
from ...support.template_records import build_tiny, serve
from ...support.tiny_families import (
    tiny_aura,
    tiny_chroma,
    tiny_flux,
    tiny_flux2,
    tiny_lumina2,
    tiny_pixart,
    tiny_z_image,
)
from ...support.tiny_models import OWN_SCHEDULERS, SAMPLERS, tiny_sd, tiny_sd3, tiny_sdxl
from ...support.tiny_qwen import tiny_qwen

TOLERANCE = 1e-3
SMALL, LARGE, WIDE, ODD = Resolution(32, 32), Resolution(64, 64), Resolution(96, 32), Resolution(96, 48)


def pipeline(family: str, sampler: str | None = None) -> Any:
    # diffusers' own inpainting of SD3 and FLUX refuses latents of four channels.
    pipe = {
        "sd": tiny_sd,
        "sdxl": tiny_sdxl,
        "sd3": lambda: tiny_sd3(num_channels=16),
        "flux": lambda: tiny_flux(num_channels=16),
        "chroma": lambda: tiny_chroma(num_channels=16),
        "flux2": tiny_flux2,
        "aura": tiny_aura,
        "pixart": tiny_pixart,
        "lumina2": tiny_lumina2,
        "qwen": tiny_qwen,
        "z-image": tiny_z_image,
    }[family]()
    if sampler is not None:
        pipe.scheduler = SAMPLERS[sampler](pipe.scheduler.config)
    return pipe


def drawn(pipe: Any, requests: Sequence[Request], options: EngineOptions | None = None) -> RunResult:
    return serve(build_tiny(pipe, options), requests)


def assert_equal_to_plain(pipe: Any, requests: Sequence[Request], result: RunResult) -> None:
    for request in requests:
        plain = plain_latents if request.edit is None else plain_edit
        expected = plain(pipe, request, **short_texts(pipe))
        assert relative_error([result.latents[request.request_id][0]], [expected]) <= TOLERANCE, request.request_id


def mixed() -> list[Request]:
    """Return edits of several sizes, masks, strengths and guidance scales, and generations among them."""
    return [
        edit_request(0, SMALL, "box", seed=1),
        Request(1, "a car", LARGE, 5, 4.0, seed=2),
        edit_request(2, LARGE, "ellipse", 0.5, num_steps=9, seed=3),
        edit_request(3, WIDE, "line", 0.75, num_steps=20, guidance_scale=1.0, seed=4),
        Request(4, "two birds", SMALL, 3, 1.0, seed=5),
        edit_request(5, SMALL, "all", 0.3, num_steps=20, seed=6),
    ]


@pytest.mark.product(most=2)
@pytest.mark.parametrize(
    ("family", "sampler"),
    [
        *((family, None) for family in ("sd", "sd3", "flux", "chroma", "z-image")),
        *(("sdxl", name) for name in SAMPLERS),
    ],
)
def test_a_mixed_batch_of_edits_and_new_images_equals_plain(family: str, sampler: str | None) -> None:
    pipe = pipeline(family, sampler)
    assert_equal_to_plain(pipe, mixed(), drawn(pipe, mixed()))


@pytest.mark.product(most=3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sampler"),
    [
        *(("sdxl", name) for name in SAMPLERS),
        *((family, None) for family in ("sd3", "z-image", "sd", "flux", "chroma")),
    ],
)
def test_redrawn_images_equal_image_to_image(family: str, sampler: str | None) -> None:
    """Without a mask, beside edits and new images, and from noise alone."""
    pipe = pipeline(family, sampler)
    requests = [
        redraw_request(0, SMALL, num_steps=9, seed=1),
        *mixed()[1:3],
        redraw_request(3, WIDE, 0.75, num_steps=20, guidance_scale=1.0, seed=4),
        redraw_request(4, LARGE, 1.0, num_steps=4, seed=5),
    ]
    assert_equal_to_plain(pipe, requests, drawn(pipe, requests))


@pytest.mark.product
@pytest.mark.slow
@pytest.mark.parametrize("family", ["sd", "sdxl", "sd3", "flux"])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("strength", [1.0, 0.6])
def test_every_mask_equals_plain(family: str, kind: str, strength: float) -> None:
    pipe = pipeline(family)
    requests = [edit_request(0, ODD, kind, strength, seed=7)]
    assert_equal_to_plain(pipe, requests, drawn(pipe, requests))


@pytest.mark.product(most=2)
@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers_of_sd_equal_plain(sampler: str) -> None:
    pipe = pipeline("sd", sampler)
    requests = [edit_request(0, LARGE, "box", 0.7, num_steps=20), edit_request(1, SMALL, "ellipse", num_steps=16)]
    assert_equal_to_plain(pipe, requests, drawn(pipe, requests))


@pytest.mark.product
@pytest.mark.parametrize(
    "options",
    [
        EngineOptions("plain"),
        EngineOptions(order="patch", strategy="regroup"),
        pytest.param(EngineOptions(order="patch", strategy="stitch"), marks=pytest.mark.slow),
    ],
)
def test_both_engines_and_all_orders_equal_plain(options: EngineOptions) -> None:
    pipe = pipeline("sdxl")
    assert_equal_to_plain(pipe, mixed(), drawn(pipe, mixed(), options))


@pytest.mark.product(most=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "sampler"),
    [*(("patched", name) for name in OWN_SCHEDULERS), *(("plain", name) for name in ("heun", "dpm++-sde"))],
)
def test_a_batch_whose_requests_call_their_own_schedulers_equals_plain(sampler: str, engine: Any) -> None:
    pipe = pipeline("sd")
    pipe.scheduler = OWN_SCHEDULERS[sampler](pipe.scheduler.config)
    requests = [
        edit_request(0, SMALL),
        edit_request(1, LARGE, "ellipse", 0.5, num_steps=8),
        Request(2, "a car", SMALL, 5, 1.0, seed=2),
    ]
    assert_equal_to_plain(pipe, requests, drawn(pipe, requests, EngineOptions(engine)))


def test_edits_with_a_scheduler_without_add_noise_are_refused() -> None:
    pipe = pipeline("sd")
    pipe.scheduler = IPNDMScheduler()
    model = build_tiny(pipe)
    with pytest.raises(UsageError, match="IPNDMScheduler cannot noise images, as edits need it"):
        model.check_request(edit_request(0, SMALL))
    model.check_request(Request(0, "a car", SMALL, 5))


def test_pixels_outside_the_mask_equal_the_image() -> None:
    pipe = pipeline("sdxl")
    requests = [edit_request(0, LARGE), edit_request(1, LARGE, feather_px=4), edit_request(2, LARGE, paste=False)]
    result = drawn(pipe, requests)
    edit = requests[0].edit
    assert edit is not None
    sharp, soft, whole = (np.asarray(result.images[index]) for index in range(3))
    for image in (sharp, soft):
        assert (image[~edit.mask] == edit.image[~edit.mask]).all()
    # The three share a batch, in which sums are rounded in another order.
    assert np.abs(sharp[edit.mask].astype(int) - whole[edit.mask]).max() <= 1
    assert (whole == np.asarray(plain_edit(pipe, requests[2], "pil"))).mean() > 0.99
    assert not (whole[~edit.mask] == edit.image[~edit.mask]).all()
    # Four pixels inside the edge, the image is the new one; in between it is a blend.
    apart = np.abs(soft.astype(int) - sharp).max(2)
    assert apart[24, 40] <= 1
    assert 0 < (apart[edit.mask] > 1).sum() < edit.mask.sum()


def test_latents_outside_the_mask_end_as_those_of_the_image() -> None:
    pipe = pipeline("sd3")
    request = edit_request(0, LARGE)
    result, model = drawn(pipe, [request]), build_tiny(pipe)
    known = model.prepare(request).known_area
    assert known is not None
    outside = (known.weights == 0).expand_as(known.clean)
    assert torch.equal(result.latents[0][outside], known.clean[outside])


def test_edit_runs_its_share_of_the_steps() -> None:
    result = drawn(pipeline("sdxl"), [edit_request(0, SMALL, strength=0.5, num_steps=9)])
    assert len(result.steps) == 4
    # Stable Diffusion 3's pipeline rounds up.
    assert len(drawn(pipeline("sd3"), [edit_request(0, SMALL, strength=0.5, num_steps=9)]).steps) == 5


def test_invalid_edits_are_refused() -> None:
    model = build_tiny(pipeline("sdxl"))
    with pytest.raises(UsageError, match=r"strength is 0.1, but with 5 steps it must be at least 0.2"):
        model.check_request(edit_request(0, SMALL, strength=0.1, num_steps=5))
    thin = edit_request(0, SMALL)
    assert thin.edit is not None
    thin.edit.mask[:] = False
    thin.edit.mask[3, :] = True
    with pytest.raises(UsageError, match="too thin"):
        model.check_request(thin)
