"""Qwen-Image: joint blocks; rotary positions of text after those of the image; guided norms; a video autoencoder.

The text encoder of Qwen-Image-Edit sees the references, too, and their tokens follow those of the image.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline, QwenImagePipeline
from PIL.Image import Image
from PIL.Image import fromarray as as_image
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
    others = dict(conditions)
    images = [latents, *others.pop("references", ())]
    tokens = [QwenImagePipeline._pack_latents(each, *each.shape) for each in images]
    if model.config.zero_cond_t and not model.zero_cond_t:
        timesteps = torch.cat([timesteps, torch.zeros_like(timesteps)])
    predicted = model(
        tokens[0] if len(tokens) == 1 else torch.cat(tokens, 1),
        timestep=timesteps.to(latents.dtype) / 1000,
        img_shapes=[[(1, each.shape[2] // 2, each.shape[3] // 2) for each in images]] * count,
        return_dict=False,
        **others,
    )[0]
    drawn = predicted[:, : height * width // 4]
    return QwenImagePipeline._unpack_latents(drawn, height, width, vae_scale_factor=1)[:, :, 0]


def joint_angles(
    embed: Any, sizes: Sequence[tuple[int, int]], length: int, device: torch.device
) -> tuple[Sequence[Tensor], Tensor]:
    """Return the rotary angles of images and text, as `Transformer.joint_angles`."""
    images, text = embed([[(1, *size) for size in sizes]], max_txt_seq_len=length, device=device)
    return images.split([height * width for height, width in sizes]), text


TRANSFORMER = Transformer(
    call=call,
    joint=Blocks(name="transformer_blocks", kind="QwenImageTransformerBlock", modulation="img_mod.1"),
    embed=lambda model, latents: model.img_in(QwenImagePipeline._pack_latents(latents, *latents.shape)),
    joint_angles=joint_angles,
    mask="encoder_hidden_states_mask",
    at_zero="zero_cond_t",
    attention={"Attention": "QwenDoubleStreamAttnProcessor2_0"},
    known_classes=frozenset({
        *("QwenImageTransformer2DModel", "QwenImageTransformerBlock", "QwenEmbedRope", "QwenTimestepProjEmbeddings"),
    }),
)  # fmt: skip
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
"""Place of a picture in a template."""
_MAX_SEQUENCE_LENGTH = 512
"""The default of `QwenImagePipeline.__call__`."""
_MOST = 1024
"""The limit of the pipeline."""


def family(
    pipe: QwenImagePipeline | QwenImageEditPipeline | QwenImageEditPlusPipeline,
    *,
    max_sequence_length: int | None = None,
) -> Family:
    """Return the family of this pipeline; `max_sequence_length` is that of its text encoder.

    Raises UsageError if the length exceeds the pipeline's limit, or if the model requires other conditions.
    """
    config: Any = pipe.transformer.config
    edits = not isinstance(pipe, QwenImagePipeline)
    for name in ("guidance_embeds", "use_additional_t_cond") + (() if edits else ("zero_cond_t",)):
        if config.get(name):
            raise UsageError(f"the transformer has {name}, which models of {type(pipe).__name__} do not have")
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
        encode=partial(_encode, pipe.vae.config, ImageEncoder(pipe.vae, draws=not edits)),
    )


def _condition(pipe: Any, max_sequence_length: int, request: Request, is_guided: bool) -> dict[str, Tensor]:
    seen = [as_image(each.image if each.view is None else each.view) for each in request.references]
    images: dict[str, Any] = {}
    if seen:
        images["image"] = seen if isinstance(pipe, QwenImageEditPlusPipeline) else seen[0]

    def encoded(prompt: str) -> tuple[Tensor, Tensor]:
        # Prompts are encoded separately, as in the pipeline; all tokens of a single prompt are valid, so the pipeline
        # returns no mask.
        length, device = max_sequence_length, pipe.transformer.device
        text = pipe.encode_prompt(prompt, device=device, max_sequence_length=length, **images)[0]
        return text, text.new_ones(text.shape[:2], dtype=torch.long)

    # The first version's template has a place for its picture, which stays empty only if it is left out.
    template = pipe.prompt_template_encode
    pipe.prompt_template_encode = template if seen else template.replace(PICTURE, "")
    try:
        negative = encoded(request.negative_prompt or "") if is_guided else (None, None)
        return masked_text(*encoded(request.prompt), *negative)
    finally:
        pipe.prompt_template_encode = template


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
