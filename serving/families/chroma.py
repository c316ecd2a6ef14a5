"""Chroma: FLUX.1 without pooled text; modulation from a separate network; masked text; true guidance."""

from functools import partial
from typing import Any

from diffusers import ChromaPipeline
from torch import Tensor
from torch.nn import functional as F

from ...data.requests import Request
from . import Family, flux
from .pipelines import even_sigmas_shifted, masked_conditions, masked_text, text_length, transformer_family
from .transformer import Blocks, Transformer


def call(model: Any, latents: Tensor, timesteps: Tensor, conditions: dict[str, Any]) -> Tensor:
    """Call the model, as a `transformer.Call`; the text mask is extended to image tokens, as the model requires."""
    mask = conditions.get("attention_mask")
    if mask is not None:
        num_tokens = latents.shape[2] * latents.shape[3] // 4
        conditions = {**conditions, "attention_mask": F.pad(mask, (0, num_tokens), value=1.0)}
    return flux.call(model, latents, timesteps, conditions)


TRANSFORMER = Transformer(
    call=call,
    joint=Blocks(name="transformer_blocks", kind="ChromaTransformerBlock", modulation="norm1"),
    single=Blocks(name="single_transformer_blocks", kind="ChromaSingleTransformerBlock", modulation="norm"),
    embed=flux.embed,
    image_ids=flux.image_ids,
    # The second one embeds the guidance scale, which is always 0.
    leaves={"norm_out": "rows", "time_text_embed.guidance_proj": "constant"},
    mask="attention_mask",
    adds_mask=True,
    attention={"FluxAttention": "FluxAttnProcessor"},
    known_classes=frozenset({
        *("ChromaTransformer2DModel", "ChromaTransformerBlock", "ChromaSingleTransformerBlock", "FluxPosEmbed"),
        *("ChromaAdaLayerNormZeroPruned", "ChromaAdaLayerNormZeroSinglePruned", "ChromaApproximator"),
        *("ChromaAdaLayerNormContinuousPruned", "ChromaCombinedTimestepTextProjEmbeddings"),
    }),
)  # fmt: skip
_MAX_SEQUENCE_LENGTH = 512
"""The default of `ChromaPipeline.__call__`, and its limit."""


def family(pipe: ChromaPipeline, *, max_sequence_length: int | None = None) -> Family:
    """Return the family of this pipeline; `max_sequence_length` is that of the T5 text encoder.

    Raises UsageError if the length exceeds the pipeline's limit.
    """
    length = text_length(pipe, max_sequence_length, _MAX_SEQUENCE_LENGTH, most=_MAX_SEQUENCE_LENGTH)
    config: Any = pipe.transformer.config
    return transformer_family(
        pipe,
        latent_channels=config.in_channels // 4,
        schedule_kwargs=partial(even_sigmas_shifted, pipe),
        condition=partial(_condition, pipe, length),
        conditions=partial(masked_conditions, TRANSFORMER),
    )


def _condition(pipe: Any, max_sequence_length: int, request: Request, is_guided: bool) -> dict[str, Tensor]:
    text, _, mask, negative, _, negative_mask = pipe.encode_prompt(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        do_classifier_free_guidance=is_guided,
        device=pipe.transformer.device,
        max_sequence_length=max_sequence_length,
    )
    return masked_text(text, mask, negative, negative_mask)
