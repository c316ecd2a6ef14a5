"""Lumina 2: refined image and text in one stream; rotary positions; guided norms."""

from functools import partial
from typing import Any

import torch
from diffusers import Lumina2Pipeline
from torch import Tensor

from ...data.requests import Request
from . import Family
from .geometry import Geometry
from .pipelines import even_sigmas, masked_conditions, masked_text, shift_of, text_length, transformer_family
from .text import own_length
from .transformer import Blocks, Transformer


def call(model: Any, latents: Tensor, timesteps: Tensor, conditions: dict[str, Any]) -> Tensor:
    """Call the model, as a `transformer.Call`."""
    return -model(latents, timestep=1 - timesteps / 1000, return_dict=False, **conditions)[0]


def call_packed(model: Any, patches: Tensor, timesteps: Tensor, conditions: dict[str, Any]) -> Tensor:
    """Call the model with all tokens as an image that is one token wide, as `Transformer.call_packed`."""
    cut = _cut(patches, side := model.config.patch_size)
    image = cut.reshape(1, len(cut), -1, side)
    predicted = call(model, image, timesteps, {**conditions, "encoder_attention_mask": None})
    return predicted.view(cut.shape).permute(1, 0, 2, 4, 3, 5).reshape(patches.shape)


def embed(model: Any, latents: Tensor) -> Tensor:
    """Embed latents as tokens, as `Transformer.embed`."""
    tokens = _cut(latents, model.config.patch_size).permute(1, 2, 3, 4, 5, 0).flatten(3)
    return model.x_embedder(tokens.flatten(0, 2)[None])


def _cut(latents: Tensor, side: int) -> Tensor:
    """[rows, channels, height, width] -> [channels, rows, tokens of a column, tokens of a row, side, side]."""
    rows, channels, height, width = latents.shape
    return latents.view(rows, channels, height // side, side, width // side, side).permute(1, 0, 2, 4, 3, 5)


TRANSFORMER = Transformer(
    call=call,
    call_packed=call_packed,
    layout="one row",
    joint=Blocks(name="noise_refiner", kind="Lumina2TransformerBlock", modulation="norm1.linear"),
    single=Blocks(name="layers", kind="Lumina2TransformerBlock", modulation="norm1.linear"),
    embed=embed,
    mask="encoder_attention_mask",
    attention={"Attention": "Lumina2AttnProcessor2_0"},
    known_classes=frozenset({
        *("Lumina2Transformer2DModel", "Lumina2TransformerBlock", "Lumina2RotaryPosEmbed", "LuminaFeedForward"),
        *("Lumina2CombinedTimestepCaptionEmbedding", "LuminaRMSNormZero", "LuminaLayerNormContinuous", "FP32SiLU"),
    }),
)  # fmt: skip
_MAX_SEQUENCE_LENGTH = 256
"""The default of `Lumina2Pipeline.__call__`."""


def family(pipe: Lumina2Pipeline, *, max_sequence_length: int | None = None) -> Family:
    """Return the family of this pipeline; `max_sequence_length` is that of its text encoder.

    Raises UsageError if the model has too few positions for this length.
    """
    config: Any = pipe.transformer.config
    # The image follows the text, at the next position.
    length = text_length(pipe, max_sequence_length, _MAX_SEQUENCE_LENGTH, most=config.axes_lens[0] - 1)
    return transformer_family(
        pipe,
        latent_channels=config.in_channels,
        max_tokens=min(config.axes_lens[1:]),
        schedule_kwargs=partial(_schedule_kwargs, pipe),
        condition=partial(_condition, pipe, length),
        conditions=partial(masked_conditions, TRANSFORMER),
        guided_norm=partial(torch.linalg.vector_norm, dim=-1, keepdim=True),
    )


def _schedule_kwargs(pipe: Any, geometry: Geometry, request: Request) -> dict[str, Any]:
    # The pipeline uses this in place of the number of tokens.
    return {"mu": shift_of(pipe, 1.15, pipe.transformer.config.in_channels)} | even_sigmas(request)


def _condition(pipe: Any, max_sequence_length: int, request: Request, is_guided: bool) -> dict[str, Tensor]:
    with own_length(pipe.text_encoder):
        text, mask, negative, negative_mask = pipe.encode_prompt(
            request.prompt,
            is_guided,
            negative_prompt=request.negative_prompt,
            device=pipe.transformer.device,
            max_sequence_length=max_sequence_length,
        )
    return masked_text(text, mask, negative, negative_mask)
