"""Stable Diffusion 1.x and 2.x: a U-Net with cross attention to one text encoder (`StableDiffusionPipeline`)."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import StableDiffusionPipeline
from PIL.Image import Image

from ...data.requests import Request
from . import Decode, Family
from .encoder import ImageEncoder
from .unet import guidance_embedding, unet_family


def family(pipe: StableDiffusionPipeline, *, max_sequence_length: int | None = None) -> Family:
    """Return the family of this pipeline. Raises UsageError if `max_sequence_length` is given."""
    encode, scale = ImageEncoder(pipe.vae), pipe.vae.config.scaling_factor
    return unet_family(
        pipe,
        max_sequence_length,
        condition=_condition,
        conditions=_conditions,
        decode=_decode,
        encode=lambda pixels, generator: encode(pixels, generator) * scale,
    )


def _condition(pipe: Any, request: Request, is_guided: bool) -> dict[str, torch.Tensor]:
    text, negative_text = pipe.encode_prompt(
        request.prompt, pipe.unet.device, 1, is_guided, negative_prompt=request.negative_prompt
    )
    guidance = guidance_embedding(pipe, request.guidance_scale, text.dtype)
    return {"text": torch.cat([negative_text, text]) if is_guided else text, **guidance}


def _conditions(conditioning: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {"encoder_hidden_states": conditioning["text"], "timestep_cond": conditioning.get("guidance")}


def _decode(pipe: Any, latents: torch.Tensor, decode: Decode) -> Sequence[Image]:
    latents = latents.to(pipe.vae.dtype)
    image = decode(latents / pipe.vae.config.scaling_factor)
    image, is_unsafe = pipe.run_safety_checker(image, image.device, image.dtype)
    # Images that the checker has blacked out are returned as they are.
    denormalize = [True] * len(image) if is_unsafe is None else [not unsafe for unsafe in is_unsafe]
    return pipe.image_processor.postprocess(image, output_type="pil", do_denormalize=denormalize)
