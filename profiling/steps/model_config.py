"""Configurations of models that are counted and not loaded. This module imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...data.errors import UsageError
from ...data.models.published import PUBLISHED, published_config
from ...serving.models.defaults import read_json
from ...serving.models.loading import resolve_model

TEXT_LENGTH: Mapping[str, int] = {
    "UNet2DConditionModel": 77,
    "SD3Transformer2DModel": 77 + 256,
    "AuraFlowTransformer2DModel": 256,
    "ChromaTransformer2DModel": 512,
    "Flux2Transformer2DModel": 512,
    "FluxTransformer2DModel": 512,
    "OvisImageTransformer2DModel": 256,
    "PixArtTransformer2DModel": 300,
    "QwenImageTransformer2DModel": 512,
}
"""Most text tokens that pipelines take by default, by class of the model; with SD3, those of CLIP and of T5."""


def read_config(spec: str, option: str = "--config") -> dict[str, Any]:
    """Return the configuration that a user names: one of `PUBLISHED`, a JSON file, or a model that `resolve_model`
    finds.

    Errors name it as the value of `option`.

    Raises:
        UsageError: the name is none of these.
        RunError: the file is damaged.
    """
    if spec in PUBLISHED:
        return published_config(spec)
    path = Path(spec).expanduser()
    if path.is_file():
        return read_json(path)
    try:
        folder = resolve_model(spec)
    except UsageError as error:
        raise UsageError(f"{option} {spec} is none of {', '.join(PUBLISHED)}, and no model either: {error}") from None
    found = [file for name in ("unet", "transformer") if (file := folder / name / "config.json").is_file()]
    if not found:
        raise UsageError(f"{option} {spec}: neither unet/config.json nor transformer/config.json is in {folder}")
    return read_json(found[0])
