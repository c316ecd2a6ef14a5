"""GroupNorm statistics by image: mean and reciprocal standard deviation of each group over all patches of a request.

    mean[r, g] = average of x over the patches of request r and the channels of group g
    rstd[r, g] = 1 / sqrt(average of (x - mean[r, g])^2 + eps)

Squares are those of deviations from a mean, never E[x^2] - E[x]^2, which loses all digits if the mean is large. A part
of the pixels of a patch yields a mean and a sum of squared deviations for each channel, which Chan's formula merges in
a fixed order, so that results are the same in every run. Values of one request, even infinity, never affect another.
Sources: Wu and He, Group Normalization (2018); Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for
Computing Sample Variances (1979); PatchedServe section 4.2.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .launch import (
    TritonKernel,
    ceil_div,
    check_floating,
    check_index,
    check_patches,
    power_of_two,
    tile,
    use_triton,
)

if TYPE_CHECKING:
    import triton.language as tl

_TILES = (8192, 4096, 2048, 1024)
"""Elements of a program, which reads them once. Large tiles have fewer means to merge."""
_PROGRAMS = 4 * 132
"""Number of programs for which smaller tiles are used: four for each processor of an H100 or H200."""


def group_norm_stats(
    x: torch.Tensor,
    request_index: torch.Tensor,
    num_requests: int,
    num_groups: int,
    eps: float,
    *,
    kernels: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and the reciprocal standard deviation of every group of every request.

    Args:
        x: (P, C, h, w) patches in float32, float16 or bfloat16, fastest in channels-last format.
        request_index: (P,) request of each patch, below `num_requests` and never decreasing, as in `PatchLayout`.
            Values are not checked.
        num_requests: number of requests, n. A request without patches has mean 0 and variance 0.
        num_groups: number of groups; it must divide C.
        eps: added to the variance.
        kernels: one of `KERNELS`.

    Returns:
        mean and rstd, each (n, num_groups) float32.

    Raises:
        ValueError: shapes, dtypes, devices or `num_groups` do not fit, or `kernels` cannot be used for this tensor.
    """
    check_patches(x)
    check_floating(x)
    check_index("request_index", request_index, (x.shape[0],), x.device)
    if num_groups < 1 or x.shape[1] % num_groups:
        raise ValueError(f"number of groups is {num_groups}, but it must divide the {x.shape[1]} channels")
    if use_triton(kernels, x.device):
        return _group_norm_stats_triton(x, request_index, num_requests, num_groups, eps)
    return group_norm_stats_torch(x, request_index, num_requests, num_groups, eps)


