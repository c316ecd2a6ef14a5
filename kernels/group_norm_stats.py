"""GroupNorm statistics by image: mean and reciprocal standard deviation of each group over all patches of a request.

    mean[r, g] = average of x over the patches of request r and the channels of group g
    rstd[r, g] = 1 / sqrt(average of (x - mean[r, g])^2 + eps)

Both passes use deviations from a mean, never E[x^2] - E[x]^2, which loses all digits if the mean is large. Each patch
yields its mean and its sum of squared deviations, which Chan's formula merges in a fixed order, so that results are the
same in every run. Values of one request, even infinity, never affect another. Sources: Wu and He, Group
Normalization (2018); Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances
(1979); PatchedServe section 4.2.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .launch import TritonKernel, check_floating, check_index, check_patches, power_of_two, use_triton

if TYPE_CHECKING:
    import triton.language as tl


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
def patch_stats_kernel(
    x,
    means,
    squares,
    group_channels,
    stride_patch,
    stride_channel,
    stride_row,
    stride_col,
    height: tl.constexpr,
    width: tl.constexpr,
    block_pixels: tl.constexpr,
    block_channels: tl.constexpr,
):
    """Compute mean and sum of squared deviations of one group of one patch."""
    patch = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    start = x + patch * stride_patch + group * group_channels * stride_channel
    channel = tl.arange(0, block_channels)
    is_channel = channel < group_channels
    num_pixels: tl.constexpr = height * width
    total = tl.zeros([block_pixels, block_channels], dtype=tl.float32)
    for first in range(0, num_pixels, block_pixels):
        pixel = first + tl.arange(0, block_pixels)
        place = pixel // width * stride_row + pixel % width * stride_col
        place = place[:, None] + (channel * stride_channel)[None, :]
        mask = (pixel < num_pixels)[:, None] & is_channel[None, :]
        total += tl.load(start + place, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(total) / (num_pixels * group_channels)
    total = tl.zeros([block_pixels, block_channels], dtype=tl.float32)
    for first in range(0, num_pixels, block_pixels):
        pixel = first + tl.arange(0, block_pixels)
        place = pixel // width * stride_row + pixel % width * stride_col
        place = place[:, None] + (channel * stride_channel)[None, :]
        mask = (pixel < num_pixels)[:, None] & is_channel[None, :]
        deviation = tl.where(mask, tl.load(start + place, mask=mask, other=0.0).to(tl.float32) - mean, 0.0)
        total += deviation * deviation
    out = patch * tl.num_programs(1) + group
    tl.store(means + out, mean)
    tl.store(squares + out, tl.sum(total))


@TritonKernel
def merge_stats_kernel(
    means,
    squares,
    request_index,
    mean,
    rstd,
    num_patches,
    count,
    eps,
    block_patches: tl.constexpr,
):
    """Merge one group of all patches of one request; `count` is the number of values of a group of a patch.

    Every program reads the whole request index, a few kilobytes that all share, so that no offsets are needed.
    """
    request = tl.program_id(0)
    group = tl.program_id(1)
    num_groups = tl.num_programs(1)
    total = tl.zeros([block_patches], dtype=tl.float32)
    num_mine = tl.zeros([block_patches], dtype=tl.float32)
    for first in range(0, num_patches, block_patches):
        patch = first + tl.arange(0, block_patches)
        is_mine = tl.load(request_index + patch, mask=patch < num_patches, other=-1) == request
        total += tl.load(means + patch * num_groups + group, mask=is_mine, other=0.0)
        num_mine += is_mine.to(tl.float32)
    num = tl.maximum(tl.sum(num_mine), 1.0)
    request_mean = tl.sum(total) / num
    total = tl.zeros([block_patches], dtype=tl.float32)
    for first in range(0, num_patches, block_patches):
        patch = first + tl.arange(0, block_patches)
        is_mine = tl.load(request_index + patch, mask=patch < num_patches, other=-1) == request
        place = patch * num_groups + group
        shift = tl.load(means + place, mask=is_mine, other=0.0) - request_mean
        merged = tl.load(squares + place, mask=is_mine, other=0.0) + count * shift * shift
        total += tl.where(is_mine, merged, 0.0)
    variance = tl.sum(total) / (num * count)
    out = request * num_groups + group
    tl.store(mean + out, request_mean)
    tl.store(rstd + out, 1.0 / tl.sqrt_rn(variance + eps))


def _group_norm_stats_triton(
    x: torch.Tensor, request_index: torch.Tensor, num_requests: int, num_groups: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    num_patches, channels, height, width = x.shape
    group_channels = channels // num_groups
    block_channels = power_of_two(group_channels)
    means, squares = x.new_empty((2, num_patches, num_groups), dtype=torch.float32)
    mean, rstd = x.new_empty((2, num_requests, num_groups), dtype=torch.float32)
    patch_stats_kernel.launch(
        (num_patches, num_groups),
        x.device,
        *(x, means, squares, group_channels, *x.stride()),
        height=height,
        width=width,
        block_pixels=min(power_of_two(height * width), max(1, 2048 // block_channels)),
        block_channels=block_channels,
    )
    merge_stats_kernel.launch(
        (num_requests, num_groups),
        x.device,
        *(means, squares, request_index.contiguous(), mean, rstd),
        *(num_patches, group_channels * height * width, eps),
        block_patches=min(1024, power_of_two(num_patches)),
    )
    return mean, rstd
