"""GroupNorm, SiLU and boundary stitching in one kernel: the input of the next convolution, padded.

    y[p, c] = (x[p, c] - mean[r, g]) * rstd[r, g] * weight[c] + bias[c]    with r the request of p and g the group of c
    y[p, c] = y[p, c] * sigmoid(y[p, c])                                   if `activation`
    out     = halo_gather(y, neighbours, halo)

Every pixel is read and normalised once. The program of its patch writes it to its place in the padded patch and to the
border of each neighbour that needs it. Borders beyond the image are zeros, written by the patch that has them. All
arithmetic is in float32 with one rounding at the end. Source: PatchedServe section 4.2.2, "Boundary Stitcher".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .halo import halo_gather_torch
from .launch import (
    TritonKernel,
    ceil_div,
    check_floating,
    check_halo,
    check_index,
    check_patches,
    empty_channels_last,
    tile,
    use_triton,
)

if TYPE_CHECKING:
    import triton.language as tl


def group_norm_silu_stitch(
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    request_index: torch.Tensor,
    neighbours: torch.Tensor,
    *,
    activation: bool = True,
    halo: int = 1,
    kernels: str = "auto",
) -> torch.Tensor:
    """Return the normalised patches with a border of `halo` pixels of their neighbours, zero at the edge of the image.

    Args:
        x: (P, C, h, w) patches in float32, float16 or bfloat16, fastest in channels-last format.
        mean, rstd: (n, groups) float32, from `group_norm_stats`.
        weight, bias: (C,) in any floating dtype.
        request_index: (P,) request of each patch, below n. Values are not checked.
        neighbours: (P, 8) patches to the NW, N, NE, W, E, SW, S, SE; -1 at the edge. If q is a neighbour of p, then p
            is the opposite neighbour of q, as in every `PatchLayout`. Values are not checked.
        activation: whether SiLU follows the norm.
        halo: width of the border, from 1 to the shorter side of a patch.
        kernels: one of `KERNELS`.

    Returns:
        (P, C, h + 2 halo, w + 2 halo) in the dtype of x, channels-last.

    Raises:
        ValueError: shapes, dtypes, devices or `halo` do not fit, or `kernels` cannot be used for this tensor.
    """
    _check(x, mean, rstd, weight, bias, request_index)
    check_index("neighbours", neighbours, (x.shape[0], 8), x.device)
    check_halo(halo, *x.shape[2:])
    if use_triton(kernels, x.device):
        return _triton(x, mean, rstd, weight, bias, request_index, neighbours, activation, halo)
    return group_norm_silu_stitch_torch(
        x, mean, rstd, weight, bias, request_index, neighbours, activation=activation, halo=halo
    )


def group_norm_apply(
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    request_index: torch.Tensor,
    *,
    activation: bool = True,
    kernels: str = "auto",
) -> torch.Tensor:
    """Return the normalised patches without a border: (P, C, h, w). Otherwise as `group_norm_silu_stitch`."""
    _check(x, mean, rstd, weight, bias, request_index)
    if use_triton(kernels, x.device):
        return _triton(x, mean, rstd, weight, bias, request_index, request_index, activation, 0)
    return group_norm_apply_torch(x, mean, rstd, weight, bias, request_index, activation=activation)


def group_norm_silu_stitch_torch(
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    request_index: torch.Tensor,
    neighbours: torch.Tensor,
    *,
    activation: bool = True,
    halo: int = 1,
) -> torch.Tensor:
    """Torch reference of `group_norm_silu_stitch`; arguments are not checked."""
    y = group_norm_apply_torch(x, mean, rstd, weight, bias, request_index, activation=activation)
    return halo_gather_torch(y, neighbours, halo)


def group_norm_apply_torch(
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    request_index: torch.Tensor,
    *,
    activation: bool = True,
) -> torch.Tensor:
    """Torch reference of `group_norm_apply`; arguments are not checked."""
    num_groups = mean.shape[1]
    # One factor and one summand per request and channel make the norm a single pass over the pixels.
    scale = (rstd[:, :, None] * weight.float().view(num_groups, -1)).flatten(1)
    shift = bias.float() - (mean[:, :, None] * scale.unflatten(1, (num_groups, -1))).flatten(1)
    scale = scale.index_select(0, request_index)[:, None, None, :]
    shift = shift.index_select(0, request_index)[:, None, None, :]
    y = torch.addcmul(shift, x.permute(0, 2, 3, 1).float(), scale)
    if activation:
        y = torch.nn.functional.silu(y, inplace=True)
    return y.to(x.dtype).permute(0, 3, 1, 2)


@TritonKernel
def group_norm_stitch_kernel(
    x,
    mean,
    rstd,
    weight,
    bias,
    request_index,
    neighbours,
    out,
    num_channels,
    num_groups,
    stride_patch,
    stride_channel,
    stride_row,
    stride_col,
    height: tl.constexpr,
    width: tl.constexpr,
    halo: tl.constexpr,
    activation: tl.constexpr,
    block_pixels: tl.constexpr,
    block_channels: tl.constexpr,
):
    """Process one tile of one patch; `out` is channels-last, x has any strides. With halo 0 it reads no neighbours."""
    patch = tl.program_id(0).to(tl.int64)
    pixel = tl.program_id(1) * block_pixels + tl.arange(0, block_pixels)
    channel = tl.program_id(2) * block_channels + tl.arange(0, block_channels)
    is_pixel = pixel < height * width
    is_channel = channel < num_channels
    row = pixel // width
    col = pixel % width

    place = (patch * stride_patch + row * stride_row + col * stride_col)[:, None] + (channel * stride_channel)[None, :]
    mask = is_pixel[:, None] & is_channel[None, :]
    value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    group = channel // (num_channels // num_groups)
    statistic = tl.load(request_index + patch).to(tl.int64) * num_groups + group
    scale = tl.load(rstd + statistic, mask=is_channel, other=0.0)
    scale = scale * tl.load(weight + channel, mask=is_channel, other=0.0).to(tl.float32)
    centre = tl.load(mean + statistic, mask=is_channel, other=0.0)
    shift = tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)
    value = (value - centre[None, :]) * scale[None, :] + shift[None, :]
    if activation:
        value = value * tl.sigmoid(value)

    padded_width = width + 2 * halo
    padded_pixels = (height + 2 * halo) * padded_width
    target = (patch * padded_pixels + (row + halo) * padded_width + col + halo) * num_channels
    tl.store(out + target[:, None] + channel[None, :], value.to(out.dtype.element_ty), mask=mask)
    if halo > 0:
        for direction in tl.static_range(9):  # pyright: ignore[reportGeneralTypeIssues]
            if direction != 4:
                down = direction // 3 - 1
                right = direction % 3 - 1
                neighbour = tl.load(neighbours + patch * 8 + direction - direction // 5).to(tl.int64)
                is_there = neighbour >= 0
                # In a neighbour's coordinates this pixel is one patch further back. At the edge of the image, the same
                # number of this patch's pixels, moved one patch on, cover its border on that side, which gets zeros.
                sign = tl.where(is_there, -1, 1)
                patch_written = tl.where(is_there, neighbour, patch)
                row_written = row + sign * down * height
                col_written = col + sign * right * width
                is_border = is_pixel & (row_written >= -halo) & (row_written < height + halo)
                is_border = is_border & (col_written >= -halo) & (col_written < width + halo)
                written = tl.where(is_there, value, 0.0).to(out.dtype.element_ty)
                target = patch_written * padded_pixels + (row_written + halo) * padded_width + col_written + halo
                target = target * num_channels
                tl.store(
                    out + target[:, None] + channel[None, :], written, mask=is_border[:, None] & is_channel[None, :]
                )


def _triton(
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    request_index: torch.Tensor,
    neighbours: torch.Tensor,
    activation: bool,
    halo: int,
) -> torch.Tensor:
    num_patches, channels, height, width = x.shape
    out = empty_channels_last(x, num_patches, channels, height + 2 * halo, width + 2 * halo)
    block_pixels, block_channels = tile(height * width, channels)
    group_norm_stitch_kernel.launch(
        (num_patches, ceil_div(height * width, block_pixels), ceil_div(channels, block_channels)),
        x.device,
        *(x, mean.contiguous(), rstd.contiguous(), weight.contiguous(), bias.contiguous()),
        *(request_index.contiguous(), neighbours.contiguous(), out, channels, mean.shape[1], *x.stride()),
        height=height,
        width=width,
        halo=halo,
        activation=activation,
        block_pixels=block_pixels,
        block_channels=block_channels,
    )
    return out


def _check(
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    request_index: torch.Tensor,
) -> None:
    check_patches(x)
    check_floating(x)
    check_index("request_index", request_index, (x.shape[0],), x.device)
    channels = x.shape[1]
    for name, statistic in (("mean", mean), ("rstd", rstd)):
        if statistic.dim() != 2 or statistic.shape != mean.shape or statistic.dtype != torch.float32:
            raise ValueError(
                f"{name} is {tuple(statistic.shape)} {statistic.dtype}, but must be (requests, groups) of float32"
            )
    if mean.shape[1] == 0 or channels % mean.shape[1]:
        raise ValueError(f"there are statistics of {mean.shape[1]} groups, which do not divide {channels} channels")
    for name, vector in (("weight", weight), ("bias", bias)):
        if tuple(vector.shape) != (channels,) or not vector.is_floating_point():
            raise ValueError(f"{name} is {tuple(vector.shape)} {vector.dtype}, but must be ({channels},) of floats")
    for name, tensor in (("mean", mean), ("rstd", rstd), ("weight", weight), ("bias", bias)):
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, but x is on {x.device}")
