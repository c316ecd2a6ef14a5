"""Frechet Inception distance (Heusel et al., 2017) of features, with its interval and its bias from few images."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ...data.errors import UsageError
from ...data.statistics import Z95, Estimate
from .bootstrap import bootstrap_centred

USUAL_NUM_IMAGES = 2048
"""With fewer images than features the covariances are singular; papers use 5,000 to 50,000."""
NUM_RESAMPLES = 200
NUM_RESAMPLES_LARGE = 40
"""Number of resamples with more images than features, when one costs about a second instead of hundredths."""
NUM_POINTS = 7
NUM_DRAWS = 8
NUM_DRAWS_LARGE = 2
"""Numbers of parts averaged for each point of the line; fewer if a distance takes longer, and varies less."""
MIN_R2 = 0.9
"""Minimum r2 of the line; below it, the points scatter too much to extrapolate to infinity."""
_CHEAP_SIZE = 512
_MIN_IMAGES = 20
_MIN_IMAGES_PER_FEATURE = 2
_CURVATURE = 0.03
"""Share of the removed bias that may be wrong because FID is not exactly linear in 1 / N: at most 0.02 was measured
with spectra from flat to 1 / i^2 and 2 to 10 images per feature; with parts from a tenth of the images on, 0.3 to 1."""


def require_features(metric: str, real: torch.Tensor, generated: torch.Tensor) -> None:
    """Raise UsageError unless these are features (n, d) and (m, d) of at least two images on each side."""
    if real.ndim != 2 or generated.ndim != 2 or real.shape[1] != generated.shape[1]:
        raise UsageError(
            f"features are {tuple(real.shape)} and {tuple(generated.shape)}, but must be (n, d) and (m, d)"
        )
    if min(len(real), len(generated)) < 2:
        raise UsageError(
            f"{metric} was given {len(real)} real and {len(generated)} generated images, but needs at least 2 of each"
        )


def require_pairs(first: torch.Tensor, second: torch.Tensor) -> None:
    """Raise UsageError unless the features are of as many images on both sides."""
    if first.shape != second.shape:
        raise UsageError(f"features are {tuple(first.shape)} and {tuple(second.shape)}, but pairs need as many of each")


def frechet_distance(
    real: torch.Tensor,
    generated: torch.Tensor,
    real_counts: torch.Tensor | None = None,
    generated_counts: torch.Tensor | None = None,
) -> float:
    """Return the Frechet distance of features (n, d) and (m, d), in float64 and without the square root of a matrix.

    With centred features X / sqrt(n - 1) and Y / sqrt(m - 1) the trace of (C_x C_y)^(1/2) is the sum of the singular
    values of X Y^T, an n x m matrix; with more images than features, of the roots of the eigenvalues of L^T C_y L,
    where L L^T = C_x.

    Args:
        real, generated: features.
        real_counts, generated_counts: how often each image is in the set (n,) and (m,); None for once.

    Raises:
        UsageError: the features do not have that form, or there are fewer than two on a side.
    """
    require_features("FID", real, generated)
    one, real_mean = _centred(real, real_counts)
    other, mean = _centred(generated, generated_counts)
    traces = one.square().sum() + other.square().sum()
    if min(len(one), len(other)) <= one.shape[1]:
        product = _reduced(one) @ _reduced(other).T
        roots = torch.linalg.svdvals(product)
    else:
        lower = _root(one.T @ one)
        roots = torch.linalg.eigvalsh(lower.T @ (other.T @ other) @ lower).clamp(min=0).sqrt()
    return max(0.0, float((real_mean - mean).square().sum() + traces - 2 * roots.sum()))


def frechet_influence(real: torch.Tensor, generated: torch.Tensor, shrinkage: float = 0.0) -> torch.Tensor:
    """Return how much each generated image adds to the Frechet distance (m,): the derivative by its share of the set.

    With means m, m_x and covariances C, C_x of generated and real features, and D = I - L (L^T C L)^(-1/2) L^T where
    L L^T = C_x, it is that of x: 2 (m - m_x) (x - m) + (x - m)^T D (x - m) - tr(D C).

    Args:
        real, generated: features (n, d) and (m, d).
        shrinkage: share of the mean variance that is added to the diagonal of covariances; must be positive with fewer
            images than features.

    Raises:
        UsageError: as `frechet_distance`.
    """
    require_features("FID", real, generated)
    one, real_mean = _centred(real, None)
    other, mean = _centred(generated, None)
    covariances = one.T @ one, other.T @ other
    lifted = [each + torch.eye(len(each)) * (shrinkage * each.trace() / len(each)) for each in covariances]
    lower = _root(lifted[0])
    values, vectors = torch.linalg.eigh(lower.T @ lifted[1] @ lower)
    inverse_root = (vectors * values.clamp(min=torch.finfo(values.dtype).eps).rsqrt()) @ vectors.T
    change = torch.eye(len(lower)) - lower @ inverse_root @ lower.T
    away = generated.double() - mean
    return 2 * away @ (mean - real_mean) + ((away @ change) * away).sum(1) - (change * covariances[1]).sum()


def fid(real: torch.Tensor, generated: torch.Tensor, seed: int = 0, num_resamples: int | None = None) -> Estimate:
    """Return FID with its interval by bootstrap over the images of both sides, which are independent of each other.

    Args:
        real, generated: features (n, d) and (m, d).
        seed: seed of the draws.
        num_resamples: number of resamples; None for 200, or 40 with more images than features.

    Raises:
        UsageError: as `frechet_distance`.
    """

    def resampled(one: np.ndarray, other: np.ndarray) -> float:
        return frechet_distance(real, generated, counts_of(one, len(real)), counts_of(other, len(generated)))

    return _estimate(real, generated, (len(real), len(generated)), resampled, seed, num_resamples)


def paired_fid(first: torch.Tensor, second: torch.Tensor, seed: int = 0, num_resamples: int | None = None) -> Estimate:
    """Return the FID between two sets of paired rows, with its interval by bootstrap over the pairs.

    Two draws of the same prompts and seeds are nearly identical. Resampled independently, they would look as far apart
    as two sets of different images, and a distance of 0.01 would get an interval of -17 to 20.

    Args:
        first, second: features (n, d), row i of both drawn for the same prompt and seed.
        seed, num_resamples: as in `fid`.

    Raises:
        UsageError: the sides have different numbers of images, or as `frechet_distance`.
    """
    require_pairs(first, second)

    def resampled(pairs: np.ndarray) -> float:
        counts = counts_of(pairs, len(first))
        return frechet_distance(first, second, counts, counts)

    return _estimate(first, second, (len(first),), resampled, seed, num_resamples)


def counts_of(drawn: np.ndarray, size: int) -> torch.Tensor:
    """Return how often each image of a set of this size is in a resample (size,)."""
    return torch.from_numpy(np.bincount(drawn, minlength=size))


def _estimate(
    one: torch.Tensor,
    other: torch.Tensor,
    sizes: tuple[int, ...],
    resampled: Callable[..., float],
    seed: int,
    num_resamples: int | None,
) -> Estimate:
    is_small = min(len(one), len(other)) <= one.shape[1]
    usual = NUM_RESAMPLES if is_small else NUM_RESAMPLES_LARGE
    value = frechet_distance(one, other)
    return bootstrap_centred(value, sizes, resampled, seed=seed, num_resamples=num_resamples or usual, least=0.0)


@dataclass(frozen=True, slots=True)
class FidInfinity:
    """FID extrapolated to infinitely many images.

    Attributes:
        estimate: intercept of the line through FID over 1 / N.
        r2: share of the points' variance that the line explains, 0 to 1.
        counts: numbers of images of the points.
    """

    estimate: Estimate
    r2: float
    counts: tuple[int, ...]


def fid_infinity(real: torch.Tensor, generated: torch.Tensor, spread: float, seed: int = 0) -> FidInfinity | str:
    """Extrapolate FID over the number of images (Chong and Forsyth, "Effectively Unbiased FID", 2020, section 4).

    FID of N images is linear in 1 / N only if N is at least about the number of features; below, covariances are
    singular and the line bends. The line is therefore fitted to random parts of both sides, from half of the images,
    which must be as many as features, to all of them; its value at 1 / N = 0 is the result. Both sides shrink together,
    so that the real side's own bias is removed as well.

    The interval has three parts: the variation of FID from sample to sample, the uncertainty of the line, and its
    deviation from linearity.

    Args:
        real, generated: features (n, d) and (m, d).
        spread: standard deviation of their FID, from sample to sample.
        seed: seed of the parts.

    Returns:
        The line, or a short reason why there is none: too few images, or points that do not lie on a line.
    """
    num_features, largest = real.shape[1], min(len(real), len(generated))
    needed = max(_MIN_IMAGES, _MIN_IMAGES_PER_FEATURE * num_features)
    if largest < needed:
        return f"too few images: {largest}, but {needed} are needed"
    rng = np.random.default_rng(seed)
    counts = np.unique(np.linspace(largest // 2, largest, NUM_POINTS).astype(int))
    num_draws = NUM_DRAWS if num_features <= _CHEAP_SIZE else NUM_DRAWS_LARGE
    points = np.empty(len(counts))
    for place, count in enumerate(counts):
        draws = []
        # A part of all images is always the same set.
        for _ in range(1 if count == len(real) == len(generated) else num_draws):
            one, other = (rng.permutation(len(side))[:count] for side in (real, generated))
            draws.append(frechet_distance(real[one], generated[other]))
        points[place] = np.mean(draws)
    inverse = 1 / counts
    (slope, intercept), covariance = np.polyfit(inverse, points, 1, cov=True)
    residual = np.square(points - (slope * inverse + intercept)).sum()
    total = np.square(points - points.mean()).sum()
    r2 = 1.0 if total == 0 else float(1 - residual / total)
    if r2 < MIN_R2:
        return f"no straight line over 1 / N: r2 is {r2:.2f}, but must be {MIN_R2:g}"
    error = Z95 * float(spread**2 + covariance[1, 1]) ** 0.5 + _CURVATURE * abs(float(slope)) / largest
    value = float(intercept)
    return FidInfinity(Estimate(value, value - error, value + error, largest), r2, tuple(map(int, counts)))


def _centred(features: torch.Tensor, counts: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A (k, d) with covariance A^T A, a row for each image with a positive count, and the mean (d,)."""
    features = features.double()
    if counts is None:
        mean = features.mean(0)
        return (features - mean) / max(1, len(features) - 1) ** 0.5, mean
    features, counts = features[counts > 0], counts[counts > 0].double()[:, None]
    mean = (features * counts).sum(0) / counts.sum()
    return (features - mean) * (counts / (counts.sum() - 1).clamp(min=1)).sqrt(), mean


def _reduced(centred: torch.Tensor) -> torch.Tensor:
    """Return a matrix with no more rows than columns and the same product A^T A."""
    if len(centred) <= centred.shape[1]:
        return centred
    return torch.linalg.qr(centred, mode="r").R


def _root(covariance: torch.Tensor) -> torch.Tensor:
    """Return L with L L^T = C. If some features are constant, C has no Cholesky decomposition."""
    lower, info = torch.linalg.cholesky_ex(covariance)
    if not info:
        return lower
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * values.clamp(min=0).sqrt()
