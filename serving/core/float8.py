"""`--quantize fp8`: linear layers that multiply in 8-bit floating point (e4m3).

Weights are converted once, with a scale for each output; inputs are converted in every call, with a scale for each
token. A GPU multiplies such rows at twice the rate of 16 bits. Elsewhere the same numbers are multiplied in float32,
which is slow, but gives the same images up to rounding.
"""

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...data.errors import UsageError
from ...kernels.quantize_rows import FORMAT, quantize_rows, quantize_rows_torch
from .adapters import AdaptedLayer, adapted_of
from .denoiser import transformer_blocks

_MULTIPLE = 16
"""Inputs and outputs of a layer must be multiples of this number for `torch._scaled_mm`."""
_FIRST_CAPABILITY = (8, 9)
_MODULATION = re.compile(r"(^|\.)(norm|adaLN|(img|txt)_mod)")
"""Layers of a block that compute scales and shifts from the timestep, once for each row: they are small, and their
errors change all tokens."""


class Float8Linear(nn.Module):
    """A linear layer that multiplies in e4m3. Adapters change its output as that of the layer that it replaces.

    Args:
        weight: (outputs, inputs) in e4m3.
        scales: (outputs,) float32, by which the products with the rows of `weight` are multiplied.
        bias: (outputs,); None for none.
        dtype: dtype of the outputs of `torch._scaled_mm`, see `_product_dtype`.
    """

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight: Tensor
        self.scales: Tensor
        self.bias: Tensor | None
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", bias)
        self._dtype = dtype
        self.adapted: AdaptedLayer | None = None

    @classmethod
    def of(cls, layer: nn.Linear) -> Self:
        """Convert a layer, with its adapters."""
        weight, scales = quantize_rows(layer.weight.detach().contiguous())
        dtype = _product_dtype(layer.weight.device, layer.weight.dtype)
        made = cls(weight, scales[:, 0], None if layer.bias is None else layer.bias.detach().to(dtype), dtype)
        if (adapted := adapted_of(layer)) is not None:
            made.adapted = adapted
            made.register_forward_hook(adapted)
        return made

    @classmethod
    def joined(cls, layers: Sequence["Float8Linear"]) -> Self:
        """Return several layers on the same input as one, without their adapters."""
        first = layers[0]
        weight, scales = (torch.cat([getattr(each, name) for each in layers]) for name in ("weight", "scales"))
        bias = None if first.bias is None else torch.cat([each.bias for each in layers])  # type: ignore[misc]
        return cls(weight, scales, bias, first._dtype)

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs], in the same dtype."""
        tokens = x.reshape(-1, x.shape[-1])
        # The compiler joins torch's operators with those before.
        quantised = quantize_rows_torch if torch.compiler.is_compiling() else quantize_rows
        found = _product(*quantised(tokens.contiguous()), self.weight, self.scales, self.bias, self._dtype)
        return found.to(x.dtype).view(*x.shape[:-1], self.weight.shape[0])


def _product(
    tokens: Tensor, token_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Multiply tokens (tokens, inputs) by weights (outputs, inputs), both in e4m3, and scale; the result has `dtype`.

    On CUDA the sums have the precision of the fast accumulation of tensor cores, as is usual for inference.
    """
    if tokens.device.type == "cuda":
        by_output = scales[None]
        return torch._scaled_mm(
            tokens, weight.t(), token_scales, by_output, bias=bias, out_dtype=dtype, use_fast_accum=True
        )
    found = F.linear(tokens.float(), weight.float()) * token_scales * scales
    return (found if bias is None else found + bias.float()).to(dtype)


@functools.cache
def _product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a device returns such products for a model of `dtype`: that dtype or bfloat16.

    All of them return bfloat16; which others depends on the device and on torch (torch 2.11: all with capability 9.0).
    """
    if device.type != "cuda":
        return dtype
    ones = torch.ones(_MULTIPLE, _MULTIPLE, device=device).to(FORMAT)
    scales = torch.ones(_MULTIPLE, device=device)
    bias = torch.zeros(_MULTIPLE, device=device, dtype=dtype)
    try:
        _product(ones, scales[:, None], ones, scales, bias, dtype)
    except (RuntimeError, ValueError):
        return torch.bfloat16
    return dtype


def check_float8(device: torch.device) -> None:
    """Raise UsageError if a CUDA device does not multiply in 8-bit floating point."""
    if device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < _FIRST_CAPABILITY:
        needed, own = (".".join(map(str, each)) for each in (_FIRST_CAPABILITY, found))
        raise UsageError(
            f"--quantize fp8 needs a GPU of compute capability {needed} or higher, but "
            f"{torch.cuda.get_device_name(device)} has {own}; --quantize int8 works, too"
        )


def convert_to_float8(model: nn.Module) -> int:
    """Let a denoising model's attention projections and feed-forward layers multiply in e4m3; return their number.

    Modulation and layers outside of the blocks keep their format, as do layers whose sizes are not multiples of 16.
    Raises UsageError if there are no others.
    """
    places = list(_places(model))
    if not places:
        raise UsageError(f"--quantize fp8: no layer of {type(model).__name__} has sizes that are multiples of 16")
    for parent, name, layer in places:
        setattr(parent, name, Float8Linear.of(layer))
    return len(places)


def _places(model: Any) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Iterate over the layers to convert: parent, the name there, and the layer."""
    for block in transformer_blocks(model):
        for where, parent in block.named_modules():
            for name, layer in parent.named_children():
                full = f"{where}.{name}" if where else name
                fits = isinstance(layer, nn.Linear) and not (layer.in_features | layer.out_features) % _MULTIPLE
                # Layers of subclasses compute something else.
                if fits and type(layer) is nn.Linear and _MODULATION.search(full) is None:
                    # A list names its children by number, which setattr takes.
                    yield parent, name, layer
