"""kernels/halo.py compared with windows of the padded image (equal to the bit) and convolutions of whole images."""

import pytest
import torch
import torch.nn.functional as F

from patchedserve.kernels.halo import halo_gather

from .batches import DTYPES, MIX_IDS, MIXES, cut_all, random_batch
from .conftest import RunTriton


@pytest.mark.product
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("sizes", "patch_size"), MIXES, ids=MIX_IDS)
def test_halo_is_the_image_around_the_patch(
    sizes: list[tuple[int, int]], patch_size: int, dtype: torch.dtype, run_triton: RunTriton
) -> None:
    for channels, halo in ((1, 1), (7, 1), (3, patch_size)):
        batch = random_batch(sizes, patch_size, channels, dtype=dtype)
        expected = cut_all(batch.images, patch_size + 2 * halo, halo, patch_size)
        assert torch.equal(halo_gather(batch.patches, batch.neighbours, halo), expected)
        padded = run_triton(halo_gather, batch.patches, batch.neighbours, halo)
        assert torch.equal(padded, expected)
        assert padded.dtype == dtype
        assert padded.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("sizes", "patch_size", "side", "stride"),
    [
        pytest.param(*mix, side, stride, id=f"{name}-{side}-{stride}")
        for mix, name in zip(MIXES, MIX_IDS, strict=True)
        for side, stride in ((3, 1), (3, 2), (5, 1))
        if mix[1] % stride == 0 and side // 2 <= mix[1]
    ],
)
def test_convolution_of_patches_equals_that_of_images(
    sizes: list[tuple[int, int]], patch_size: int, side: int, stride: int
) -> None:
    halo = side // 2
    batch = random_batch(sizes, patch_size, 6)
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(4, 6, side, side, generator=generator), torch.randn(4, generator=generator)
    padded = halo_gather(batch.patches, batch.neighbours, halo)
    expected = [F.conv2d(image, weight, bias, stride=stride, padding=halo) for image in batch.images]
    torch.testing.assert_close(
        F.conv2d(padded, weight, bias, stride=stride), cut_all(expected, patch_size // stride), rtol=1e-5, atol=2e-5
    )


def test_any_strides_and_sides(run_triton: RunTriton) -> None:
    batch = random_batch([(8, 12), (4, 4)], 4, 10)
    expected = halo_gather(batch.patches, batch.neighbours)
    plain = batch.patches.contiguous()
    sliced = torch.cat([batch.patches, batch.patches], dim=1)[:, 10:]
    for x in (plain, sliced):
        assert torch.equal(halo_gather(x, batch.neighbours), expected)
        assert torch.equal(run_triton(halo_gather, x, batch.neighbours.int()), expected)
    # Patches need not be square: each is the upper half of a square one, 2 high and 4 wide.
    upper = batch.patches[:, :, :2]
    assert torch.equal(run_triton(halo_gather, upper, batch.neighbours, 2), halo_gather(upper, batch.neighbours, 2))


def test_more_channels_and_pixels_than_a_tile(run_triton: RunTriton) -> None:
    batch = random_batch([(8, 16)], 8, 130)
    expected = cut_all(batch.images, 10, 1, 8)
    assert torch.equal(run_triton(halo_gather, batch.patches, batch.neighbours), expected)


def test_infinity_does_not_leak_into_other_images(run_triton: RunTriton) -> None:
    batch = random_batch([(4, 4), (4, 8)], 4, 2)
    batch.patches[0] = float("inf")
    for padded in (
        halo_gather(batch.patches, batch.neighbours),
        run_triton(halo_gather, batch.patches, batch.neighbours),
    ):
        assert padded[1:].isfinite().all()
        assert (padded[0, :, 0] == 0).all()


def test_no_patches(run_triton: RunTriton) -> None:
    x, neighbours = torch.empty(0, 3, 4, 4), torch.empty(0, 8, dtype=torch.int64)
    assert halo_gather(x, neighbours).shape == (0, 3, 6, 6)
    assert run_triton(halo_gather, x, neighbours).shape == (0, 3, 6, 6)


@pytest.mark.parametrize(
    ("x", "neighbours", "halo", "message"),
    [
        (torch.zeros(2, 3, 4), torch.zeros(2, 8, dtype=torch.int64), 1, r"x has shape \(2, 3, 4\)"),
        (torch.zeros(2, 0, 4, 4), torch.zeros(2, 8, dtype=torch.int64), 1, r"x has shape \(2, 0, 4, 4\)"),
        (torch.zeros(2, 3, 4, 4), torch.zeros(3, 8, dtype=torch.int64), 1, r"must be \(2, 8\) of int32 or int64"),
        (torch.zeros(2, 3, 4, 4), torch.zeros(2, 8), 1, "torch.float32 on cpu, but it must be"),
        (torch.zeros(2, 3, 4, 4), torch.zeros(2, 8, dtype=torch.int64), 0, "halo is 0, but it must be from 1 to 4"),
        (torch.zeros(2, 3, 4, 2), torch.zeros(2, 8, dtype=torch.int64), 3, "halo is 3, but it must be from 1 to 2"),
    ],
)
def test_invalid_arguments_are_refused(x: torch.Tensor, neighbours: torch.Tensor, halo: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        halo_gather(x, neighbours, halo)
