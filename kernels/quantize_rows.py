"""Rows in 8-bit floating point (e4m3), each with a scale of its own, in one kernel that reads each value once.

    scale[row] = max |x[row]| / 448            448 is the largest number of e4m3
    q[row] = e4m3(x[row] / scale[row])

Products of such rows, `torch._scaled_mm`, are scaled by the scales of both rows. Torch's own operators read the values
twice and write them twice, in float32. Source: Micikevicius et al., FP8 Formats for Deep Learning (2022), section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .launch import TritonKernel, ceil_div, check_floating, power_of_two, use_triton

if TYPE_CHECKING:
    import triton.language as tl

FORMAT = torch.float8_e4m3fn
LARGEST = torch.finfo(FORMAT).max
_SMALLEST_SCALE = 1e-12
"""Scale of rows of zeros."""
_TILE = 4096
"""Elements of one program that has several rows."""


def quantize_rows(x: torch.Tensor, *, kernels: str = "auto") -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row.

    Args:
        x: (rows, channels) in float32, float16 or bfloat16, contiguous.
        kernels: one of `KERNELS`.

    Returns:
        (rows, channels) in e4m3, and (rows, 1) the scale of each row in float32. Rows with a value that is not finite
        become NaN.

    Raises:
        ValueError: shape or dtype does not fit, or `kernels` cannot be used for this tensor.
    """
    check_floating(x)
    if x.dim() != 2 or not x.shape[1] or not x.is_contiguous():
        raise ValueError(
            f"x has shape {tuple(x.shape)} and strides {x.stride()}, but it must be (rows, channels) and contiguous"
        )
    return _quantize_rows_triton(x) if use_triton(kernels, x.device) else quantize_rows_torch(x)


def quantize_rows_torch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch reference of `quantize_rows`; arguments are not checked."""
    values = x.float()
    scales = (values.abs().amax(-1, keepdim=True) / LARGEST).clamp_min(_SMALLEST_SCALE)
    return (values / scales).clamp(-LARGEST, LARGEST).to(FORMAT), scales


@TritonKernel
def quantize_rows_kernel(
    x,
    out,
    scales,
    num_rows,
    num_channels,
    largest: tl.constexpr,
    smallest_scale: tl.constexpr,
    block_rows: tl.constexpr,
    block_channels: tl.constexpr,
):
    """Quantise some whole rows."""
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    channel = tl.arange(0, block_channels)
    mask = (row < num_rows)[:, None] & (channel < num_channels)[None, :]
    place = row.to(tl.int64)[:, None] * num_channels + channel[None, :]
    values = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    # A sum of zeros, or NaN if a value of the row is not finite: maxima may ignore NaN.
    lost = tl.sum(values - values, 1)
    scale = tl.maximum(tl.max(tl.abs(values), 1) / largest, smallest_scale) + lost
    tl.store(scales + row, scale, mask=row < num_rows)
    quotient = tl.div_rn(values, scale[:, None])
    clamped = tl.minimum(tl.maximum(quotient, -largest), largest) + lost[:, None]
    tl.store(out + place, clamped.to(out.dtype.element_ty), mask=mask)


def _quantize_rows_triton(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, num_channels = x.shape
    out = torch.empty_like(x, dtype=FORMAT)
    scales = x.new_empty((num_rows, 1), dtype=torch.float32)
    block_channels = power_of_two(num_channels)
    block_rows = max(1, _TILE // block_channels)
    quantize_rows_kernel.launch(
        (ceil_div(num_rows, block_rows),),
        x.device,
        *(x, out, scales, num_rows, num_channels),
        largest=LARGEST,
        smallest_scale=_SMALLEST_SCALE,
        block_rows=block_rows,
        block_channels=block_channels,
        num_warps=4 if block_channels <= _TILE else 8,
    )
    return out, scales
