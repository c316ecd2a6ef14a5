"""Stable Diffusion 3: a transformer with joint attention over text and image, flow matching."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift
from PIL.Image import Image

from ....data.requests import Request
from ....data.resolution import Resolution
from ...editing.start import ImageEncoder
from ..geometry import Geometry
from . import Decode, Family

# The default of StableDiffusion3Pipeline.__call__.
_MAX_SEQUENCE_LENGTH = 256


def family(pipe: StableDiffusion3Pipeline, *, max_sequence_length: int | None = None) -> Family:
    """Return what serves this pipeline; `max_sequence_length` is of the third (T5) text encoder, present or not."""
    geometry = Geometry.of_transformer(pipe.vae_scale_factor, pipe.patch_size)
    # Any: diffusers annotates attributes as possibly None that never are.
    model: Any = pipe.transformer
    # Positions are cropped from a fixed square of this many transformer patches.
    positions = model.config.pos_embed_max_size
    length = _MAX_SEQUENCE_LENGTH if max_sequence_length is None else max_sequence_length
    return Family(
        geometry=geometry,
        max_side=None if positions is None else positions * geometry.size_multiple,
        embeds_guidance=False,
        scales_noise=False,
        pass_step_kwargs=False,
        schedule_kwargs=partial(_schedule_kwargs, pipe, geometry.size_multiple),
        condition=partial(_condition, pipe, length),
        conditions=_conditions,
        decode=partial(_decode, pipe),
        encode=partial(_encode, pipe.vae.config, ImageEncoder(pipe.vae)),
    )


def _schedule_kwargs(pipe: Any, size_multiple: int, resolution: Resolution) -> dict[str, Any]:
    config = pipe.scheduler.config
    if not config.get("use_dynamic_shifting", None):
        return {}
    mu = calculate_shift(
        (resolution.height // size_multiple) * (resolution.width // size_multiple),
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", 1.16),
    )
    return {"mu": mu}


def _condition(pipe: Any, max_sequence_length: int, request: Request, is_guided: bool) -> dict[str, torch.Tensor]:
    text, negative_text, pooled, negative_pooled = pipe.encode_prompt(
        prompt=request.prompt,
        prompt_2=None,  # as the first
        prompt_3=None,
        device=pipe.transformer.device,
        do_classifier_free_guidance=is_guided,
        negative_prompt=request.negative_prompt,
        max_sequence_length=max_sequence_length,
    )
    if is_guided:
        text = torch.cat([negative_text, text])
        pooled = torch.cat([negative_pooled, pooled])
    return {"text": text, "pooled": pooled}


def _conditions(conditioning: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {"encoder_hidden_states": conditioning["text"], "pooled_projections": conditioning["pooled"]}


def _decode(pipe: Any, latents: torch.Tensor, decode: Decode) -> Sequence[Image]:
    config = pipe.vae.config
    image = decode((latents / config.scaling_factor) + config.shift_factor)
    return pipe.image_processor.postprocess(image, output_type="pil")


def _encode(config: Any, encode: ImageEncoder, pixels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return (encode(pixels, generator) - config.shift_factor) * config.scaling_factor
