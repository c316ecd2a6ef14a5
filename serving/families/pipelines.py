"""Functions that the families of transformers share."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from PIL.Image import Image
from torch import Tensor

from ...data.errors import UsageError
from ...data.requests import Request
from . import Decode, Family
from .encoder import ImageEncoder
from .geometry import Geometry
from .table import FAMILIES
from .text import join_texts
from .transformer import Transformer


def transformer_family(
    pipe: Any,
    *,
    latent_channels: int,
    condition: Callable[[Request, bool], dict[str, Tensor]],
    conditions: Callable[[dict[str, Tensor]], dict[str, Any]],
    schedule_kwargs: Callable[[Geometry, Request], dict[str, Any]] = lambda *_: {},
    max_tokens: int | None = None,
    is_distilled: bool = False,
    is_flow: bool = True,
    guided_norm: Callable[[Tensor], Tensor] | None = None,
    encodes_modes: bool = False,
) -> Family:
    """Return the family of a pipeline with a transformer and an `AutoencoderKL`.

    Args:
        pipe: the pipeline.
        latent_channels, condition, conditions, is_distilled, guided_norm: see `Family`.
        schedule_kwargs: as in `Family`, with the geometry as a further argument.
        max_tokens: most tokens on a side of an image; None for any number.
        is_flow: whether its scheduler does flow matching, and so takes neither scaled noise nor step arguments.
        encodes_modes: whether images are encoded as the mode of the autoencoder's posterior, and not sampled from it.
    """
    entry = FAMILIES[type(pipe).__name__]
    geometry = Geometry.of_entry(entry, pipe.vae_scale_factor, pipe.transformer.config)
    return Family(
        geometry=geometry,
        latent_channels=latent_channels,
        max_side=None if max_tokens is None else max_tokens * geometry.size_multiple,
        is_distilled=is_distilled,
        guided_norm=guided_norm,
        scales_noise=not is_flow,
        pass_step_kwargs=not is_flow,
        schedule_kwargs=partial(schedule_kwargs, geometry),
        condition=condition,
        conditions=conditions,
        decode=partial(decode_shifted, pipe),
        encode=partial(encode_shifted, pipe.vae.config, ImageEncoder(pipe.vae, draws=not encodes_modes)),
    )


def with_references(
    transformer: Transformer,
    tokens_of: Callable[[Tensor], Tensor],
    latents: Tensor,
    conditions: dict[str, Any],
    *,
    side: int,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return tokens and position ids of images, followed by those of their references, and the other conditions.

    Args:
        transformer: description of the model, with `image_ids` and `reference_ids`.
        tokens_of: maps latents [rows, channels, height, width] to tokens [rows, tokens, width].
        latents, conditions: arguments of a `transformer.Call`.
        side: side in latents of a token.
    """
    others = dict(conditions)
    references = others.pop("references", ())
    assert transformer.image_ids is not None
    height, width = latents.shape[2:]
    tokens, ids = tokens_of(latents), transformer.image_ids(height // side, width // side, latents)
    if not references:
        return tokens, ids, others
    assert transformer.reference_ids is not None, "this family takes no references"
    of_references = [
        transformer.reference_ids(number, each.shape[2] // side, each.shape[3] // side, latents)
        for number, each in enumerate(references)
    ]
    return torch.cat([tokens, *map(tokens_of, references)], 1), torch.cat([ids, *of_references]), others


def shift_by_size(pipe: Any, max_shift: float, geometry: Geometry, request: Request) -> dict[str, float]:
    """Return the argument of `set_timesteps` that depends on the number of tokens of the image.

    `max_shift` is the pipeline's default for schedulers whose configuration has none.
    """
    multiple, size = geometry.size_multiple, request.resolution
    return {"mu": shift_of(pipe, max_shift, (size.height // multiple) * (size.width // multiple))}


def shift_of(pipe: Any, max_shift: float, num_tokens: int) -> float:
    """Return the shift of the timesteps for an image of `num_tokens` tokens."""
    config = pipe.scheduler.config
    return calculate_shift(
        num_tokens,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", max_shift),
    )


def even_sigmas(request: Request) -> dict[str, Any]:
    """Return the argument of `set_timesteps` for pipelines that pass sigmas, which the scheduler then shifts."""
    steps = request.num_inference_steps
    return {"sigmas": np.linspace(1.0, 1 / steps, steps)}


def even_sigmas_unless_own(pipe: Any, request: Request) -> dict[str, Any]:
    """Return the same for pipelines that leave the sigmas to schedulers with `use_flow_sigmas`."""
    return {} if pipe.scheduler.config.get("use_flow_sigmas") else even_sigmas(request)


def even_sigmas_shifted(pipe: Any, geometry: Geometry, request: Request) -> dict[str, Any]:
    """Return both shift and sigmas, which most pipelines pass."""
    return shift_by_size(pipe, 1.15, geometry, request) | even_sigmas(request)


def even_sigmas_shifted_unless_own(pipe: Any, geometry: Geometry, request: Request) -> dict[str, Any]:
    """Return the same for the pipelines of `even_sigmas_unless_own`."""
    return shift_by_size(pipe, 1.15, geometry, request) | even_sigmas_unless_own(pipe, request)


def masked_text(text: Tensor, mask: Tensor, negative: Tensor | None, negative_mask: Tensor | None) -> dict[str, Tensor]:
    """Return the conditioning of one request: its text and mask, after the negative ones if it is guided."""
    if negative is None or negative_mask is None:
        return {"text": text, "mask": mask}
    return dict(zip(("text", "mask"), join_texts([negative, text], [negative_mask, mask]), strict=True))


def masked_conditions(transformer: Transformer, conditioning: dict[str, Tensor]) -> dict[str, Any]:
    """Return the conditions of a transformer that takes a mask, as `Family.conditions`."""
    assert transformer.mask is not None
    return {"encoder_hidden_states": conditioning["text"], transformer.mask: conditioning["mask"]}


def text_length(pipe: Any, given: int | None, usual: int, most: int | None = None) -> int:
    """Return the text length in tokens: the one from `psctl.json`, or the usual one.

    Raises UsageError if the length exceeds the pipeline's limit.
    """
    if given is not None and most is not None and given > most:
        raise UsageError(f"max_sequence_length is {given}, but {type(pipe).__name__} takes {most} at most")
    return usual if given is None else given


def decode_shifted(pipe: Any, latents: Tensor, decode: Decode) -> Sequence[Image]:
    """Decode latents with the autoencoder's scale and shift, as `Family.decode`."""
    config = pipe.vae.config
    image = decode((latents.to(pipe.vae.dtype) / config.scaling_factor) + (config.shift_factor or 0.0))
    return pipe.image_processor.postprocess(image, output_type="pil")


def encode_shifted(config: Any, encode: ImageEncoder, pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Encode images with the autoencoder's scale and shift, as `Family.encode`; `config` is the autoencoder's."""
    return (encode(pixels, generator) - (config.shift_factor or 0.0)) * config.scaling_factor
