"""Kernel Inception distance (Binkowski et al., "Demystifying MMD GANs", 2018) with torchmetrics' kernel."""

from dataclasses import dataclass

import numpy as np
import torch

from ...data.errors import MissingExtraError, UsageError
from ...data.statistics import Z95

SUBSET_SIZE = 1000
NUM_SUBSETS = 100
_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class KidResult:
    """The distance, its 95 % interval, and how it was made.

    Attributes:
        kid: mean over the subsets; may be slightly negative, because the estimate is unbiased.
        low, high: of the distance of all images, by the jackknife.
        subset_size, num_subsets: one subset of all images where there are no more than `subset_size`.
        subset_std: standard deviation over the subsets, the figure that papers print as ±.
    """

    kid: float
    low: float
    high: float
    subset_size: int
    num_subsets: int
    subset_std: float


def kid_of_features(
    real: torch.Tensor,
    generated: torch.Tensor,
    *,
    seed: int = 0,
    subset_size: int = SUBSET_SIZE,
    num_subsets: int = NUM_SUBSETS,
) -> KidResult:
    """KID of features (n, d) and (m, d): the unbiased MMD with the kernel (x.y / d + 1)^3, mean over subsets.

    The interval does not come from the subsets, which overlap, but from leaving out one image at a time.

    Raises:
        UsageError: the features do not have that form, or there are fewer than two on a side.
        MissingExtraError: torchmetrics is not installed.
    """
    try:
        from torchmetrics.image.kid import poly_mmd
    except ImportError as error:
        raise MissingExtraError("torchmetrics", "eval") from error
    _check(real, generated)
    real, generated = real.double(), generated.double()
    smallest = min(len(real), len(generated))
    if smallest <= subset_size:
        # All images, also where the two sides have different numbers.
        values = [_jackknife(real, generated)[0]]
        size = smallest
    else:
        size = subset_size
        rng = np.random.default_rng(seed)
        values = []
        for _ in range(num_subsets):
            one, other = (rng.permutation(len(side))[:size] for side in (real, generated))
            values.append(float(poly_mmd(real[one], generated[other])))
    _, spread = _jackknife(real, generated)
    kid = float(np.mean(values))
    return KidResult(kid, kid - Z95 * spread, kid + Z95 * spread, size, len(values), float(np.std(values)))


def _check(real: torch.Tensor, generated: torch.Tensor) -> None:
    if real.ndim != 2 or generated.ndim != 2 or real.shape[1] != generated.shape[1]:
        raise UsageError(
            f"features are {tuple(real.shape)} and {tuple(generated.shape)}, but must be (n, d) and (m, d)"
        )
    if min(len(real), len(generated)) < 2:
        raise UsageError(
            f"KID was given {len(real)} real and {len(generated)} generated images, but it needs at least 2 of each"
        )


def _jackknife(real: torch.Tensor, generated: torch.Tensor) -> tuple[float, float]:
    """The unbiased MMD of all images, and its standard error: the jackknife of a two-sample U-statistic.

    Each side's leave-one-out values follow from row sums of the kernel matrices, so nothing of size n x n is kept.
    """
    n, m = len(real), len(generated)
    xx, yy = _row_sums(real, real), _row_sums(generated, generated)
    xy, yx = _row_sums(real, generated), _row_sums(generated, real)
    xx, yy = xx - _diagonal(real), yy - _diagonal(generated)
    sum_xx, sum_yy, sum_xy = xx.sum(), yy.sum(), xy.sum()
    whole = sum_xx / (n * (n - 1)) + sum_yy / (m * (m - 1)) - 2 * sum_xy / (n * m)
    variance = 0.0
    for count, other, own_rows, own_sum, cross_rows, rest in (
        (n, m, xx, sum_xx, xy, sum_yy / (m * (m - 1))),
        (m, n, yy, sum_yy, yx, sum_xx / (n * (n - 1))),
    ):
        if count < 3:
            # Nothing is left to compare within a side of one image.
            variance = float("inf")
            continue
        without = (own_sum - 2 * own_rows) / ((count - 1) * (count - 2))
        without = without + rest - 2 * (sum_xy - cross_rows) / ((count - 1) * other)
        variance += float((count - 1) / count * (without - without.mean()).square().sum())
    return float(whole), variance**0.5


def _row_sums(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    from torchmetrics.image.kid import poly_kernel

    return torch.cat([poly_kernel(block, other).sum(1) for block in one.split(_BLOCK)])


def _diagonal(features: torch.Tensor) -> torch.Tensor:
    return (features.square().sum(1) / features.shape[1] + 1) ** 3
