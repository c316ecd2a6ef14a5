"""Ranks change and adapt the weights that they load as rank 0 does."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import HeunDiscreteScheduler

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.core.denoiser import denoiser_of
from patchedserve.serving.core.float8 import convert_to_float8
from patchedserve.serving.models.changes import apply_changes
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.options import EngineOptions, ModelOptions
from patchedserve.serving.parallel.options import ParallelOptions
from patchedserve.serving.parallel.stepper import ParallelStepper

from ...support.family_kit import denoised
from ...support.patched_models import relative_error
from ...support.plain import plain_latents
from ...support.tiny_families import tiny_aura
from ...support.tiny_models import largest_error, save_tiny, tiny_sdxl

pytestmark = pytest.mark.slow


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("make", "changes"),
    [
        pytest.param(tiny_sdxl, {"sampler": "heun", "lora": ["style.safetensors:0.7"]}, id="sdxl"),
        pytest.param(tiny_aura, {"quantize": "int8"}, id="aura"),
        pytest.param(tiny_aura, {"quantize": "fp8"}, id="aura-fp8"),
    ],
)
def test_ranks_change_their_weights_alike(
    make: Any, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samplers, fused adapters, also those with parts for text encoders, and quantised weights."""
    monkeypatch.chdir(tmp_path)
    pipe = make()
    folder = str(save_tiny(tmp_path / "model", pipe))
    request = Request(0, "a hat", Resolution(48, 64), 3, guidance_scale=3.0)
    options = EngineOptions("parallel", parallel=ParallelOptions("2", cfg_split="off"), model=ModelOptions(**changes))
    if "lora" in changes:
        pytest.importorskip("peft", reason="the extra lora is not installed")
        from ...support.loras import fused, save_lora

        pipe = fused(pipe, [(save_lora(tmp_path / "style.safetensors", pipe, "unet", "text_encoder"), 0.7)])
    most_error = 1e-3
    if changes.get("quantize") == "int8":
        pytest.importorskip("torchao", reason="the extra quantize is not installed")
        apply_changes(ModelOptions(**changes), pipe)
    if changes.get("quantize") == "fp8":
        # A difference in the last bit of float32 rounds some inputs to other numbers of 8 bits.
        most_error = largest_error([plain_latents(pipe, request)], [_in_float8(pipe, request)])
    if "sampler" in changes:
        pipe.scheduler = HeunDiscreteScheduler.from_config(pipe.scheduler.config)
    with closing(load_model(folder, "cpu", "float32", options)) as model:
        prepared = model.prepare(request)
        while not prepared.state.is_finished:
            assert model.stepper.step([prepared]) == {}
        assert isinstance(model.stepper, ParallelStepper)
        assert model.stepper.facts()["ranks_left"] == 2
    assert largest_error([prepared.latents[0]], [plain_latents(pipe, request)]) <= most_error


@pytest.mark.exhaustive
def test_ranks_load_the_adapters_that_requests_name(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the extra lora is not installed")
    from ...support.adapters import adapted, saved, serving
    from ...support.loras import alone

    pipe, loras, folder = saved("sdxl", tmp_path)
    requests = adapted([2] * 4)
    options = ParallelOptions("2", may_use_fewer=True)
    with closing(serving(folder, loras, engine="parallel", parallel=options)) as model:
        assert relative_error(denoised(model, requests), alone(pipe, loras, requests)) <= 1e-3
        assert isinstance(model.stepper, ParallelStepper)
        assert model.stepper.facts()["ranks_left"] == 2


def _in_float8(pipe: Any, request: Request) -> torch.Tensor:
    """Let the model of a pipeline multiply in 8 bits from now on; return the latents that it then draws."""
    assert convert_to_float8(denoiser_of(pipe)) > 10
    return plain_latents(pipe, request)
