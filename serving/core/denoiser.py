"""How diffusers' denoising models are found, called and copied: the same way for U-Nets and transformers."""

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..families import transformer_of

Conditions = Callable[[dict[str, Tensor]], dict[str, Any]]
"""Names conditioning tensors (rows, ...) as the denoising model's own forward does."""


def denoiser_of(pipe: Any) -> Any:
    """The denoising model of a diffusers pipeline."""
    return pipe.unet if hasattr(pipe, "unet") else pipe.transformer


def denoise(model: Any, latents: Tensor, timesteps: Tensor, conditions: dict[str, Any]) -> Tensor:
    """Predict for latents [rows, channels, height, width] in the model's dtype, at timesteps (rows,) or one for all.

    `conditions` are named as the model's own forward names them, see `Family.conditions`.
    """
    transformer = transformer_of(model)
    if transformer is not None:
        return transformer.call(model, latents, timesteps, conditions)
    return model(latents, timestep=timesteps, return_dict=False, **conditions)[0]


def copy_modules(model: nn.Module) -> nn.Module:
    """A copy of a model whose modules are its own and whose tensors are the same."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
