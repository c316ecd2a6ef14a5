"""kernels/patch.py compared with plain slices; splitting and joining moves every pixel and changes none."""

from itertools import pairwise

import pytest
import torch

from patchedserve.kernels.patch import patch_join, patch_split
from patchedserve.serving.layout.patch_layout import PatchLayout

from .batches import DTYPES, MIX_IDS, MIXES, Batch, random_batch
from .conftest import RunTriton


def _by_resolution(batch: Batch) -> list[torch.Tensor]:
    """Return the images as one batch for each resolution."""
    offset = batch.layout.resolution_offset
    return [torch.cat(batch.images[start:end]) for start, end in pairwise(offset)]


def _grids(layout: PatchLayout) -> list[tuple[slice, int, int]]:
    """Return patches, rows and columns of each resolution."""
    offset = layout.resolution_patch_offset.tolist()
    slices = [slice(start, end) for start, end in pairwise(offset)]
    grid = layout.grid[layout.resolution_offset[:-1]].tolist()
    return [(patches, rows, cols) for patches, (rows, cols) in zip(slices, grid, strict=True)]


@pytest.mark.product
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64], ids=str)
@pytest.mark.parametrize(("sizes", "patch_size"), MIXES, ids=MIX_IDS)
def test_split_and_join_round_trip(
    sizes: list[tuple[int, int]], patch_size: int, dtype: torch.dtype, run_triton: RunTriton
) -> None:
    for channels in (1, 5):
        batch = random_batch(sizes, patch_size, channels, dtype=dtype)
        images = _by_resolution(batch)
        for split, join in (
            (patch_split(images, patch_size), patch_join),
            (run_triton(patch_split, images, patch_size), lambda *arguments: run_triton(patch_join, *arguments)),
        ):
            assert torch.equal(split, batch.patches)
            assert split.dtype == dtype
            assert split.is_contiguous(memory_format=torch.channels_last)
            for image, (patches, rows, cols) in zip(images, _grids(batch.layout), strict=True):
                joined = join(split[patches], rows, cols)
                assert torch.equal(joined, image)
                assert joined.is_contiguous(memory_format=torch.channels_last)


def test_one_batch_in_any_memory_format(run_triton: RunTriton) -> None:
    images = torch.randn(2, 3, 8, 12, generator=torch.Generator().manual_seed(0))
    expected = patch_split(images, 4)
    for given in (images, images.to(memory_format=torch.channels_last), torch.cat([images, images], dim=3)[..., 12:]):
        assert torch.equal(patch_split(given, 4), expected)
        assert torch.equal(run_triton(patch_split, given, 4), expected)
    for patches in (expected, expected.contiguous()):
        assert torch.equal(patch_join(patches, 2, 3), images)
        assert torch.equal(run_triton(patch_join, patches, 2, 3), images)


def test_more_channels_and_pixels_than_a_tile(run_triton: RunTriton) -> None:
    images = torch.randn(1, 130, 8, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(run_triton(patch_split, images, 8), patch_split(images, 8))
    assert torch.equal(run_triton(patch_join, patch_split(images, 8), 1, 2), images)


def test_rectangular_patches_are_joined(run_triton: RunTriton) -> None:
    images = torch.randn(1, 2, 4, 9, generator=torch.Generator().manual_seed(0))
    patches = torch.cat([images[:, :, :2, :3], images[:, :, :2, 3:6], images[:, :, :2, 6:]])
    patches = torch.cat([patches, images[:, :, 2:, :3], images[:, :, 2:, 3:6], images[:, :, 2:, 6:]])
    assert torch.equal(patch_join(patches, 2, 3), images)
    assert torch.equal(run_triton(patch_join, patches, 2, 3), images)


def test_no_images(run_triton: RunTriton) -> None:
    images = torch.empty(0, 3, 8, 8)
    assert patch_split(images, 4).shape == run_triton(patch_split, images, 4).shape == (0, 3, 4, 4)
    patches = torch.empty(0, 3, 4, 4)
    assert patch_join(patches, 2, 2).shape == run_triton(patch_join, patches, 2, 2).shape == (0, 3, 8, 8)


@pytest.mark.parametrize(
    ("images", "patch_size", "message"),
    [
        ([], 4, "there are no images"),
        (torch.zeros(3, 8, 8), 4, r"images have shape \(3, 8, 8\)"),
        (torch.zeros(1, 3, 8, 6), 4, "patch size 4 does not divide images of 8x6"),
        (torch.zeros(1, 3, 8, 8), 0, "patch size 0 does not divide"),
        ([torch.zeros(1, 3, 8, 8), torch.zeros(1, 4, 8, 8)], 4, "images have 4 channels .* others 3"),
        ([torch.zeros(1, 3, 8, 8), torch.zeros(1, 3, 4, 4).half()], 4, "float16 on cpu, others 3 of torch.float32"),
    ],
)
def test_invalid_images_are_refused(images: torch.Tensor | list[torch.Tensor], patch_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        patch_split(images, patch_size)


@pytest.mark.parametrize(("rows", "cols"), [(2, 2), (0, 3)])
def test_patches_that_form_no_images_are_refused(rows: int, cols: int) -> None:
    with pytest.raises(ValueError, match=f"6 patches do not make images of {rows} rows and {cols} columns"):
        patch_join(torch.zeros(6, 3, 4, 4), rows, cols)
