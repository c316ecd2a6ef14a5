"""Access to diffusers' denoising models: finding, calling and copying, alike for U-Nets and transformers."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
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


def of_rows(conditions: dict[str, Any], rows: Tensor) -> dict[str, Any]:
    """Select some rows of conditions; values that are not tensors stay unchanged."""

    def of(value: Any) -> Any:
        if isinstance(value, dict):
            return of_rows(value, rows)
        return value.index_select(0, rows) if isinstance(value, Tensor) else value

    return {name: of(value) for name, value in conditions.items()}


def copy_modules(model: nn.Module) -> nn.Module:
    """Return a copy of a model with modules of its own that share the tensors of the original.

    The result is that of `copy.deepcopy`, which takes several times as long for models of hundreds of modules.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    modules = [module for module in model.modules() if _has_default_copy(module)]
    for module in modules:
        memo[id(module)] = object.__new__(type(module))
    for module in modules:
        state = module.__getstate__()  # type: ignore[no-untyped-call]
        memo[id(module)].__dict__.update((name, _copy(value, memo)) for name, value in state.items())
    return copy.deepcopy(model, memo)


_UNCHANGED = frozenset((bool, int, float, str, type(None), type, FunctionType, torch.dtype, torch.device))
"""Types whose values copies share, as those of `copy.deepcopy` do."""


def _has_default_copy(module: nn.Module) -> bool:
    own = {"__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__"}
    return all(own.isdisjoint(vars(kind)) for kind in type(module).__mro__ if kind not in (nn.Module, object))


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of an attribute of a module."""
    kind = type(value)
    if kind in _UNCHANGED:
        return value
    known = memo.get(id(value))
    if known is not None:
        return known
    if kind not in (dict, OrderedDict):
        return copy.deepcopy(value, memo)
    memo[id(value)] = copied = kind()
    for key, each in value.items():
        copied[key] = _copy(each, memo)
    return copied


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
