"""The cache's cost in quality: images of one size are measured together."""

import numpy as np
import pytest
import torch
from PIL import Image

from patchedserve.eval.cache.quality import similarity
from patchedserve.eval.metrics.features import features_of_images
from patchedserve.eval.metrics.ssim import ssim

from ...support.eval_cases import Means, numbered_images

pytest.importorskip("torchmetrics", reason="the extra `eval` is not installed")


def test_cache_quality_is_measured_in_full_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    originals = [Image.fromarray(image) for image in numbered_images(12, ((16, 16), (16, 24)))]
    noise = np.random.default_rng(0)
    images = [
        Image.fromarray(noise.integers(0, 256, (*image.size[::-1], 3), dtype=np.uint8)) if i % 3 else image
        for i, image in enumerate(originals)
    ]
    counts: list[int] = []

    def counting(images: torch.Tensor, references: torch.Tensor) -> torch.Tensor:
        counts.append(len(images))
        return ssim(images, references)

    monkeypatch.setattr("patchedserve.eval.metrics.measure.ssim", counting)
    found = similarity(images, originals, None)
    assert counts == [6, 6]
    one_by_one = [
        float(ssim(*(torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] for image in pair))[0])
        for pair in zip(images, originals, strict=True)
    ]
    assert found["ssim"] == pytest.approx(one_by_one)
    network = Means()
    assert torch.equal(features_of_images(enumerate(originals), network), torch.arange(12.0)[:, None].expand(12, 3))
    assert network.counts == [6, 6]
