"""Qwen-Image: joint blocks; rotary positions of text after those of the image; guided norms; a video autoencoder."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers import QwenImagePipeline
from PIL.Image import Image
from torch import Tensor

from ...data.errors import UsageError
from ...data.requests import Request
from . import Decode, Family
from .encoder import ImageEncoder
from .pipelines import even_sigmas_shifted, masked_conditions, masked_text, text_length, transformer_family
from .transformer import Blocks, Transformer


def call(model: Any, latents: Tensor, timesteps: Tensor, conditions: dict[str, Any]) -> Tensor:
    """Call the model on packed latents, as a `transformer.Call`."""
    count, _, height, width = latents.shape
    predicted = model(
        QwenImagePipeline._pack_latents(latents, *latents.shape),
        timestep=timesteps.to(latents.dtype) / 1000,
        img_shapes=[[(1, height // 2, width // 2)]] * count,
        return_dict=False,
        **conditions,
    )[0]
    return QwenImagePipeline._unpack_latents(predicted, height, width, vae_scale_factor=1)[:, :, 0]


def joint_angles(embed: Any, height: int, width: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the rotary angles of image and text, as `Transformer.joint_angles`."""
    return embed([(1, height, width)], max_txt_seq_len=length, device=device)


TRANSFORMER = Transformer(
    call=call,
    joint=Blocks(name="transformer_blocks", kind="QwenImageTransformerBlock", modulation="img_mod.1"),
    embed=lambda model, latents: model.img_in(QwenImagePipeline._pack_latents(latents, *latents.shape)),
    joint_angles=joint_angles,
    mask="encoder_hidden_states_mask",
    attention={"Attention": "QwenDoubleStreamAttnProcessor2_0"},
    known_classes=frozenset({
        *("QwenImageTransformer2DModel", "QwenImageTransformerBlock", "QwenEmbedRope", "QwenTimestepProjEmbeddings"),
    }),
)  # fmt: skip
_MAX_SEQUENCE_LENGTH = 512
"""The default of `QwenImagePipeline.__call__`."""
_MOST = 1024
"""The limit of the pipeline."""


def family(pipe: QwenImagePipeline, *, max_sequence_length: int | None = None) -> Family:
    """Return the family of this pipeline; `max_sequence_length` is that of its text encoder.

    Raises UsageError if the length exceeds the pipeline's limit, or if the model requires other conditions.
    """
    config: Any = pipe.transformer.config
    for name in ("guidance_embeds", "zero_cond_t", "use_additional_t_cond"):
        if config.get(name):
            raise UsageError(f"the transformer has {name}, which text-to-image models of QwenImagePipeline do not have")
    length = text_length(pipe, max_sequence_length, _MAX_SEQUENCE_LENGTH, most=_MOST)
    return replace(
        transformer_family(
            pipe,
            latent_channels=config.in_channels // 4,
            schedule_kwargs=partial(even_sigmas_shifted, pipe),
            condition=partial(_condition, pipe, length),
            conditions=partial(masked_conditions, TRANSFORMER),
            guided_norm=_token_norm,
        ),
        decode=partial(_decode, pipe),
        encode=partial(_encode, pipe.vae.config, ImageEncoder(pipe.vae)),
    )


def _condition(pipe: Any, max_sequence_length: int, request: Request, is_guided: bool) -> dict[str, Tensor]:
    def encoded(prompt: str) -> tuple[Tensor, Tensor]:
        # Prompts are encoded separately, as in the pipeline; all tokens of a single prompt are valid, so the pipeline
        # returns no mask.
        text = pipe.encode_prompt(prompt, device=pipe.transformer.device, max_sequence_length=max_sequence_length)[0]
        return text, text.new_ones(text.shape[:2], dtype=torch.long)

    negative = encoded(request.negative_prompt or "") if is_guided else (None, None)
    return masked_text(*encoded(request.prompt), *negative)


def _token_norm(image: Tensor) -> Tensor:
    channels, height, width = image.shape
    norms = image.view(channels, height // 2, 2, width // 2, 2).square().sum((0, 2, 4)).sqrt()
    return norms.repeat_interleave(2, 0).repeat_interleave(2, 1)


def _decode(pipe: Any, latents: Tensor, decode: Decode) -> Sequence[Image]:
    mean, std = _statistics(pipe.vae.config, latents)
    frames = decode((latents.to(pipe.vae.dtype) * std + mean)[:, :, None])
    return pipe.image_processor.postprocess(frames[:, :, 0], output_type="pil")


def _encode(config: Any, encode: ImageEncoder, pixels: Tensor, generator: torch.Generator) -> Tensor:
    latents = encode(pixels[:, :, None], generator)[:, :, 0]
    mean, std = _statistics(config, latents)
    return (latents - mean) / std


def _statistics(config: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel of the autoencoder's latents, (1, channels, 1, 1)."""
    mean, std = (like.new_tensor(values).view(1, -1, 1, 1) for values in (config.latents_mean, config.latents_std))
    return mean, std
