"""Ovis-Image: FLUX.1's blocks with text at positions of its own, and true guidance."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from diffusers import OvisImagePipeline
from torch import Tensor

from ...data.requests import Request
from . import Family, flux
from .pipelines import even_sigmas_shifted_unless_own, text_length, transformer_family
from .transformer import Blocks, Transformer


def text_ids(length: int, device: torch.device) -> Tensor:
    """Return the position ids of a text's tokens, (length, 3): 0, place, place."""
    places = torch.arange(length, device=device, dtype=torch.float32)
    return torch.stack([torch.zeros_like(places), places, places], 1)


def call(model: Any, latents: Tensor, timesteps: Tensor, conditions: dict[str, Any]) -> Tensor:
    """Call the model, as a `transformer.Call`."""
    text = conditions["encoder_hidden_states"]
    return flux.call(model, latents, timesteps, conditions, text_ids(text.shape[1], text.device).to(text.dtype))


def joint_angles(
    embed: Any, sizes: Sequence[tuple[int, int]], length: int, device: torch.device
) -> tuple[Sequence[Tensor], Tensor]:
    """Return the rotary angles of an image and its text, as `Transformer.joint_angles`."""
    text = text_ids(length, device)
    cosines, sines = embed(torch.cat([text, *(flux.image_ids(*size, text) for size in sizes)]))
    # Each angle comes twice, for the two channels that it turns.
    angles = torch.complex(cosines[:, ::2].contiguous(), sines[:, ::2].contiguous())
    of_text, *of_images = angles.split([length, *(height * width for height, width in sizes)])
    return of_images, of_text


TRANSFORMER = Transformer(
    call=call,
    joint=Blocks(name="transformer_blocks", kind="OvisImageTransformerBlock", modulation="norm1.linear"),
    single=Blocks(name="single_transformer_blocks", kind="OvisImageSingleTransformerBlock", modulation="norm.linear"),
    embed=flux.embed,
    joint_angles=joint_angles,
    attention={"OvisImageAttention": "OvisImageAttnProcessor"},
    known_classes=frozenset({
        *("OvisImageTransformer2DModel", "OvisImageTransformerBlock", "OvisImageSingleTransformerBlock", "SwiGLU"),
        *("OvisImagePosEmbed", "AdaLayerNormZeroSingle"),
    }),
)  # fmt: skip
_MAX_SEQUENCE_LENGTH = 256
"""The default of `OvisImagePipeline.__call__`, and its limit."""


def family(pipe: OvisImagePipeline, *, max_sequence_length: int | None = None) -> Family:
    """Return the family of this pipeline; `max_sequence_length` is that of its text encoder.

    Raises UsageError if the length exceeds the pipeline's limit.
    """
    length = text_length(pipe, max_sequence_length, _MAX_SEQUENCE_LENGTH, most=_MAX_SEQUENCE_LENGTH)
    config: Any = pipe.transformer.config
    return transformer_family(
        pipe,
        latent_channels=config.in_channels // 4,
        schedule_kwargs=partial(even_sigmas_shifted_unless_own, pipe),
        condition=partial(_condition, pipe, length),
        conditions=lambda conditioning: {"encoder_hidden_states": conditioning["text"]},
    )


def _condition(pipe: Any, max_sequence_length: int, request: Request, is_guided: bool) -> dict[str, Tensor]:
    text, negative, *_ = pipe.encode_prompt(
        request.prompt,
        request.negative_prompt,
        do_classifier_free_guidance=is_guided,
        device=pipe.transformer.device,
        max_sequence_length=max_sequence_length,
    )
    return {"text": torch.cat([negative, text]) if is_guided else text}
