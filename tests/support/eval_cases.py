"""A tiny model, sets of images and a feature network, for tests of evaluations."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from patchedserve.data.resolution import Resolution
from patchedserve.eval.sets.generate import Manifest, generation_settings, make_items
from patchedserve.serving.models.served import ServedModel

from .tiny_models import save_tiny, tiny_sdxl

SIZES = (Resolution(32, 32), Resolution(48, 32))


def save_eval_model(path: Path) -> Path:
    """Save a tiny model that draws images of `SIZES` with two steps."""
    return save_tiny(path, tiny_sdxl(), num_inference_steps=2, guidance_scale=3.0, resolutions=["32", "48x32"])


def manifest_of(model: ServedModel, count: int = 5, **changes: Any) -> Manifest:
    """Return a manifest of images for `model` to draw, of both sizes in turn; `changes` replace settings."""
    settings = generation_settings(model.identity, policy="continuous", num_inference_steps=2, guidance_scale=3.0)
    return Manifest(make_items([(f"pair-{i}", f"a hat {i}") for i in range(count)], SIZES, seed=7), settings | changes)


def image_folder(path: Path, count: int, *, seed: int = 0, sizes: tuple[tuple[int, int], ...] = ((40, 32),)) -> Path:
    """Make a folder with `count` images of noise, of these widths and heights in turn."""
    rng = np.random.default_rng(seed)
    path.mkdir()
    for i in range(count):
        width, height = sizes[i % len(sizes)]
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path / f"{i:03}.png")
    return path


def numbered_images(count: int, sizes: tuple[tuple[int, int], ...]) -> list[np.ndarray]:
    """Return images that are filled with their number; sizes (height, width) in turn."""
    return [np.full((*sizes[i % len(sizes)], 3), i, np.uint8) for i in range(count)]


class Means(nn.Module):
    """A feature network whose features can be computed by hand, and that counts its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.counts.append(len(images))
        return images.float().mean((2, 3))


class Colours(nn.Module):
    """A feature network whose features can be computed by hand: the mean of each colour."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return images.float().mean((2, 3))


class _FixedFeatures(nn.Module):
    """A feature network that returns given features."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features


def torchmetrics_fid(real: torch.Tensor, generated: torch.Tensor) -> float:
    """Compute the FID of features with a third-party library, through the square root of a matrix."""
    from torchmetrics.image.fid import FrechetInceptionDistance

    metric = FrechetInceptionDistance(feature=_FixedFeatures(real.shape[1]))
    metric.update(real, real=True)
    metric.update(generated, real=False)
    return float(metric.compute())
