"""Stable Diffusion 3: a transformer with joint attention over text and image, flow matching."""

from functools import partial
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline

from ...data.requests import Request
from . import Family
from .geometry import Geometry
from .pipelines import shift_by_size, text_length, transformer_family
from .transformer import Blocks, Transformer


def call(model: Any, latents: torch.Tensor, timesteps: torch.Tensor, conditions: dict[str, Any]) -> torch.Tensor:
    """Call the model, as a `transformer.Call`."""
    return model(latents, timestep=timesteps, return_dict=False, **conditions)[0]


TRANSFORMER = Transformer(
    call=call,
    joint=Blocks(
        name="transformer_blocks",
        kind="JointTransformerBlock",
        modulation="norm1.linear",
        attention=("attn", "attn2"),  # the second one, in SD3.5, covers image tokens only
    ),
    attention={"Attention": "JointAttnProcessor2_0"},
    known_classes=frozenset({"PatchEmbed", "SD35AdaLayerNormZeroX", "JointTransformerBlock", "SD3Transformer2DModel"}),
)
# The default of StableDiffusion3Pipeline.__call__.
_MAX_SEQUENCE_LENGTH = 256


def family(pipe: StableDiffusion3Pipeline, *, max_sequence_length: int | None = None) -> Family:
    """Return the family of this pipeline; `max_sequence_length` is that of the third (T5) encoder, present or not."""
    # Any: diffusers annotates attributes as possibly None that never are.
    config: Any = pipe.transformer.config  # type: ignore[union-attr]
    return transformer_family(
        pipe,
        latent_channels=config.in_channels,
        max_tokens=config.pos_embed_max_size,  # positions are cropped from a fixed square of this side
        schedule_kwargs=partial(_schedule_kwargs, pipe),
        condition=partial(_condition, pipe, text_length(pipe, max_sequence_length, _MAX_SEQUENCE_LENGTH)),
        conditions=_conditions,
    )


def _schedule_kwargs(pipe: Any, geometry: Geometry, request: Request) -> dict[str, Any]:
    is_shifted = pipe.scheduler.config.get("use_dynamic_shifting", None)
    return shift_by_size(pipe, 1.16, geometry, request) if is_shifted else {}


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
