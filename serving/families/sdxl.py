"""SDXL: a U-Net with cross attention and added time and text conditioning (`StableDiffusionXLPipeline`)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from diffusers import StableDiffusionXLPipeline
from PIL.Image import Image

from ...data.requests import Request
from . import Decode, Family
from .encoder import ImageEncoder
from .unet import guidance_embedding, unet_family


def family(pipe: StableDiffusionXLPipeline, *, max_sequence_length: int | None = None) -> Family:
    """Return the family of this pipeline. Raises UsageError if `max_sequence_length` is given."""
    found = unet_family(
        pipe,
        max_sequence_length,
        condition=_condition,
        conditions=_conditions,
        decode=_decode,
        encode=partial(_encode, pipe.vae.config, ImageEncoder(pipe.vae, upcasts=pipe.vae.config.force_upcast)),
    )
    if pipe.vae.dtype == torch.float16 and pipe.vae.config.force_upcast:
        # The pipeline casts such an autoencoder to float32 and back for each image, because it overflows in float16.
        # The weights keep their values if it stays in float32.
        pipe.vae.to(dtype=torch.float32)
    return found


def _condition(pipe: Any, request: Request, is_guided: bool) -> dict[str, torch.Tensor]:
    device = pipe.unet.device
    text, negative_text, pooled, negative_pooled = pipe.encode_prompt(
        prompt=request.prompt,
        device=device,
        do_classifier_free_guidance=is_guided,
        negative_prompt=request.negative_prompt,
    )
    encoder = pipe.text_encoder_2
    projection_dim = int(pooled.shape[-1]) if encoder is None else encoder.config.projection_dim
    size = (request.resolution.height, request.resolution.width)
    time_ids = pipe._get_add_time_ids(size, (0, 0), size, dtype=text.dtype, text_encoder_projection_dim=projection_dim)
    time_ids = time_ids.to(device)
    if is_guided:
        text = torch.cat([negative_text, text])
        pooled = torch.cat([negative_pooled, pooled])
        time_ids = time_ids.repeat(2, 1)
    guidance = guidance_embedding(pipe, request.guidance_scale, text.dtype)
    return {"text": text.to(device), "pooled": pooled.to(device), "time_ids": time_ids, **guidance}


def _conditions(conditioning: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        "encoder_hidden_states": conditioning["text"],
        "timestep_cond": conditioning.get("guidance"),
        "added_cond_kwargs": {"text_embeds": conditioning["pooled"], "time_ids": conditioning["time_ids"]},
    }


def _decode(pipe: Any, latents: torch.Tensor, decode: Decode) -> Sequence[Image]:
    latents = latents.to(pipe.vae.dtype)
    mean, std = _moments(pipe.vae.config, latents)
    latents = latents * std / pipe.vae.config.scaling_factor + mean
    image = decode(latents)
    if pipe.watermark is not None:
        image = pipe.watermark.apply_watermark(image)
    return pipe.image_processor.postprocess(image, output_type="pil")


def _encode(config: Any, encode: ImageEncoder, pixels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    # The inpainting pipeline omits mean and deviation here, although it decodes with them; the area that an edit keeps
    # would change with models that have them.
    latents = encode(pixels, generator)
    mean, std = _moments(config, latents)
    return (latents - mean) / std * config.scaling_factor


def _moments(config: Any, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and standard deviation of the autoencoder's latents, (1, channels, 1, 1); by default 0 and 1."""
    mean, std = getattr(config, "latents_mean", None), getattr(config, "latents_std", None)
    if mean is None or std is None:
        mean, std = [0.0], [1.0]
    return latents.new_tensor(mean)[None, :, None, None], latents.new_tensor(std)[None, :, None, None]
