"""Frechet Inception distance (Heusel et al., 2017) through torchmetrics, on any feature network."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from ...data.errors import MissingExtraError, UsageError
from .images import AnyImage, batches


@dataclass(frozen=True, slots=True)
class FidResult:
    """A distance and the number of images on both sides: fewer images give larger distances, so both are told."""

    fid: float
    num_real: int
    num_generated: int


class FidMeter:
    """Collects features of real and generated images as running sums, so memory does not grow with their number.

    Args:
        extractor: takes uint8 images (n, 3, height, width) to features (n, d), and has `num_features` (d);
            `eval.inception.load_inception` for the FID that everybody reports.

    Raises:
        MissingExtraError: torchmetrics is not installed.
    """

    def __init__(self, extractor: nn.Module) -> None:
        try:
            from torchmetrics.image.fid import FrechetInceptionDistance
        except ImportError as error:
            raise MissingExtraError("torchmetrics", "eval") from error
        # It sums features and their outer products in float64; with an extractor given, it needs no torch-fidelity.
        self._metric = FrechetInceptionDistance(feature=extractor)
        self._counts = {True: 0, False: 0}

    def update(self, images: torch.Tensor, *, real: bool) -> None:
        """Add images (n, 3, height, width) of uint8, or whatever else the extractor takes."""
        self._metric.update(images, real=real)
        self._counts[real] += len(images)

    def compute(self) -> FidResult:
        """The distance of what was added so far.

        Raises:
            UsageError: there are fewer than two images on a side.
        """
        for real, count in self._counts.items():
            if count < 2:
                side = "real" if real else "generated"
                raise UsageError(f"FID was given {count} {side} images, but it needs at least 2 on each side")
        # The eigenvalues may leave a tiny negative number for equal sets.
        return FidResult(max(0.0, float(self._metric.compute())), self._counts[True], self._counts[False])


def fid_of_images(
    real: Iterable[AnyImage], generated: Iterable[AnyImage], extractor: nn.Module, batch_size: int = 32
) -> FidResult:
    """FID between two collections of images, which are read one batch at a time and may mix sizes.

    Raises:
        UsageError: fewer than two images on a side, or an array that is no image.
        MissingExtraError: torchmetrics is not installed.
    """
    meter = FidMeter(extractor)
    for is_real, images in ((True, real), (False, generated)):
        for batch in batches(images, batch_size):
            meter.update(batch, real=is_real)
    return meter.compute()


def fid_of_features(real: torch.Tensor, generated: torch.Tensor) -> FidResult:
    """Frechet distance between two sets of features (n, d) and (m, d) that are already computed.

    Raises:
        UsageError: the tensors do not have that form.
        MissingExtraError: torchmetrics is not installed.
    """
    if real.ndim != 2 or generated.ndim != 2 or real.shape[1] != generated.shape[1]:
        raise UsageError(
            f"features are {tuple(real.shape)} and {tuple(generated.shape)}, but must be (n, d) and (m, d)"
        )
    meter = FidMeter(_Given(real.shape[1]))
    meter.update(real, real=True)
    meter.update(generated, real=False)
    return meter.compute()


class _Given(nn.Module):
    """Stands for a feature network where the features are given."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features