def group_norm_stats_torch(
    x: torch.Tensor, request_index: torch.Tensor, num_requests: int, num_groups: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch reference of `group_norm_stats`; arguments are not checked."""
    num_patches, channels, height, width = x.shape
    group_channels = channels // num_groups
    pixels = x.permute(0, 2, 3, 1).float().reshape(num_patches, height * width, num_groups, group_channels)
    patch_mean = pixels.mean((1, 3), keepdim=True)
    squares = (pixels - patch_mean).square_().sum((1, 3), dtype=torch.float64)

    # The merge is small, so that float64 costs nothing. It uses segments and not a product with ones and zeros, because
    # infinity in one request must not affect another.
    patch_mean = patch_mean.view(num_patches, num_groups).double()
    count = group_channels * height * width
    # Not `bincount`, which synchronizes with the device.
    num_of_request = request_index.new_zeros(num_requests)
    num_of_request.index_add_(0, request_index, torch.ones_like(request_index))
    divisor = num_of_request.clamp(min=1)[:, None]
    mean = torch.segment_reduce(patch_mean, "sum", lengths=num_of_request, unsafe=True) / divisor
    squares += count * (patch_mean - mean.index_select(0, request_index)).square_()
    variance = torch.segment_reduce(squares, "sum", lengths=num_of_request, unsafe=True) / (divisor * count)
    return mean.float(), (variance + eps).rsqrt().float()


@TritonKernel
def part_stats_kernel(
    x,
    means,
    squares,
    num_channels,
    stride_patch,
    stride_channel,
    stride_row,
    stride_col,
    height: tl.constexpr,
    width: tl.constexpr,
    block_pixels: tl.constexpr,
    block_channels: tl.constexpr,
):
    """Compute mean and sum of squared deviations of each channel over a part of the pixels of one patch.

    `means` and `squares` are (patches, parts, channels).
    """
    patch = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    pixel = part * block_pixels + tl.arange(0, block_pixels)
    channel = tl.program_id(2) * block_channels + tl.arange(0, block_channels)
    is_channel = channel < num_channels
    num_pixels: tl.constexpr = height * width
    place = patch * stride_patch + pixel // width * stride_row + pixel % width * stride_col
    mask = (pixel < num_pixels)[:, None] & is_channel[None, :]
    value = tl.load(x + place[:, None] + (channel * stride_channel)[None, :], mask=mask, other=0.0).to(tl.float32)
    num = tl.minimum(num_pixels - part * block_pixels, block_pixels)
    mean = tl.sum(value, 0) / num
    deviation = tl.where(mask, value - mean[None, :], 0.0)
    out = (patch * tl.num_programs(1) + part) * num_channels + channel
    tl.store(means + out, mean, mask=is_channel)
    tl.store(squares + out, tl.sum(deviation * deviation, 0), mask=is_channel)


@TritonKernel
def merge_stats_kernel(
    means,
    squares,
    request_index,
    mean,
    rstd,
    num_parts,
    parts_each,
    group_channels,
    part_pixels,
    last_pixels,
    eps,
    block_parts: tl.constexpr,
    block_channels: tl.constexpr,
):
    """Merge one group over all parts of the patches of one request.

    Every patch has `parts_each` parts of `part_pixels` pixels, the last of `last_pixels`. Every program reads the whole
    request index, a few kilobytes that all share, so that no offsets are needed.
    """
    request = tl.program_id(0)
    group = tl.program_id(1)
    num_channels = tl.num_programs(1) * group_channels
    channel = tl.arange(0, block_channels)
    is_channel = channel < group_channels
    total = tl.zeros([block_parts, block_channels], dtype=tl.float32)
    weights = tl.zeros([block_parts], dtype=tl.float32)
    for first in range(0, num_parts, block_parts):
        part = first + tl.arange(0, block_parts)
        is_mine = tl.load(request_index + part // parts_each, mask=part < num_parts, other=-1) == request
        # Pixels of each part, in units of a whole part.
        weight = tl.where(part % parts_each == parts_each - 1, last_pixels / part_pixels, 1.0)
        weight = tl.where(is_mine, weight, 0.0)
        place = part.to(tl.int64)[:, None] * num_channels + (group * group_channels + channel)[None, :]
        mask = is_mine[:, None] & is_channel[None, :]
        total += tl.load(means + place, mask=mask, other=0.0) * weight[:, None]
        weights += weight
    num = tl.maximum(tl.sum(weights), 1e-6) * group_channels
    request_mean = tl.sum(total) / num
    total = tl.zeros([block_parts, block_channels], dtype=tl.float32)
    for first in range(0, num_parts, block_parts):
        part = first + tl.arange(0, block_parts)
        is_mine = tl.load(request_index + part // parts_each, mask=part < num_parts, other=-1) == request
        pixels = tl.where(part % parts_each == parts_each - 1, last_pixels, part_pixels).to(tl.float32)
        place = part.to(tl.int64)[:, None] * num_channels + (group * group_channels + channel)[None, :]
        mask = is_mine[:, None] & is_channel[None, :]
        shift = tl.load(means + place, mask=mask, other=0.0) - request_mean
        merged = tl.load(squares + place, mask=mask, other=0.0) + pixels[:, None] * shift * shift
        total += tl.where(mask, merged, 0.0)
    variance = tl.sum(total) / (num * part_pixels)
    out = request * tl.num_programs(1) + group
    tl.store(mean + out, request_mean)
    tl.store(rstd + out, 1.0 / tl.sqrt_rn(variance + eps))


def stats_grid(num_patches: int, num_pixels: int, channels: int) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """Return the grid (patches, parts of each, blocks of channels) of `part_stats_kernel`, and its tile as `tile` does.

    Tiles are as large as possible with enough programs to fill a GPU.
    """
    for size in _TILES:
        blocks = tile(num_pixels, channels, size)
        grid = num_patches, ceil_div(num_pixels, blocks[0]), ceil_div(channels, blocks[1])
        if grid[0] * grid[1] * grid[2] >= _PROGRAMS:
            break
    return grid, blocks


def _group_norm_stats_triton(
    x: torch.Tensor, request_index: torch.Tensor, num_requests: int, num_groups: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    num_patches, channels, height, width = x.shape
    num_pixels, group_channels = height * width, channels // num_groups
    grid, (block_pixels, block_channels) = stats_grid(num_patches, num_pixels, channels)
    parts_each = grid[1]
    means, squares = x.new_empty((2, num_patches, parts_each, channels), dtype=torch.float32)
    mean, rstd = x.new_empty((2, num_requests, num_groups), dtype=torch.float32)
    part_stats_kernel.launch(
        grid,
        x.device,
        *(x, means, squares, channels, *x.stride()),
        height=height,
        width=width,
        block_pixels=block_pixels,
        block_channels=block_channels,
    )
    num_parts, width_of_group = num_patches * parts_each, power_of_two(group_channels)
    part_pixels = min(block_pixels, num_pixels)
    merge_stats_kernel.launch(
        (num_requests, num_groups),
        x.device,
        *(means, squares, request_index.contiguous(), mean, rstd),
        *(num_parts, parts_each, group_channels, part_pixels, num_pixels - (parts_each - 1) * part_pixels, eps),
        block_parts=min(power_of_two(num_parts), max(1, 2048 // width_of_group)),
        block_channels=width_of_group,
    )
    return mean, rstd
