"""How sure an FID is: its interval by bootstrap, and its bias from the number of images by extrapolation."""

from dataclasses import dataclass

import numpy as np
import torch

from ..data.errors import UsageError
from .bootstrap import Interval, centred_interval

USUAL_NUM_IMAGES = 2048
"""With fewer images than features the covariances are singular; papers use 5,000 to 50,000."""
NUM_RESAMPLES = 200
NUM_RESAMPLES_LARGE = 40
"""With more images than features a resample costs about a second instead of hundredths."""
NUM_POINTS = 15
NUM_DRAWS = 8
"""Parts averaged for each point of the line; one where a distance takes longer, and varies less."""
_CHEAP_SIZE = 512
_MIN_IMAGES = 10


def frechet_distance(real: torch.Tensor, generated: torch.Tensor) -> float:
    """The Frechet distance of features (n, d) and (m, d), in float64 and without the square root of a matrix.

    With centred features X / sqrt(n - 1) and Y / sqrt(m - 1) the trace of (C_x C_y)^(1/2) is the sum of the singular
    values of X Y^T, an n x m matrix; with more images than features, of R_x R_y^T, the triangles of QR decompositions.

    Raises:
        UsageError: the features do not have that form, or there are fewer than two on a side.
    """
    if real.ndim != 2 or generated.ndim != 2 or real.shape[1] != generated.shape[1]:
        raise UsageError(
            f"features are {tuple(real.shape)} and {tuple(generated.shape)}, but must be (n, d) and (m, d)"
        )
    for side, features in (("real", real), ("generated", generated)):
        if len(features) < 2:
            raise UsageError(f"FID was given {len(features)} {side} images, but it needs at least 2 on each side")
    real, generated = real.double(), generated.double()
    means = (real.mean(0) - generated.mean(0)).square().sum()
    one, other = _centred(real), _centred(generated)
    traces = one.square().sum() + other.square().sum()
    product = _reduced(one) @ _reduced(other).T
    return max(0.0, float(means + traces - 2 * torch.linalg.svdvals(product).sum()))


def fid_interval(
    real: torch.Tensor, generated: torch.Tensor, value: float, seed: int = 0, num_resamples: int | None = None
) -> Interval:
    """Interval of an FID by bootstrap over the images of both sides.

    Args:
        real, generated: features (n, d) and (m, d).
        value: their FID.
        seed: of the draws.
        num_resamples: None for 200, or 40 where there are more images than features.
    """
    if num_resamples is None:
        is_small = min(len(real), len(generated)) <= real.shape[1]
        num_resamples = NUM_RESAMPLES if is_small else NUM_RESAMPLES_LARGE
    return centred_interval(
        value,
        (len(real), len(generated)),
        lambda one, other: frechet_distance(real[one], generated[other]),
        seed=seed,
        num_resamples=num_resamples,
    )


@dataclass(frozen=True, slots=True)
class FidInfinity:
    """FID as it would be with infinitely many images.

    Attributes:
        fid: intercept of the line through FID over 1 / N.
        slope: of that line: with N images the FID is about slope / N too large.
        r2: how much of the points' variance the line explains, 0 to 1.
        counts, values: the points.
    """

    fid: float
    slope: float
    r2: float
    counts: tuple[int, ...]
    values: tuple[float, ...]


def fid_infinity(
    real: torch.Tensor, generated: torch.Tensor, seed: int = 0, num_points: int = NUM_POINTS
) -> FidInfinity | None:
    """Extrapolate FID over the number of images (Chong and Forsyth, "Effectively Unbiased FID", 2020, section 4).

    FID of N images is, to first order, linear in 1 / N. Random parts of both sides, evenly spaced from a tenth of the
    images to all of them, give the line; its value at 1 / N = 0 is the result.

    Both sides shrink together, so the real side's own bias is taken away as well.

    Returns None for fewer than 20 images, where a tenth of them says nothing.
    """
    largest = min(len(real), len(generated))
    if largest < 2 * _MIN_IMAGES:
        return None
    rng = np.random.default_rng(seed)
    counts = np.unique(np.linspace(max(_MIN_IMAGES, largest // 10), largest, num_points).astype(int))
    num_draws = NUM_DRAWS if min(largest, real.shape[1]) <= _CHEAP_SIZE else 1
    values = []
    for count in counts:
        draws = []
        # All images are one set, however they are drawn.
        for _ in range(1 if count == len(real) == len(generated) else num_draws):
            one, other = (rng.permutation(len(side))[:count] for side in (real, generated))
            draws.append(frechet_distance(real[one], generated[other]))
        values.append(float(np.mean(draws)))
    inverse, points = 1 / counts, np.array(values)
    slope, intercept = np.polyfit(inverse, points, 1)
    residual = np.square(points - (slope * inverse + intercept)).sum()
    total = np.square(points - points.mean()).sum()
    r2 = 1.0 if total == 0 else float(1 - residual / total)
    return FidInfinity(float(intercept), float(slope), r2, tuple(map(int, counts)), tuple(values))


def _centred(features: torch.Tensor) -> torch.Tensor:
    return (features - features.mean(0)) / (len(features) - 1) ** 0.5


def _reduced(centred: torch.Tensor) -> torch.Tensor:
    """A matrix of no more rows than columns with the same product A^T A."""
    if len(centred) <= centred.shape[1]:
        return centred
    return torch.linalg.qr(centred, mode="r").R
