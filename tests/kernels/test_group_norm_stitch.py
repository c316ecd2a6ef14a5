"""kernels/group_norm_stitch.py compared with group_norm, F.silu and F.conv2d of whole images."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from patchedserve.kernels.group_norm_stats import group_norm_stats
from patchedserve.kernels.group_norm_stitch import group_norm_apply, group_norm_silu_stitch

from .batches import DTYPES, MIX_IDS, MIXES, TOLERANCE, Batch, cut_all, random_batch
from .conftest import RunTriton

EPS = 1e-5


def _affine(channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(channels, generator=generator), torch.randn(channels, generator=generator)


def _expected(batch: Batch, num_groups: int, *, activation: bool) -> list[torch.Tensor]:
    weight, bias = _affine(batch.patches.shape[1])
    # F.group_norm is equivalent but refuses an image of one pixel.
    images = [torch.group_norm(image.float(), num_groups, weight, bias, EPS) for image in batch.images]
    return [F.silu(image) if activation else image for image in images]


def _arguments(batch: Batch, num_groups: int) -> tuple[torch.Tensor, ...]:
    index = batch.request_index
    statistics = group_norm_stats(batch.patches, index, len(batch.layout.order), num_groups, EPS)
    return (batch.patches, *statistics, *_affine(batch.patches.shape[1]), index)


def _both(run_triton: RunTriton, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    return [function(*args, **kwargs), run_triton(function, *args, **kwargs)]


@pytest.mark.product(most=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "activation"), [(torch.float32, False), *((dtype, True) for dtype in DTYPES)], ids=str
)
@pytest.mark.parametrize(("sizes", "patch_size"), MIXES, ids=MIX_IDS)
def test_norm_and_border_of_whole_images(
    sizes: list[tuple[int, int]], patch_size: int, activation: bool, dtype: torch.dtype, run_triton: RunTriton
) -> None:
    tolerance = TOLERANCE[dtype]
    for channels, num_groups, halo in ((6, 2, 1), (5, 5, patch_size)):
        batch = random_batch(sizes, patch_size, channels, dtype=dtype)
        images = _expected(batch, num_groups, activation=activation)
        arguments = _arguments(batch, num_groups)
        for applied in _both(run_triton, group_norm_apply, *arguments, activation=activation):
            assert applied.dtype == dtype
            assert applied.is_contiguous(memory_format=torch.channels_last)
            torch.testing.assert_close(applied.float(), cut_all(images, patch_size), rtol=tolerance, atol=tolerance)
        expected = cut_all(images, patch_size + 2 * halo, halo, patch_size)
        neighbours = batch.neighbours
        for padded in _both(
            run_triton, group_norm_silu_stitch, *arguments, neighbours, activation=activation, halo=halo
        ):
            assert padded.dtype == dtype
            assert padded.is_contiguous(memory_format=torch.channels_last)
            torch.testing.assert_close(padded.float(), expected, rtol=tolerance, atol=tolerance)
            assert (padded[expected == 0] == 0).all(), "the border beyond the image is exactly zero"


@pytest.mark.parametrize(("sizes", "patch_size"), MIXES, ids=MIX_IDS)
def test_norm_silu_convolution_of_patches_equals_that_of_images(sizes: list[tuple[int, int]], patch_size: int) -> None:
    batch = random_batch(sizes, patch_size, 8)
    kernel = torch.randn(4, 8, 3, 3, generator=torch.Generator().manual_seed(2)) / 8
    padded = group_norm_silu_stitch(*_arguments(batch, 4), neighbours=batch.neighbours)
    expected = [F.conv2d(image, kernel, padding=1) for image in _expected(batch, 4, activation=True)]
    torch.testing.assert_close(F.conv2d(padded, kernel), cut_all(expected, patch_size), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_every_border_pixel_is_written_by_its_owner(run_triton: RunTriton) -> None:
    """The fused kernel scatters, the reference gathers: both are equal to the bit if the norm is the identity."""
    batch = random_batch([(8, 8), (12, 4), (4, 4), (8, 12)], 4, 3)
    mean, rstd = torch.zeros(4, 1), torch.ones(4, 1)
    arguments = (batch.patches, mean, rstd, torch.ones(3), torch.zeros(3), batch.request_index)
    for halo in (1, 2, 4):
        padded = run_triton(group_norm_silu_stitch, *arguments, batch.neighbours, activation=False, halo=halo)
        assert torch.equal(padded, cut_all(batch.images, 4 + 2 * halo, halo, 4))


def test_more_channels_and_pixels_than_a_tile(run_triton: RunTriton) -> None:
    batch = random_batch([(8, 16)], 8, 130)
    expected = cut_all(_expected(batch, 2, activation=True), 10, 1, 8)
    padded = run_triton(group_norm_silu_stitch, *_arguments(batch, 2), batch.neighbours)
    torch.testing.assert_close(padded, expected, rtol=2e-5, atol=2e-5)


def test_any_strides_and_narrow_types(run_triton: RunTriton) -> None:
    batch = random_batch([(8, 12), (4, 4)], 4, 6)
    x, mean, rstd, weight, bias, index = _arguments(batch, 2)
    neighbours = batch.neighbours
    expected = group_norm_silu_stitch(x, mean, rstd, weight.half(), bias.half(), index, neighbours)
    wide = torch.cat([batch.patches, batch.patches], dim=1)[:, 6:]
    for given in (batch.patches.contiguous(), wide):
        arguments = (given, mean, rstd, weight.half(), bias.half(), index.int(), neighbours.int())
        for padded in _both(run_triton, group_norm_silu_stitch, *arguments):
            torch.testing.assert_close(padded, expected, rtol=1e-5, atol=1e-5)
            assert padded.is_contiguous(memory_format=torch.channels_last)


def test_no_patches(run_triton: RunTriton) -> None:
    x, index = torch.empty(0, 4, 3, 3), torch.empty(0, dtype=torch.int64)
    arguments = (x, torch.zeros(1, 2), torch.ones(1, 2), torch.ones(4), torch.zeros(4), index)
    neighbours = torch.empty(0, 8, dtype=torch.int64)
    for padded in _both(run_triton, group_norm_silu_stitch, *arguments, neighbours):
        assert padded.shape == (0, 4, 5, 5)
    for applied in _both(run_triton, group_norm_apply, *arguments):
        assert applied.shape == (0, 4, 3, 3)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.zeros(2, 4, 2)}, "x has shape"),
        ({"x": torch.zeros(2, 4, 2, 2).double()}, "x is torch.float64"),
        ({"mean": torch.zeros(1, 3)}, r"rstd is \(1, 2\) torch.float32, but must be"),
        ({"mean": torch.zeros(1, 3), "rstd": torch.zeros(1, 3)}, "3 groups, which do not divide 4 channels"),
        ({"rstd": torch.zeros(1, 2).half()}, r"rstd is \(1, 2\) torch.float16, but must be"),
        ({"weight": torch.zeros(3)}, r"weight is \(3,\)"),
        ({"bias": torch.zeros(4, dtype=torch.int64)}, r"bias is \(4,\) torch.int64, but must be"),
        ({"request_index": torch.zeros(3, dtype=torch.int64)}, r"request_index is \(3,\)"),
        ({"neighbours": torch.zeros(2, 4, dtype=torch.int64)}, r"neighbours is \(2, 4\)"),
        ({"halo": 3}, "halo is 3, but it must be from 1 to 2"),
        ({"kernels": "cuda"}, "kernels is 'cuda', but it must be one of auto, torch, triton"),
    ],
)
def test_invalid_arguments_are_refused(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "x": torch.zeros(2, 4, 2, 2),
        "mean": torch.zeros(1, 2),
        "rstd": torch.ones(1, 2),
        "weight": torch.ones(4),
        "bias": torch.zeros(4),
        "request_index": torch.zeros(2, dtype=torch.int64),
        "neighbours": torch.full((2, 8), -1),
    }
    with pytest.raises(ValueError, match=message):
        group_norm_silu_stitch(**(arguments | changed))
