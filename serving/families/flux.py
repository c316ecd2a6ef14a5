"""FLUX.1: joint blocks, then single-stream blocks; rotary positions; distilled guidance (an input of dev)."""

from functools import partial
from typing import Any

import torch
from diffusers import FluxKontextPipeline, FluxPipeline
from torch import Tensor

from ...data.requests import Request
from . import Family
from .pipelines import even_sigmas_shifted_unless_own, text_length, transformer_family, with_references
from .transformer import Blocks, Transformer


def image_ids(height: int, width: int, like: Tensor) -> Tensor:
    """Return the position ids of an image's tokens, (height * width, 3), as in `FluxPipeline`: 0, row, column."""
    rows, columns = (torch.arange(count, dtype=like.dtype, device=like.device) for count in (height, width))
    return torch.cartesian_prod(rows.new_zeros(1), rows, columns)


def reference_ids(number: int, height: int, width: int, like: Tensor) -> Tensor:
    """Return the position ids of a reference's tokens, as in `FluxKontextPipeline`: 1, row, column."""
    assert number == 0, "the pipeline takes one reference"
    ids = image_ids(height, width, like)
    ids[:, 0] = 1
    return ids


def call(
    model: Any, latents: Tensor, timesteps: Tensor, conditions: dict[str, Any], text_ids: Tensor | None = None
) -> Tensor:
    """Call the model on packed latents, 2 x 2 of which are one token, as a `transformer.Call`. The position ids of text
    are zeros unless they are given.
    """
    height, width = latents.shape[2:]
    text = conditions["encoder_hidden_states"]
    tokens, ids, others = with_references(TRANSFORMER, _tokens_of, latents, conditions, side=2)
    predicted = model(
        tokens,
        timestep=timesteps.to(latents.dtype) / 1000,
        img_ids=ids,
        txt_ids=text.new_zeros(text.shape[1], 3) if text_ids is None else text_ids,
        return_dict=False,
        **others,
    )[0]
    drawn = predicted[:, : height * width // 4]
    return FluxPipeline._unpack_latents(drawn, height, width, vae_scale_factor=1)


def _tokens_of(latents: Tensor) -> Tensor:
    """[rows, channels, height, width] -> [rows, tokens, 4 * channels]."""
    return FluxPipeline._pack_latents(latents, *latents.shape)


def embed(model: Any, latents: Tensor) -> Tensor:
    """Embed latents as tokens, as `Transformer.embed`."""
    return model.x_embedder(_tokens_of(latents))


TRANSFORMER = Transformer(
    call=call,
    joint=Blocks(name="transformer_blocks", kind="FluxTransformerBlock", modulation="norm1.linear"),
    single=Blocks(name="single_transformer_blocks", kind="FluxSingleTransformerBlock", modulation="norm.linear"),
    embed=embed,
    image_ids=image_ids,
    reference_ids=reference_ids,
    attention={"FluxAttention": "FluxAttnProcessor"},
    known_classes=frozenset({
        *("FluxTransformer2DModel", "FluxTransformerBlock", "FluxSingleTransformerBlock"),
        *("FluxPosEmbed", "AdaLayerNormZeroSingle", "CombinedTimestepGuidanceTextProjEmbeddings"),
    }),
)  # fmt: skip
_MAX_SEQUENCE_LENGTH = 512
"""The default of `FluxPipeline.__call__`, and its limit."""


def family(pipe: FluxPipeline | FluxKontextPipeline, *, max_sequence_length: int | None = None) -> Family:
    """Return the family of this pipeline; `max_sequence_length` is that of the T5 text encoder.

    Raises UsageError if the length exceeds the pipeline's limit.
    """
    length = text_length(pipe, max_sequence_length, _MAX_SEQUENCE_LENGTH, most=_MAX_SEQUENCE_LENGTH)
    return transformer_family(
        pipe,
        latent_channels=pipe.transformer.config.in_channels // 4,  # type: ignore[union-attr]  it has a transformer
        is_distilled=True,
        schedule_kwargs=partial(even_sigmas_shifted_unless_own, pipe),
        condition=partial(_condition, pipe, length),
        conditions=_conditions,
        encodes_modes=isinstance(pipe, FluxKontextPipeline),
    )


def _condition(pipe: Any, max_sequence_length: int, request: Request, is_guided: bool) -> dict[str, Tensor]:
    assert not is_guided, "guidance is learnt"
    text, pooled, _ = pipe.encode_prompt(
        prompt=request.prompt,
        prompt_2=None,  # as the first
        device=pipe.transformer.device,
        max_sequence_length=max_sequence_length,
    )
    if not pipe.transformer.config.guidance_embeds:
        return {"text": text, "pooled": pooled}
    guidance = torch.full([1], request.guidance_scale, device=text.device, dtype=torch.float32)
    return {"text": text, "pooled": pooled, "guidance": guidance}


def _conditions(conditioning: dict[str, Tensor]) -> dict[str, Any]:
    return {
        "encoder_hidden_states": conditioning["text"],
        "pooled_projections": conditioning["pooled"],
        "guidance": conditioning.get("guidance"),
    }
