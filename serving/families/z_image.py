"""Z-Image: image and text are refined separately, then joined in one stream.

Both are padded by tokens that take part in attention. Rotary positions of the image follow those of its text.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers import ZImagePipeline
from diffusers.models.transformers.transformer_z_image import SEQ_MULTI_OF
from torch import Tensor
from torch.nn import functional as F

from ...data.requests import Request
from . import Family
from .pipelines import even_sigmas_shifted, masked_text, text_length, transformer_family
from .transformer import PAD, Blocks, Transformer


def call(model: Any, latents: Tensor, timesteps: Tensor, conditions: dict[str, Any]) -> Tensor:
    """Call the model, as a `transformer.Call`. The text may also be that of `own_texts`."""
    texts = conditions["encoder_hidden_states"]
    own = own_texts(texts, conditions["text_mask"]) if isinstance(texts, Tensor) else texts
    predicted = model(list(latents[:, :, None]), (1000 - timesteps) / 1000, list(own), return_dict=False)[0]
    return -torch.stack(predicted)[:, :, 0]


def own_texts(texts: Tensor, masks: Tensor) -> tuple[Tensor, ...]:
    """Return the text of each row without pads, (length, width), given all of them and their masks."""
    return tuple(text[mask == 1] for text, mask in zip(texts, masks, strict=True))


def call_packed(model: Any, patches: Tensor, timesteps: Tensor, conditions: dict[str, Any]) -> Tensor:
    """Call the model with all tokens as an image that is one token wide, as `Transformer.call_packed`."""
    (count, channels, height, width), side = patches.shape, model.all_patch_size[0]
    cut = patches.view(count, channels, height // side, side, width // side, side).permute(1, 0, 2, 4, 3, 5)
    image, text = cut.reshape(channels, 1, -1, side), conditions["encoder_hidden_states"][0]
    predicted = model([image], (1000 - timesteps) / 1000, [text], return_dict=False)[0]
    return -predicted[0].view(cut.shape).permute(1, 0, 2, 4, 3, 5).reshape(patches.shape)


def embed(model: Any, latents: Tensor) -> Tensor:
    """Embed latents as tokens, as `Transformer.embed`."""
    side = model.all_patch_size[0]
    cut = latents.unflatten(3, (-1, side)).unflatten(2, (-1, side)).permute(0, 2, 4, 3, 5, 1)
    return model.all_x_embedder[f"{side}-{model.all_f_patch_size[0]}"](cut.flatten(3).flatten(1, 2))


_blocks = partial(Blocks, kind="ZImageTransformerBlock", modulation="adaLN_modulation.0", attention=("attention",))
TRANSFORMER = Transformer(
    call=call,
    call_packed=call_packed,
    layout="padded",
    embed=embed,
    joint=_blocks(name="noise_refiner"),
    single=_blocks(name="layers"),
    mask="text_mask",
    attention={"Attention": "ZSingleStreamAttnProcessor"},
    known_classes=frozenset({
        *("ZImageTransformer2DModel", "ZImageTransformerBlock", "FinalLayer", "TimestepEmbedder", "ModuleDict"),
    }),
)  # fmt: skip
_MAX_SEQUENCE_LENGTH = 512
"""The default of `ZImagePipeline.__call__`."""


def family(pipe: ZImagePipeline, *, max_sequence_length: int | None = None) -> Family:
    """Return the family of this pipeline; `max_sequence_length` is that of its text encoder.

    Raises UsageError if the model has too few positions for this length.
    """
    config: Any = pipe.transformer.config
    # The image follows the text and its pads, at the next position.
    most = (config.axes_lens[0] - 2) // SEQ_MULTI_OF * SEQ_MULTI_OF
    length = text_length(pipe, max_sequence_length, _MAX_SEQUENCE_LENGTH, most=most)
    return replace(
        transformer_family(
            pipe,
            latent_channels=config.in_channels,
            max_tokens=min(config.axes_lens[1:]),
            schedule_kwargs=partial(even_sigmas_shifted, pipe),
            condition=partial(_condition, pipe, length),
            conditions=_conditions,
        ),
        neutral_scale=0.0,
        noise_dtype=torch.float32,
    )


def _condition(pipe: Any, max_sequence_length: int, request: Request, is_guided: bool) -> dict[str, Tensor]:
    found = pipe.encode_prompt(
        request.prompt,
        device=pipe.transformer.device,
        do_classifier_free_guidance=is_guided,
        negative_prompt=request.negative_prompt,
        max_sequence_length=max_sequence_length,
    )
    # Lists of one text each, without padding; the second list is empty without guidance.
    texts = [text[None] for each in found for text in each]
    masks = [text.new_ones(text.shape[:2], dtype=torch.long) for text in texts]
    return masked_text(texts[0], masks[0], *((texts[1], masks[1]) if is_guided else (None, None)))


def _conditions(conditioning: dict[str, Tensor]) -> dict[str, Any]:
    text, mask = conditioning["text"], conditioning["mask"]
    to_come = -text.shape[1] % SEQ_MULTI_OF
    text, mask = F.pad(text, (0, 0, 0, to_come)), F.pad(mask, (0, to_come))
    counted = (mask.sum(1, keepdim=True) + SEQ_MULTI_OF - 1) // SEQ_MULTI_OF * SEQ_MULTI_OF
    is_pad = (torch.arange(mask.shape[1], device=mask.device) < counted) & (mask == 0)
    return {"encoder_hidden_states": text, "text_mask": mask + PAD * is_pad}
