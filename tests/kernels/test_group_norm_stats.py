"""kernels/group_norm_stats.py compared with float64 statistics of whole images."""

import math

import pytest
import torch

from patchedserve.kernels.group_norm_stats import group_norm_stats, stats_grid

from .batches import DTYPES, MIX_IDS, MIXES, Batch, random_batch
from .conftest import RunTriton
from .counted import loaded_bytes

EPS = 1e-5


def _expected(images: list[torch.Tensor], num_groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    groups = [image.double().view(num_groups, -1) for image in images]
    variance = torch.stack([group.var(dim=1, correction=0) for group in groups])
    return torch.stack([group.mean(dim=1) for group in groups]), 1 / (variance + EPS).sqrt()


def _both(run_triton: RunTriton, batch: Batch, num_groups: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return mean and rstd by torch and by Triton."""
    arguments = (batch.patches, batch.request_index, len(batch.layout.order), num_groups, EPS)
    return [group_norm_stats(*arguments), run_triton(group_norm_stats, *arguments)]


@pytest.mark.product
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("sizes", "patch_size"), MIXES, ids=MIX_IDS)
def test_statistics_of_whole_images(
    sizes: list[tuple[int, int]], patch_size: int, dtype: torch.dtype, run_triton: RunTriton
) -> None:
    for channels, num_groups in ((6, 2), (5, 1), (2, 2)):
        batch = random_batch(sizes, patch_size, channels, dtype=dtype)
        expected_mean, expected_rstd = _expected(batch.images, num_groups)
        # Only the inputs are rounded: arithmetic is float32 for every dtype, and so is the tolerance.
        for mean, rstd in _both(run_triton, batch, num_groups):
            assert mean.dtype == rstd.dtype == torch.float32
            torch.testing.assert_close(mean.double(), expected_mean, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(rstd.double(), expected_rstd, rtol=1e-5, atol=0)


def test_group_larger_than_a_tile(run_triton: RunTriton) -> None:
    batch = random_batch([(16, 16)], 8, 144)
    expected_mean, expected_rstd = _expected(batch.images, 2)
    for mean, rstd in _both(run_triton, batch, 2):
        torch.testing.assert_close(mean.double(), expected_mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(rstd.double(), expected_rstd, rtol=1e-5, atol=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="bytes are counted in triton's interpreter")
def test_every_value_is_read_once(run_triton: RunTriton) -> None:
    batch = random_batch([(32, 16), (48, 32)], 16, 40, dtype=torch.float16)
    loads = run_triton(loaded_bytes, group_norm_stats, batch.patches, batch.request_index, 2, 4, EPS)
    assert loads["fp16"] == batch.patches.nbytes


@pytest.mark.parametrize(("side", "channels"), [(64, 320), (32, 640), (16, 1280)])
def test_a_lone_image_fills_a_gpu(side: int, channels: int) -> None:
    """Four programs for each of 132 processors, at every level of SDXL for a guided image of 512 px."""
    grid, (block_pixels, block_channels) = stats_grid(2, side**2, channels)
    assert math.prod(grid) >= 4 * 132
    assert grid[1] * block_pixels == side**2
    assert grid[2] * block_channels == channels


def test_parts_of_different_sizes_are_weighted(run_triton: RunTriton) -> None:
    """The last part of the 35 pixels of a patch is smaller than the others, and means differ from part to part."""
    assert stats_grid(3, 35, 256)[1][0] < 35
    patches = torch.randn(3, 256, 5, 7, generator=torch.Generator().manual_seed(3))
    patches += torch.linspace(0, 9, 35).view(5, 7)
    index = torch.tensor([0, 0, 1])
    for mean, rstd in (
        group_norm_stats(patches, index, 2, 8, EPS),
        run_triton(group_norm_stats, patches, index, 2, 8, EPS),
    ):
        for row, own in enumerate((patches[:2], patches[2:])):
            groups = own.double().transpose(0, 1).reshape(8, -1)
            torch.testing.assert_close(mean[row].double(), groups.mean(1), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(
                rstd[row].double(), (groups.var(1, correction=0) + EPS).rsqrt(), rtol=1e-5, atol=0
            )


def test_large_mean_keeps_the_variance_accurate(run_triton: RunTriton) -> None:
    batch = random_batch([(8, 8), (4, 8)], 4, 8, mean=4096.0)
    _, expected_rstd = _expected(batch.images, 4)
    in_one_pass = batch.images[0].view(4, -1)
    in_one_pass = in_one_pass.square().mean(1) - in_one_pass.mean(1).square()
    assert ((in_one_pass + EPS).rsqrt() / expected_rstd[0] - 1).abs().max() > 0.1, "too easy a test"
    # A float32 mean near 4096 has an error of up to 2.4e-4 of the standard deviation, hence the 1e-4.
    for _, rstd in _both(run_triton, batch, 4):
        torch.testing.assert_close(rstd.double(), expected_rstd, rtol=1e-4, atol=0)


def test_constant_image_has_zero_variance(run_triton: RunTriton) -> None:
    batch = random_batch([(8, 8)], 4, 4)
    batch.patches.fill_(3.0)
    for mean, rstd in _both(run_triton, batch, 2):
        assert torch.equal(mean, torch.full((1, 2), 3.0))
        torch.testing.assert_close(rstd, torch.full((1, 2), EPS**-0.5))


def test_requests_are_independent_of_their_batch(run_triton: RunTriton) -> None:
    """Results are equal to the bit if other requests have other values, and up to rounding without other requests."""
    batch = random_batch([(8, 8), (4, 8), (4, 4)], 4, 6)
    together = _both(run_triton, batch, 2)
    batch.patches[batch.request_index == 1] = float("nan")
    for before, after in zip(together, _both(run_triton, batch, 2), strict=True):
        for old, new in zip(before, after, strict=True):
            assert torch.equal(old[[0, 2]], new[[0, 2]])
            assert new[1].isnan().all()
    last = batch.request_index == 2
    alone = (batch.patches[last], torch.zeros(int(last.sum()), dtype=torch.int64), 1, 2, EPS)
    for before, after in zip(together, [group_norm_stats(*alone), run_triton(group_norm_stats, *alone)], strict=True):
        for old, new in zip(before, after, strict=True):
            torch.testing.assert_close(old[2], new[0], rtol=1e-6, atol=1e-7)


def test_plain_memory_format_and_int32_index(run_triton: RunTriton) -> None:
    batch = random_batch([(8, 8), (4, 8)], 4, 6)
    expected = _both(run_triton, batch, 2)
    batch.patches = batch.patches.contiguous()
    batch.request_index = batch.request_index.int()
    for before, after in zip(expected, _both(run_triton, batch, 2), strict=True):
        for old, new in zip(before, after, strict=True):
            torch.testing.assert_close(old, new, rtol=1e-6, atol=1e-6)


def test_no_patches_and_request_without_patches(run_triton: RunTriton) -> None:
    for x, request_index in (
        (torch.empty(0, 4, 2, 2), torch.empty(0, dtype=torch.int64)),
        (torch.ones(1, 4, 2, 2), torch.tensor([1])),
    ):
        for mean, rstd in (
            group_norm_stats(x, request_index, 2, 2, EPS),
            run_triton(group_norm_stats, x, request_index, 2, 2, EPS),
        ):
            assert torch.equal(mean[0], torch.zeros(2))
            torch.testing.assert_close(rstd[0], torch.full((2,), EPS**-0.5))


@pytest.mark.parametrize(
    ("x", "request_index", "num_groups", "message"),
    [
        (torch.zeros(2, 4, 2), torch.zeros(2, dtype=torch.int64), 2, "x has shape"),
        (torch.zeros(2, 4, 2, 2).double(), torch.zeros(2, dtype=torch.int64), 2, "x is torch.float64"),
        (torch.zeros(2, 4, 2, 2), torch.zeros(3, dtype=torch.int64), 2, r"request_index is \(3,\)"),
        (torch.zeros(2, 4, 2, 2), torch.zeros(2, dtype=torch.int64), 3, "groups is 3, but it must divide the 4"),
        (torch.zeros(2, 4, 2, 2), torch.zeros(2, dtype=torch.int64), 0, "groups is 0, but it must divide the 4"),
    ],
)
def test_invalid_arguments_are_refused(
    x: torch.Tensor, request_index: torch.Tensor, num_groups: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        group_norm_stats(x, request_index, 1, num_groups, EPS)
