"""Access to diffusers' denoising models: finding, calling and copying, alike for U-Nets and transformers."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from ..families import transformer_of

Conditions = Callable[[dict[str, Tensor]], dict[str, Any]]
"""Maps conditioning tensors (rows, ...) to keyword arguments of the denoising model's forward."""


def denoiser_of(pipe: Any) -> Any:
    """Return the denoising model of a diffusers pipeline."""
    return pipe.unet if hasattr(pipe, "unet") else pipe.transformer


def denoise(model: Any, latents: Tensor, timesteps: Tensor, conditions: dict[str, Any]) -> Tensor:
    """Predict for latents [rows, channels, height, width] in the model's dtype, at timesteps (rows,) or one for all.

    `conditions` are keyword arguments of the model's forward, as from `Family.conditions`.
    """
    transformer = transformer_of(model)
    if transformer is not None:
        return transformer.call(model, latents, timesteps, conditions)
    return model(latents, timestep=timesteps, return_dict=False, **conditions)[0]


def copy_modules(model: nn.Module) -> nn.Module:
    """Return a copy of a model with modules of its own that share the tensors of the original."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def transformer_blocks(model: Any) -> Iterator[nn.Module]:
    """Iterate over the blocks of a transformer, or the transformer blocks of a U-Net.

    Without the blocks that refine only the text, which the patch engine runs once per batch.
    """
    transformer = transformer_of(model)
    if transformer is None:
        yield from (module for module in model.modules() if type(module).__name__ == "BasicTransformerBlock")
        return
    for each in transformer.lists:
        # A list may end with modules of other kinds, which join or split the streams.
        yield from (block for block in model.get_submodule(each.name).children() if type(block).__name__ == each.kind)
