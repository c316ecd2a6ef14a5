"""AuraFlow: joint blocks, then single-stream blocks; learnt positions; register tokens ahead of the text."""

from functools import partial
from typing import Any

import torch
from diffusers import AuraFlowPipeline
from torch import Tensor

from ...data.requests import Request
from . import Family
from .pipelines import text_length, transformer_family
from .text import own_length
from .transformer import Blocks, Transformer


def call(model: Any, latents: Tensor, timesteps: Tensor, conditions: dict[str, Any]) -> Tensor:
    """Call the model, as a `transformer.Call`."""
    return model(latents, timestep=(timesteps / 1000).to(latents.dtype), return_dict=False, **conditions)[0]


def positions(embed: Any, height: int, width: int) -> Tensor:
    """Return the positions in the middle of a fixed square, as `Transformer.positions`."""
    chosen = embed.pe_selection_index_based_on_dim(height * embed.patch_size, width * embed.patch_size)
    return embed.pos_embed[0, chosen]


TRANSFORMER = Transformer(
    call=call,
    joint=Blocks(name="joint_transformer_blocks", kind="AuraFlowJointTransformerBlock", modulation="norm1.linear"),
    single=Blocks(name="single_transformer_blocks", kind="AuraFlowSingleTransformerBlock", modulation="norm1.linear"),
    positions=positions,
    attention={"Attention": "AuraFlowAttnProcessor2_0"},
    known_classes=frozenset({
        *("AuraFlowTransformer2DModel", "AuraFlowJointTransformerBlock", "AuraFlowSingleTransformerBlock"),
        *("AuraFlowPatchEmbed", "AuraFlowFeedForward", "AuraFlowPreFinalBlock"),
    }),
)  # fmt: skip
_MAX_SEQUENCE_LENGTH = 256
"""The default of `AuraFlowPipeline.__call__`."""


def family(pipe: AuraFlowPipeline, *, max_sequence_length: int | None = None) -> Family:
    """Return the family of this pipeline; `max_sequence_length` is that of its text encoder."""
    config: Any = pipe.transformer.config
    if pipe.vae.dtype == torch.float16 and pipe.vae.config.force_upcast:
        pipe.vae.to(dtype=torch.float32)  # as the pipeline does at its first image
    return transformer_family(
        pipe,
        latent_channels=config.in_channels,
        max_tokens=int(config.pos_embed_max_size**0.5),
        condition=partial(_condition, pipe, text_length(pipe, max_sequence_length, _MAX_SEQUENCE_LENGTH)),
        conditions=lambda conditioning: {"encoder_hidden_states": conditioning["text"]},
    )


def _condition(pipe: Any, max_sequence_length: int, request: Request, is_guided: bool) -> dict[str, Tensor]:
    # Padding is zero and takes part in attention, so no mask is needed from here on.
    with own_length(pipe.text_encoder):
        text, _, negative, _ = pipe.encode_prompt(
            prompt=request.prompt,
            negative_prompt=request.negative_prompt,
            do_classifier_free_guidance=is_guided,
            device=pipe.transformer.device,
            max_sequence_length=max_sequence_length,
        )
    return {"text": torch.cat([negative, text]) if is_guided else text}
