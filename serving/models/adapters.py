"""Adapters (LoRA) that requests name. diffusers loads them; they are kept separate from the pipeline's weights."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from torch import nn

from ...data.adapters import Adapters
from ...data.errors import UsageError
from ..core.adapters import AdaptedLayers, Entries, LowRank, RowAdapters
from ..core.denoiser import denoiser_of
from ..options import NamedFile
from .changes import load_layers

_TEXT_ENCODER = "text_encoder"
_REPLACED = ("_transformer_norm_layers", "_overwritten_params")
"""Attributes in which diffusers keeps modules that an adapter has replaced, other than layers of peft."""


class ModelAdapters:
    """The adapters of a pipeline. They apply only to rows of requests that name them, see `core.adapters`.

    Args:
        pipe: the pipeline, on its device and in its dtype. Its layers get hooks; weights stay unchanged.
        given: the adapters to load.

    Attributes:
        names: names that requests may use.

    Raises:
        UsageError: an adapter changes parts that cannot be changed per request.
        RunError: an adapter does not fit the model.
    """

    def __init__(self, pipe: Any, given: Sequence[NamedFile]) -> None:
        self.names = tuple(each.name for each in given)
        layers, self._texts = AdaptedLayers(), AdaptedLayers()
        denoiser = denoiser_of(pipe)
        self._device: torch.device = denoiser.device
        # peft does not accept all names that requests may use.
        names = {f"adapter{index}": each for index, each in enumerate(given)}
        found: list[tuple[nn.Module, AdaptedLayers, dict[str, LowRank]]] = []
        try:
            for name, each in names.items():
                load_layers(pipe, each.path, name, f"--adapter {each.name}={each.path}")
                if any(getattr(denoiser, attribute, None) for attribute in _REPLACED):
                    raise _refusal(each, "replaces norms or whole layers")
            for part in pipe.get_list_adapters():
                model = getattr(pipe, part)
                owner = self._texts if part.startswith(_TEXT_ENCODER) else layers
                if model.device.type == "meta":
                    continue  # a rank encodes no texts
                if owner is layers and model is not denoiser:
                    raise UsageError(f"--adapter: an adapter of the part {part} cannot be applied to each request")
                found += [(layer, owner, pairs) for layer, pairs in _pairs_of(model, names, self._device)]
        finally:
            pipe.unload_lora_weights()
        for layer, owner, pairs in found:
            owner.adapt(layer, pairs)

    @contextmanager
    def encoding(self, adapters: Adapters) -> Iterator[None]:
        """Apply the adapters of a request to the text encoders until the context ends, in the encoding thread."""
        with self._texts.on(RowAdapters.of([adapters], self._device, place=_of_one_row)):
            yield


def _of_one_row(x: torch.Tensor) -> Entries:
    return Entries(len(x), lambda: torch.zeros(len(x), dtype=torch.long, device=x.device), are_tokens=False)


def _pairs_of(
    model: nn.Module, names: Mapping[str, NamedFile], device: torch.device
) -> Iterator[tuple[nn.Module, dict[str, LowRank]]]:
    """Yield the layers of a model that peft has wrapped, each with the low-rank updates of its adapters.

    Args:
        model: a part of the pipeline.
        names: adapters by their names in peft.
        device: device of the updates.

    Raises UsageError: an adapter is not a plain LoRA of linear layers, or of convolutions of a U-Net.
    """
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    for where, wrapped in model.named_modules():
        if not isinstance(wrapped, BaseTunerLayer):
            continue
        layer: Any = wrapped.get_base_layer()
        pairs: dict[str, LowRank] = {}
        for name, given in names.items():
            if not isinstance(wrapped, LoraLayer) or name in wrapped.lora_variant or name in wrapped.lora_embedding_A:
                raise _refusal(given, f"is no plain LoRA ({where})")
            if name not in wrapped.lora_A:
                continue
            if isinstance(layer, nn.Conv2d) and not isinstance(model, UNet2DConditionModel):
                raise _refusal(given, f"changes the convolution {where}")
            if not isinstance(layer, nn.Linear | nn.Conv2d):
                raise _refusal(given, f"changes {where}, a {type(layer).__name__}")
            dtype = layer.weight.dtype
            down, up = (part[name].to(device, dtype) for part in (wrapped.lora_A, wrapped.lora_B))
            if up.bias is not None:
                raise _refusal(given, f"has a bias ({where})")
            pairs[given.name] = LowRank(down, up, wrapped.scaling[name])  # type: ignore[arg-type]  of the layer's kind
        if pairs:
            yield layer, pairs


def _refusal(given: NamedFile, problem: str) -> UsageError:
    return UsageError(f"--adapter {given.name}={given.path} {problem}, which is not applied by request; use --lora")
