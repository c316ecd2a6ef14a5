"""Tiny pipelines with adapters that each request of a batch chooses."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from patchedserve.data.adapters import Adapters
from patchedserve.data.requests import Request
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions, ModelOptions, QuantizeName

from .family_kit import BUILDS, mixed
from .loras import save_lora
from .plain import short_texts
from .tiny_models import save_tiny

LAYERS = {
    "unet": r".*\.(to_[qkv]|to_out\.0|proj_in|proj_out|net\.0\.proj|net\.2|conv1|conv|conv_shortcut|time_emb_proj)",
    "transformer": "all-linear",
}
EACH: tuple[Adapters, ...] = ((("pixel", 1.0),), (), (("toy", -0.7),), (("pixel", 0.5), ("toy", 0.8)))


def saved(name: str, folder: Path) -> tuple[Any, dict[str, Path], Path]:
    """Save a tiny pipeline and two adapters of nearly all its layers; return pipeline, adapters and model folder."""
    pipe = BUILDS[name]()
    if "processor" in pipe.components:
        pytest.importorskip("torchvision", reason=f"a saved {name} is loaded with it only")
    part = "unet" if hasattr(pipe, "unet") else "transformer"
    texts = ["text_encoder"] if name in ("sd", "sdxl") else []
    loras = {
        "pixel": save_lora(folder / "pixel.safetensors", pipe, part, *texts, layers=LAYERS[part]),
        "toy": save_lora(folder / "toy.safetensors", pipe, part, seed=1),
    }
    return pipe, loras, save_tiny(folder / "model", pipe, **short_texts(pipe))


def serving(
    folder: Path,
    loras: dict[str, Path],
    *,
    device: str = "cpu",
    quantize: QuantizeName | None = None,
    **options: Any,
) -> ServedModel:
    """Load a saved pipeline with its adapters."""
    given = ModelOptions(adapter=[f"{name}={path}" for name, path in loras.items()], quantize=quantize)
    return load_model(str(folder), device, "float32", EngineOptions(**options, model=given))


def adapted(num_steps: Sequence[int], each: Sequence[Adapters] = EACH) -> list[Request]:
    """Return four requests that differ in everything, with these numbers of steps and these adapters."""
    return [replace(request, adapters=own) for request, own in zip(mixed(num_steps), each, strict=True)]
