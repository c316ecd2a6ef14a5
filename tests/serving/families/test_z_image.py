"""Z-Image: guidance that begins above 0, noise in float32 whatever the dtype, and the limit on text length."""

import pytest
import torch

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.models.build import build_model

from ...support.family_kit import STEPS, denoised, served
from ...support.patched_models import relative_error
from ...support.plain import plain_latents
from ...support.tiny_families import tiny_z_image

SIZE = Resolution(64, 48)


def test_guidance_scales_above_zero_take_effect() -> None:
    pipe = tiny_z_image()
    model = served(pipe)
    requests = [Request(n, "a hat", SIZE, 2, scale, seed=1) for n, scale in enumerate((0.0, 0.5, 1.0))]
    assert [model.prepare(request).num_rows for request in requests] == [1, 2, 2]
    found = denoised(model, requests)
    assert relative_error(found, [plain_latents(pipe, request) for request in requests]) <= STEPS
    assert min(relative_error([found[n]], [found[n + 1]]) for n in (0, 1)) > 10 * STEPS


def test_noise_is_drawn_in_float32() -> None:
    pipe = tiny_z_image().to(torch.bfloat16)
    drawn = build_model(pipe, name="tiny").prepare(Request(0, "a hat", SIZE, 2, seed=3)).latents
    generator = torch.Generator().manual_seed(3)
    expected = pipe.prepare_latents(1, 4, SIZE.height, SIZE.width, torch.float32, "cpu", generator)
    assert torch.equal(drawn, expected)


def test_text_longer_than_the_position_ids_is_refused() -> None:
    with pytest.raises(UsageError, match="max_sequence_length is 225, but ZImagePipeline takes 224 at most"):
        served(tiny_z_image(), max_sequence_length=225)
