"""Stable Diffusion 3: a transformer with joint attention over text and image, flow matching."""

from functools import partial
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

from ...data.requests import Request
from . import Family
from .encoder import ImageEncoder
from .flow import decode_shifted, encode_shifted
from .geometry import Geometry
from .table import FAMILIES, token_side
from .transformer import Blocks, Transformer


def call(model: Any, latents: torch.Tensor, timesteps: torch.Tensor, conditions: dict[str, Any]) -> torch.Tensor:
    """See `transformer.Call`."""
    return model(latents, timestep=timesteps, return_dict=False, **conditions)[0]


TRANSFORMER = Transformer(
    call=call,
    joint=Blocks(
        name="transformer_blocks",
        kind="JointTransformerBlock",
        modulation="norm1.linear",
        attention=("attn", "attn2"),  # the second one of SD3.5 is among image tokens only
    ),
    known=frozenset({"PatchEmbed", "SD35AdaLayerNormZeroX", "JointTransformerBlock", "SD3Transformer2DModel"}),
)
# The default of StableDiffusion3Pipeline.__call__.
_MAX_SEQUENCE_LENGTH = 256


def family(pipe: StableDiffusion3Pipeline, *, max_sequence_length: int | None = None) -> Family:
    """Return what serves this pipeline; `max_sequence_length` is of the third (T5) text encoder, present or not."""
    # Any: diffusers annotates attributes as possibly None that never are.
    model: Any = pipe.transformer
    side = token_side(FAMILIES["StableDiffusion3Pipeline"], model.config)
    geometry = Geometry.of_transformer(pipe.vae_scale_factor, side)
    # Positions are cropped from a fixed square of this many transformer patches.
    positions = model.config.pos_embed_max_size
    length = _MAX_SEQUENCE_LENGTH if max_sequence_length is None else max_sequence_length
    return Family(
        geometry=geometry,
        latent_channels=model.config.in_channels,
        max_side=None if positions is None else positions * geometry.size_multiple,
        is_distilled=False,
        scales_noise=False,
        pass_step_kwargs=False,
        schedule_kwargs=partial(_schedule_kwargs, pipe, geometry.size_multiple),
        condition=partial(_condition, pipe, length),
        conditions=_conditions,
        decode=partial(decode_shifted, pipe),
        encode=partial(encode_shifted, pipe.vae.config, ImageEncoder(pipe.vae)),
    )


def _schedule_kwargs(pipe: Any, size_multiple: int, request: Request) -> dict[str, Any]:
    config, resolution = pipe.scheduler.config, request.resolution
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
