"""Frechet distance against an independent computation, PSNR by hand, and images as metrics take them."""

import importlib.util
import math

import numpy as np
import pytest
import scipy.linalg
import torch
from PIL import Image
from torch import nn

from patchedserve.data.errors import UsageError
from patchedserve.eval.metrics.fid import FidMeter, fid_of_features, fid_of_images
from patchedserve.eval.metrics.images import batches, to_array, to_pil
from patchedserve.eval.metrics.psnr import psnr

needs_torchmetrics = pytest.mark.skipif(
    importlib.util.find_spec("torchmetrics") is None, reason="the extra `eval` is not installed"
)


def _frechet(real: np.ndarray, generated: np.ndarray) -> float:
    """The definition, with scipy's matrix square root."""
    root = scipy.linalg.sqrtm(np.cov(real, rowvar=False) @ np.cov(generated, rowvar=False))
    means = real.mean(0) - generated.mean(0)
    traces = np.trace(np.cov(real, rowvar=False)) + np.trace(np.cov(generated, rowvar=False))
    return float(means @ means + traces - 2 * np.trace(np.real(root)))


def _features(count: int, seed: int, shift: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, 12)) @ np.random.default_rng(9).normal(size=(12, 12)) + shift


class _Colours(nn.Module):
    """A feature network that can be followed by hand: the mean of each colour."""

    num_features = 3

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.float().mean((2, 3))


@needs_torchmetrics
@pytest.mark.parametrize("shift", [0.0, 0.7])
def test_frechet_distance_is_that_of_scipy(shift: float) -> None:
    real, generated = _features(300, 0), _features(200, 1, shift) * 1.3
    result = fid_of_features(torch.from_numpy(real), torch.from_numpy(generated))
    assert (result.num_real, result.num_generated) == (300, 200)
    assert result.fid == pytest.approx(_frechet(real, generated), rel=1e-6)


@needs_torchmetrics
def test_features_may_come_in_pieces_and_more_of_them_than_dimensions_are_not_needed() -> None:
    real, generated = torch.from_numpy(_features(8, 2)), torch.from_numpy(_features(9, 3))
    whole = fid_of_features(real, generated)
    assert whole.fid > 0
    images = [Image.fromarray(np.full((4, 4, 3), level, np.uint8)) for level in (10, 30, 90, 200, 70)]
    one, other = (fid_of_images(images[:3], images[2:], _Colours(), size) for size in (1, 32))
    assert one.fid == pytest.approx(other.fid)
    assert fid_of_features(real, real).fid == pytest.approx(0, abs=1e-6)


@needs_torchmetrics
def test_fid_of_images_is_that_of_their_features_and_sizes_may_differ() -> None:
    rng = np.random.default_rng(0)
    real = [rng.integers(0, 256, (6, 4, 3), dtype=np.uint8) for _ in range(20)]
    generated = [rng.integers(0, 200, (4 + i % 2 * 4, 8, 3), dtype=np.uint8) for i in range(21)]
    means = [np.array([image.mean((0, 1)) for image in side]) for side in (real, generated)]
    found = fid_of_images(iter(real), (to_pil(image) for image in generated), _Colours(), batch_size=8)
    assert found.fid == pytest.approx(_frechet(*means), rel=1e-4)
    assert (found.num_real, found.num_generated) == (20, 21)


@needs_torchmetrics
def test_fid_refuses_too_few_images_and_features_that_do_not_fit() -> None:
    with pytest.raises(UsageError, match="1 generated"):
        fid_of_features(torch.zeros(3, 2), torch.zeros(1, 2))
    with pytest.raises(UsageError, match="0 real"):
        FidMeter(_Colours()).compute()
    with pytest.raises(UsageError, match="must be"):
        fid_of_features(torch.zeros(3, 2), torch.zeros(3, 4))


def test_psnr_by_hand() -> None:
    reference = np.zeros((2, 2, 3), np.uint8)
    image = reference.copy()
    image[0, 0, 0] = 12  # mean squared error 144 / 12 = 12
    assert psnr(image, reference) == pytest.approx(20 * math.log10(255) - 10 * math.log10(12))
    assert psnr(reference, image) == psnr(Image.fromarray(image), reference)
    assert psnr(image, image) == math.inf
    black, white = reference, np.full_like(reference, 255)
    assert psnr(black, white) == pytest.approx(0)  # would be wrong with 8-bit arithmetic
    with pytest.raises(UsageError, match="2x2 and 4x2"):
        psnr(reference, np.zeros((2, 4, 3), np.uint8))


def test_batches_keep_order_and_split_where_the_size_changes() -> None:
    images = [np.full((2, width, 3), i, np.uint8) for i, width in enumerate((2, 2, 2, 4, 4, 2))]
    found = list(batches(images, 2))
    assert [tuple(batch.shape) for batch in found] == [(2, 3, 2, 2), (1, 3, 2, 2), (2, 3, 2, 4), (1, 3, 2, 2)]
    assert [int(image[0, 0, 0]) for batch in found for image in batch] == list(range(6))
    with pytest.raises(UsageError, match="batch size is 0"):
        list(batches(images, 0))


def test_images_of_any_mode_and_arrays_of_one_form() -> None:
    assert to_array(Image.new("L", (3, 2), 7)).shape == (2, 3, 3)
    assert to_pil(np.full((2, 3, 3), 9, np.uint8)).getpixel((0, 0)) == (9, 9, 9)
    for wrong in (np.zeros((2, 3), np.uint8), np.zeros((2, 3, 4), np.uint8), np.zeros((2, 3, 3), np.float32)):
        with pytest.raises(UsageError, match="uint8"):
            to_array(wrong)
