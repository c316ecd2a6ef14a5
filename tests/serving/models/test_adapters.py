"""Adapters that requests name: a batch that mixes them equals diffusers with each request's own adapters set."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from patchedserve.data.requests import Adapters, Request
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions, ModelOptions

from ...support.family_kit import BUILDS, PASS, STEPS, denoised, mixed
from ...support.patched_models import relative_error
from ...support.tiny_models import save_tiny

pytest.importorskip("peft", reason="the extra lora is not installed")
from ...support.loras import alone, save_lora

LAYERS = {
    "unet": r".*\.(to_[qkv]|to_out\.0|proj_in|proj_out|net\.0\.proj|net\.2|conv1|conv|conv_shortcut|time_emb_proj)",
    "transformer": "all-linear",
}
EACH: tuple[Adapters, ...] = ((("pixel", 1.0),), (), (("toy", -0.7),), (("pixel", 0.5), ("toy", 0.8)))


def saved(name: str, folder: Path) -> tuple[Any, dict[str, Path], Path]:
    """A tiny pipeline, two adapters of nearly all its layers, and its folder."""
    pipe = BUILDS[name]()
    part = "unet" if hasattr(pipe, "unet") else "transformer"
    texts = ["text_encoder"] if name in ("sd", "sdxl") else []
    loras = {
        "pixel": save_lora(folder / "pixel.safetensors", pipe, part, *texts, layers=LAYERS[part]),
        "toy": save_lora(folder / "toy.safetensors", pipe, part, seed=1),
    }
    return pipe, loras, save_tiny(folder / "model", pipe)


def serving(folder: Path, loras: dict[str, Path], **options: Any) -> ServedModel:
    given = ModelOptions(adapter=[f"{name}={path}" for name, path in loras.items()])
    return load_model(str(folder), "cpu", "float32", EngineOptions(**options, model=given))


def adapted(num_steps: Sequence[int], each: Sequence[Adapters] = EACH) -> list[Request]:
    return [replace(request, adapters=own) for request, own in zip(mixed(num_steps), each, strict=True)]


_SLOW = [name for name in BUILDS if name not in ("sd", "sd3", "flux")]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in _SLOW else []) for n in BUILDS])
def test_a_batch_mixes_adapters(name: str, tmp_path: Path) -> None:
    pipe, loras, folder = saved(name, tmp_path)
    one, few = adapted([1] * 4), adapted([6, 2, 3, 4])
    expected, expected_few = alone(pipe, loras, one), alone(pipe, {}, few)
    for options in ({"order": "image"}, {"order": "patch", "strategy": "stitch"}, {"engine": "plain"}):
        model = serving(folder, loras, **options)
        found, base = denoised(model, one), denoised(model, mixed([1] * 4))
        assert relative_error(found, expected) <= PASS, options
        for request, own, without in zip(one, found, base, strict=True):
            if request.adapters:
                assert relative_error([own], [without]) > 100 * PASS, "the adapters change the image"
            else:
                assert torch.equal(own, without), "who shares the batch changes nothing"
        assert relative_error(denoised(model, few, joins=[0, 1, 2, 2]), expected_few) <= STEPS, options
