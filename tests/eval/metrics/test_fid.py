"""Frechet distance compared with an independent computation, PSNR by hand, and the input of metrics."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from PIL import Image
from torch import nn

from patchedserve.data.errors import UsageError
from patchedserve.eval.metrics.features import features_of_images
from patchedserve.eval.metrics.fid import fid, frechet_distance
from patchedserve.eval.metrics.images import batches_by_size, to_array, to_pil
from patchedserve.eval.metrics.psnr import psnr

from ...support.eval_cases import torchmetrics_fid


def _frechet(real: np.ndarray, generated: np.ndarray) -> float:
    """Compute the definition with scipy's matrix square root."""
    root = scipy.linalg.sqrtm(np.cov(real, rowvar=False) @ np.cov(generated, rowvar=False))
    means = real.mean(0) - generated.mean(0)
    traces = np.trace(np.cov(real, rowvar=False)) + np.trace(np.cov(generated, rowvar=False))
    return float(means @ means + traces - 2 * np.trace(np.real(root)))


def _features(count: int, seed: int, shift: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, 12)) @ np.random.default_rng(9).normal(size=(12, 12)) + shift


class _Colours(nn.Module):
    """A feature network for results by hand: the mean of each colour."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.float().mean((2, 3))


@pytest.mark.parametrize("shift", [0.0, 0.7])
def test_frechet_distance_equals_scipy_and_torchmetrics(shift: float) -> None:
    real, generated = _features(300, 0), _features(200, 1, shift) * 1.3
    sides = torch.from_numpy(real), torch.from_numpy(generated)
    result = fid(*sides, num_resamples=2)
    assert result.n == 200
    assert result.value == frechet_distance(*sides) == pytest.approx(_frechet(real, generated), rel=1e-6)
    pytest.importorskip("torchmetrics", reason="the extra `eval` is not installed")
    assert result.value == pytest.approx(torchmetrics_fid(*sides), rel=1e-6)


def test_features_in_chunks_and_fewer_than_dimensions() -> None:
    real, generated = torch.from_numpy(_features(8, 2)), torch.from_numpy(_features(9, 3))
    assert frechet_distance(real, generated) > 0
    images = [Image.fromarray(np.full((4, 4, 3), level, np.uint8)) for level in (10, 30, 90, 200, 70)]
    one, other = (
        frechet_distance(*(features_of_images(enumerate(side), _Colours(), size) for side in (images[:3], images[2:])))
        for size in (1, 32)
    )
    assert one == pytest.approx(other)
    assert frechet_distance(real, real) == pytest.approx(0, abs=1e-6)


def test_fid_of_images_of_any_size_equals_fid_of_features() -> None:
    rng = np.random.default_rng(0)
    real = [rng.integers(0, 256, (6, 4, 3), dtype=np.uint8) for _ in range(20)]
    generated = [rng.integers(0, 200, (4 + i % 2 * 4, 8, 3), dtype=np.uint8) for i in range(21)]
    means = [np.array([image.mean((0, 1)) for image in side]) for side in (real, generated)]
    sides = iter(real), (to_pil(image) for image in generated)
    features = [features_of_images(enumerate(side), _Colours(), batch_size=8) for side in sides]
    assert frechet_distance(*features) == pytest.approx(_frechet(*means), rel=1e-4)
    assert [len(side) for side in features] == [20, 21]


def test_fid_refuses_too_few_images_and_mismatched_features() -> None:
    with pytest.raises(UsageError, match="1 generated"):
        frechet_distance(torch.zeros(3, 2), torch.zeros(1, 2))
    with pytest.raises(UsageError, match="0 real"):
        fid(torch.zeros(0, 2), torch.zeros(3, 2))
    with pytest.raises(UsageError, match="must be"):
        fid(torch.zeros(3, 2), torch.zeros(3, 4))


def test_psnr_matches_manual_values() -> None:
    reference = np.zeros((2, 2, 3), np.uint8)
    image = reference.copy()
    image[0, 0, 0] = 12  # mean squared error 144 / 12 = 12
    assert psnr(image, reference) == pytest.approx(20 * math.log10(255) - 10 * math.log10(12))
    assert psnr(reference, image) == psnr(Image.fromarray(image), reference)
    assert psnr(image, image) == math.inf
    black, white = reference, np.full_like(reference, 255)
    assert psnr(black, white) == pytest.approx(0, abs=1e-6)  # wrong with 8-bit arithmetic
    with pytest.raises(UsageError, match="2x2 and 4x2"):
        psnr(reference, np.zeros((2, 4, 3), np.uint8))


def test_batches_contain_images_of_one_size_with_their_keys() -> None:
    images = [np.full((2, width, 3), i, np.uint8) for i, width in enumerate((2, 2, 2, 4, 4, 2))]
    found = list(batches_by_size(enumerate(images), 2))
    assert [tuple(batch.shape) for _, batch in found] == [(2, 3, 2, 2), (2, 3, 2, 4), (2, 3, 2, 2)]
    assert [int(image[0, 0, 0]) for _, batch in found for image in batch] == [0, 1, 3, 4, 2, 5]
    assert [key for keys, _ in found for key in keys] == [0, 1, 3, 4, 2, 5]
    with pytest.raises(UsageError, match="batch size is 0"):
        list(batches_by_size(enumerate(images), 0))


def test_images_of_any_mode_become_uniform_arrays() -> None:
    assert to_array(Image.new("L", (3, 2), 7)).shape == (2, 3, 3)
    assert to_pil(np.full((2, 3, 3), 9, np.uint8)).getpixel((0, 0)) == (9, 9, 9)
    for wrong in (np.zeros((2, 3), np.uint8), np.zeros((2, 3, 4), np.uint8), np.zeros((2, 3, 3), np.float32)):
        with pytest.raises(UsageError, match="uint8"):
            to_array(wrong)
