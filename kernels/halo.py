"""Halo gather: pad every patch with the pixels around it, so that a convolution sees its true neighbours.

    out[p, :, i + halo, j + halo] = image_of(p)[:, i + row_of(p), j + col_of(p)]    for -halo <= i < h + halo, and
                                                                                     so j; zero outside the image

This turns a convolution of the image with padding `halo` into a convolution of the patches without padding, for any
stride that divides the side of a patch. Source: PatchedServe section 4.2.1, "Patch-based Convolution".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .launch import (
    TritonKernel,
    ceil_div,
    check_halo,
    check_index,
    check_patches,
    empty_channels_last,
    tile,
    use_triton,
)

if TYPE_CHECKING:
    import triton.language as tl


def halo_gather(x: torch.Tensor, neighbours: torch.Tensor, halo: int = 1, *, kernels: str = "auto") -> torch.Tensor:
    """Return the patches with a border of `halo` pixels of their neighbours, zero at the edge of the image.

    Args:
        x: (P, C, h, w) patches of any dtype, fastest in channels-last format.
        neighbours: (P, 8) patches to the NW, N, NE, W, E, SW, S, SE; -1 at the edge. Values are not checked.
        halo: width of the border, from 1 to the shorter side of a patch.
        kernels: one of `KERNELS`.

    Returns:
        (P, C, h + 2 halo, w + 2 halo), channels-last.

    Raises:
        ValueError: shapes, devices or `halo` do not fit, or `kernels` cannot be used for this tensor.
    """
    check_patches(x)
    check_index("neighbours", neighbours, (x.shape[0], 8), x.device)
    check_halo(halo, *x.shape[2:])
    if use_triton(kernels, x.device):
        return _halo_gather_triton(x, neighbours, halo)
    return halo_gather_torch(x, neighbours, halo)


def halo_gather_torch(x: torch.Tensor, neighbours: torch.Tensor, halo: int = 1) -> torch.Tensor:
    """Torch reference of `halo_gather`; arguments are not checked."""
    num_patches, channels, height, width = x.shape
    out = empty_channels_last(x, num_patches, channels, height + 2 * halo, width + 2 * halo)
    out[:, :, halo : halo + height, halo : halo + width] = x
    is_edge = neighbours < 0
    source = neighbours.clamp(min=0)
    for k in range(8):
        down, right = divmod(k + k // 4, 3)  # 0, 1, 2; k // 4 skips the patch itself
        from_rows, to_rows = _spans(height, halo)[down]
        from_cols, to_cols = _spans(width, halo)[right]
        strip = x[:, :, from_rows, from_cols].index_select(0, source[:, k])
        # Not a product with 0 and 1: the patch read in place of a missing one may hold infinity.
        strip.masked_fill_(is_edge[:, k, None, None, None], 0)
        out[:, :, to_rows, to_cols] = strip
    return out


def _spans(size: int, halo: int) -> tuple[tuple[slice, slice], ...]:
    """Return the pixels taken from the previous patch, the patch itself and the next patch, and their padded places."""
    return (
        (slice(size - halo, size), slice(0, halo)),
        (slice(0, size), slice(halo, halo + size)),
        (slice(0, halo), slice(halo + size, size + 2 * halo)),
    )


@TritonKernel
def halo_gather_kernel(
    x,
    neighbours,
    out,
    num_channels,
    stride_patch,
    stride_channel,
    stride_row,
    stride_col,
    height: tl.constexpr,
    width: tl.constexpr,
    halo: tl.constexpr,
    block_pixels: tl.constexpr,
    block_channels: tl.constexpr,
):
    """Process one tile of one padded patch; `out` is channels-last, x has any strides."""
    patch = tl.program_id(0).to(tl.int64)
    pixel = tl.program_id(1) * block_pixels + tl.arange(0, block_pixels)
    channel = tl.program_id(2) * block_channels + tl.arange(0, block_channels)
    padded_width = width + 2 * halo
    padded_pixels = (height + 2 * halo) * padded_width
    is_pixel = pixel < padded_pixels
    row = pixel // padded_width - halo
    col = pixel % padded_width - halo
    down = (row >= height).to(tl.int32) - (row < 0).to(tl.int32)
    right = (col >= width).to(tl.int32) - (col < 0).to(tl.int32)
    direction = 3 * down + right + 4  # 4 is the patch itself, which has no column in `neighbours`
    is_own = direction == 4
    place = patch * 8 + direction - direction // 5
    source = tl.load(neighbours + place, mask=is_pixel & (direction != 4), other=-1).to(tl.int64)
    source = tl.where(is_own, patch, source)
    start = source * stride_patch + (row - down * height) * stride_row + (col - right * width) * stride_col
    is_channel = channel < num_channels
    value = tl.load(
        x + start[:, None] + channel[None, :] * stride_channel,
        mask=(is_pixel & (source >= 0))[:, None] & is_channel[None, :],
        other=0,
    )
    target = (patch * padded_pixels + pixel) * num_channels
    tl.store(out + target[:, None] + channel[None, :], value, mask=is_pixel[:, None] & is_channel[None, :])


def _halo_gather_triton(x: torch.Tensor, neighbours: torch.Tensor, halo: int) -> torch.Tensor:
    num_patches, channels, height, width = x.shape
    out = empty_channels_last(x, num_patches, channels, height + 2 * halo, width + 2 * halo)
    num_pixels = out.shape[2] * out.shape[3]
    block_pixels, block_channels = tile(num_pixels, channels)
    halo_gather_kernel.launch(
        (num_patches, ceil_div(num_pixels, block_pixels), ceil_div(channels, block_channels)),
        x.device,
        *(x, neighbours.contiguous(), out, channels, *x.stride()),
        height=height,
        width=width,
        halo=halo,
        block_pixels=block_pixels,
        block_channels=block_channels,
    )
    return out
