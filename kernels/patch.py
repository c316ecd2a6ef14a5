"""Patch split and join: divide images into square patches and reassemble them.

    patches[(b * rows + r) * cols + c, :, i, j] = images[b, :, r * p + i, c * p + j]

Patches of an image are ordered row by row, as in `PatchLayout`. Source: PatchedServe section 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .launch import TritonKernel, ceil_div, check_patches, empty_channels_last, tile, use_triton

if TYPE_CHECKING:
    import triton.language as tl


def patch_split(
    images: torch.Tensor | Sequence[torch.Tensor], patch_size: int, *, kernels: str = "auto"
) -> torch.Tensor:
    """Return the patches of all images, one image after the other.

    Args:
        images: a batch (n, C, H, W) of one resolution, or several such batches, each of its own resolution, in the
            order of their patches; any dtype, fastest in channels-last format.
        patch_size: side of a patch in pixels; it must divide every H and W.
        kernels: one of `KERNELS`.

    Returns:
        (P, C, patch_size, patch_size), channels-last.

    Raises:
        ValueError: there is no batch, shapes, dtypes or devices do not fit, or `kernels` cannot be used.
    """
    batches = [images] if isinstance(images, torch.Tensor) else list(images)
    _check_batches(batches, patch_size)
    if use_triton(kernels, batches[0].device):
        return _patch_split_triton(batches, patch_size)
    return patch_split_torch(batches, patch_size)


def patch_join(patches: torch.Tensor, rows: int, cols: int, *, kernels: str = "auto") -> torch.Tensor:
    """Return the images of one resolution from their patches; the inverse of `patch_split` of one batch.

    Args:
        patches: (n * rows * cols, C, p, p) of any dtype, fastest in channels-last format.
        rows, cols: number of rows and columns of patches in an image.
        kernels: one of `KERNELS`.

    Returns:
        (n, C, rows * p, cols * p), channels-last.

    Raises:
        ValueError: the patches are not a whole number of images, or `kernels` cannot be used.
    """
    check_patches(patches)
    if rows < 1 or cols < 1 or patches.shape[0] % (rows * cols):
        raise ValueError(f"{patches.shape[0]} patches do not make images of {rows} rows and {cols} columns")
    if use_triton(kernels, patches.device):
        return _patch_join_triton(patches, rows, cols)
    return patch_join_torch(patches, rows, cols)


def patch_split_torch(images: torch.Tensor | Sequence[torch.Tensor], patch_size: int) -> torch.Tensor:
    """Torch reference of `patch_split`; arguments are not checked."""
    batches = [images] if isinstance(images, torch.Tensor) else images
    out = _empty_patches(batches, patch_size)
    parts = out.permute(0, 2, 3, 1).split([_num_patches(batch, patch_size) for batch in batches])
    for batch, part in zip(batches, parts, strict=True):
        num, channels, height, width = batch.shape
        grid = (num, height // patch_size, width // patch_size, patch_size, patch_size, channels)
        pixels = batch.permute(0, 2, 3, 1).unflatten(2, (-1, patch_size)).unflatten(1, (-1, patch_size))
        part.view(grid).copy_(pixels.transpose(2, 3))
    return out


def patch_join_torch(patches: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Torch reference of `patch_join`; arguments are not checked."""
    out = _empty_images(patches, rows, cols)
    num_patches, channels, height, width = patches.shape
    pixels = patches.permute(0, 2, 3, 1).unflatten(0, (num_patches // (rows * cols), rows, cols)).transpose(2, 3)
    out.permute(0, 2, 3, 1).view(-1, rows, height, cols, width, channels).copy_(pixels)
    return out


@TritonKernel
def patch_move_kernel(
    images,
    patches,
    num_channels,
    image_stride,
    image_stride_channel,
    image_stride_row,
    image_stride_col,
    patch_stride,
    patch_stride_channel,
    patch_stride_row,
    patch_stride_col,
    rows,
    cols,
    height: tl.constexpr,
    width: tl.constexpr,
    is_join: tl.constexpr,
    block_pixels: tl.constexpr,
    block_channels: tl.constexpr,
):
    """Copy one tile of one patch from the image to the patch or, if `is_join`, back."""
    patch = tl.program_id(0).to(tl.int64)
    pixel = tl.program_id(1) * block_pixels + tl.arange(0, block_pixels)
    channel = tl.program_id(2) * block_channels + tl.arange(0, block_channels)
    row = pixel // width
    col = pixel % width
    grid_row = (patch // cols) % rows
    grid_col = patch % cols
    in_image = (
        patch // (rows * cols) * image_stride
        + (grid_row * height + row) * image_stride_row
        + (grid_col * width + col) * image_stride_col
    )
    in_patch = patch * patch_stride + row * patch_stride_row + col * patch_stride_col
    image_place = images + in_image[:, None] + channel[None, :] * image_stride_channel
    patch_place = patches + in_patch[:, None] + channel[None, :] * patch_stride_channel
    mask = (pixel < height * width)[:, None] & (channel < num_channels)[None, :]
    if is_join:
        tl.store(image_place, tl.load(patch_place, mask=mask), mask=mask)
    else:
        tl.store(patch_place, tl.load(image_place, mask=mask), mask=mask)


def _patch_split_triton(batches: Sequence[torch.Tensor], patch_size: int) -> torch.Tensor:
    out = _empty_patches(batches, patch_size)
    parts = out.split([_num_patches(batch, patch_size) for batch in batches])
    for batch, part in zip(batches, parts, strict=True):
        _launch(batch, part, batch.shape[2] // patch_size, batch.shape[3] // patch_size, is_join=False)
    return out


def _patch_join_triton(patches: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    out = _empty_images(patches, rows, cols)
    _launch(out, patches, rows, cols, is_join=True)
    return out


def _launch(images: torch.Tensor, patches: torch.Tensor, rows: int, cols: int, *, is_join: bool) -> None:
    num_patches, channels, height, width = patches.shape
    block_pixels, block_channels = tile(height * width, channels)
    patch_move_kernel.launch(
        (num_patches, ceil_div(height * width, block_pixels), ceil_div(channels, block_channels)),
        images.device,
        *(images, patches, channels, *images.stride(), *patches.stride(), rows, cols),
        height=height,
        width=width,
        is_join=is_join,
        block_pixels=block_pixels,
        block_channels=block_channels,
    )


def _num_patches(batch: torch.Tensor, patch_size: int) -> int:
    num, _, height, width = batch.shape
    return num * (height // patch_size) * (width // patch_size)


def _empty_patches(batches: Sequence[torch.Tensor], patch_size: int) -> torch.Tensor:
    num_patches = sum(_num_patches(batch, patch_size) for batch in batches)
    return empty_channels_last(batches[0], num_patches, batches[0].shape[1], patch_size, patch_size)


def _empty_images(patches: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    num_patches, channels, height, width = patches.shape
    return empty_channels_last(patches, num_patches // (rows * cols), channels, rows * height, cols * width)


def _check_batches(batches: Sequence[torch.Tensor], patch_size: int) -> None:
    if not batches:
        raise ValueError("there are no images to split")
    for batch in batches:
        if batch.dim() != 4 or 0 in batch.shape[1:]:
            raise ValueError(f"images have shape {tuple(batch.shape)}, but must be (images, channels, height, width)")
        if patch_size < 1 or batch.shape[2] % patch_size or batch.shape[3] % patch_size:
            raise ValueError(f"patch size {patch_size} does not divide images of {batch.shape[2]}x{batch.shape[3]}")
        given, first = (batch.shape[1], batch.dtype, batch.device), batches[0]
        if given != (first.shape[1], first.dtype, first.device):
            raise ValueError(
                f"images have {batch.shape[1]} channels of {batch.dtype} on {batch.device}, "
                f"others {first.shape[1]} of {first.dtype} on {first.device}; they must be alike"
            )
