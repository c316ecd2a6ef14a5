"""PixArt-Sigma: cross attention to masked text; one modulation for all blocks; positions computed for each size."""

from functools import partial
from typing import Any

from diffusers import PixArtSigmaPipeline
from diffusers.models.embeddings import get_2d_sincos_pos_embed
from torch import Tensor

from ...data.errors import UsageError
from ...data.requests import Request
from . import Family
from .pipelines import masked_conditions, masked_text, text_length, transformer_family
from .text import own_length
from .transformer import Blocks, Transformer


def call(model: Any, latents: Tensor, timesteps: Tensor, conditions: dict[str, Any]) -> Tensor:
    """Call the model, as a `transformer.Call`; channels that predict the variance are dropped."""
    predicted = model(latents, timestep=timesteps, return_dict=False, **conditions)[0]
    return predicted[:, : latents.shape[1]] if predicted.shape[1] == 2 * latents.shape[1] else predicted


def positions(embed: Any, height: int, width: int) -> Tensor:
    """Return the positions of `PatchEmbed`, as `Transformer.positions`, recomputed unless for the training size."""
    if (height, width) == (embed.height, embed.width):
        return embed.pos_embed[0]
    return get_2d_sincos_pos_embed(
        embed.pos_embed.shape[-1],
        (height, width),
        base_size=embed.base_size,
        interpolation_scale=embed.interpolation_scale,
        device=embed.pos_embed.device,
        output_type="pt",
    ).float()


TRANSFORMER = Transformer(
    call=call,
    joint=Blocks(
        name="transformer_blocks", kind="BasicTransformerBlock", modulation=None, attention=("attn1", "attn2")
    ),
    positions=positions,
    leaves={"adaln_single": "results", "caption_projection": "caption"},
    mask="encoder_attention_mask",
    known_classes=frozenset({
        *("PixArtTransformer2DModel", "PatchEmbed", "AdaLayerNormSingle", "PixArtAlphaCombinedTimestepSizeEmbeddings"),
    }),
)  # fmt: skip
_MAX_SEQUENCE_LENGTH = 300
"""The default of `PixArtSigmaPipeline.__call__`."""


def family(pipe: PixArtSigmaPipeline, *, max_sequence_length: int | None = None) -> Family:
    """Return the family of this pipeline; `max_sequence_length` is that of the T5 text encoder.

    Raises UsageError if the model requires the size of the image as a condition (PixArt-Alpha).
    """
    model: Any = pipe.transformer
    if model.use_additional_conditions:
        raise UsageError("the transformer has use_additional_conditions, which PixArtSigmaPipeline gives nothing to")
    return transformer_family(
        pipe,
        latent_channels=model.config.in_channels,
        condition=partial(_condition, pipe, text_length(pipe, max_sequence_length, _MAX_SEQUENCE_LENGTH)),
        conditions=partial(masked_conditions, TRANSFORMER),
        is_flow=False,
    )


def _condition(pipe: Any, max_sequence_length: int, request: Request, is_guided: bool) -> dict[str, Tensor]:
    with own_length(pipe.text_encoder):
        text, mask, negative, negative_mask = pipe.encode_prompt(
            request.prompt,
            is_guided,
            negative_prompt=request.negative_prompt or "",
            device=pipe.transformer.device,
            clean_caption=True,  # the default of the pipeline's own call
            max_sequence_length=max_sequence_length,
        )
    return masked_text(text, mask, negative, negative_mask)
