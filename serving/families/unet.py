"""Functions that the families with a U-Net (`sd`, `sdxl`) share."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from PIL.Image import Image

from ...data.errors import UsageError
from ...data.requests import Request
from . import Decode, Family
from .geometry import Geometry


def unet_family(
    pipe: Any,
    max_sequence_length: int | None,
    *,
    condition: Callable[[Any, Request, bool], dict[str, torch.Tensor]],
    conditions: Callable[[dict[str, torch.Tensor]], dict[str, Any]],
    decode: Callable[[Any, torch.Tensor, Decode], Sequence[Image]],
    encode: Callable[[torch.Tensor, torch.Generator], torch.Tensor],
) -> Family:
    """Return the family of a pipeline with a U-Net; `condition` and `decode` get the pipeline as first argument.

    Raises UsageError if `max_sequence_length` is given.
    """
    if max_sequence_length is not None:
        raise UsageError(
            f"max_sequence_length is {max_sequence_length}, but it applies to pipelines with a "
            f"transformer only, not to {type(pipe).__name__}"
        )
    return Family(
        geometry=Geometry.of_unet(pipe.vae_scale_factor, len(pipe.unet.config.block_out_channels)),
        latent_channels=pipe.unet.config.in_channels,
        max_side=None,
        is_distilled=pipe.unet.config.time_cond_proj_dim is not None,
        scales_noise=True,
        pass_step_kwargs=True,
        schedule_kwargs=lambda _: {},
        condition=partial(condition, pipe),
        conditions=conditions,
        decode=partial(decode, pipe),
        encode=encode,
    )


def guidance_embedding(pipe: Any, guidance_scale: float, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the conditioning `guidance`, (1, time_cond_proj_dim), of a (distilled) model with the scale as input."""
    dim = pipe.unet.config.time_cond_proj_dim
    if dim is None:
        return {}
    embedding = pipe.get_guidance_scale_embedding(torch.tensor([guidance_scale - 1]), embedding_dim=dim)
    return {"guidance": embedding.to(device=pipe.unet.device, dtype=dtype)}
