"""Kernel Inception distance of features (Binkowski et al., "Demystifying MMD GANs", 2018)."""

from dataclasses import dataclass

import numpy as np
import torch

from ...data.statistics import Z95, Estimate
from .fid import require_features

SUBSET_SIZE = 1000
NUM_SUBSETS = 100
_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Kid:
    """The distance, and the subsets that it was computed from.

    Attributes:
        estimate: mean over the subsets, which may be slightly negative because it is unbiased. The interval is that of
            the distance of all images, and is missing if a side has two images.
        subset_size, num_subsets: size and number of subsets; one subset of all images if there are at most
            `subset_size`.
        subset_std: standard deviation over the subsets, the figure that papers print as ±.
    """

    estimate: Estimate
    subset_size: int
    num_subsets: int
    subset_std: float


def kid(
    real: torch.Tensor,
    generated: torch.Tensor,
    *,
    seed: int = 0,
    subset_size: int = SUBSET_SIZE,
    num_subsets: int = NUM_SUBSETS,
) -> Kid:
    """Return the KID of features (n, d) and (m, d): the unbiased MMD with kernel (x.y / d + 1)^3, mean over subsets.

    The interval does not come from the subsets, which overlap, but from leaving out one image at a time: the jackknife
    of a two-sample U-statistic.

    Raises:
        UsageError: the features do not have that form, or there are fewer than two on a side.
    """
    require_features("KID", real, generated)
    real, generated = real.double(), generated.double()
    smallest = min(len(real), len(generated))
    whole = _KernelSums(real, generated)
    # All images if there are few, also if the two sides have different numbers.
    values = [whole.mmd()]
    if smallest > subset_size:
        rng = np.random.default_rng(seed)
        values = [
            _KernelSums(*(side[rng.permutation(len(side))[:subset_size]] for side in (real, generated))).mmd()
            for _ in range(num_subsets)
        ]
    value, spread = float(np.mean(values)), whole.standard_error()
    ends = (None, None) if spread is None else (value - Z95 * spread, value + Z95 * spread)
    return Kid(Estimate(value, *ends, smallest), min(smallest, subset_size), len(values), float(np.std(values)))


class _KernelSums:
    """Row sums of the kernel matrices within and across two sides; nothing of size n x n is kept."""

    def __init__(self, one: torch.Tensor, other: torch.Tensor) -> None:
        self.counts = len(one), len(other)
        # Within a side no image is compared with itself.
        self.within = tuple(_sums(each, each)[0] - _kernel_of_self(each) for each in (one, other))
        self.across = _sums(one, other)

    def mmd(self) -> float:
        """Return the unbiased MMD."""
        n, m = self.counts
        return float(self._mean_within(0) + self._mean_within(1) - 2 * self.across[0].sum() / (n * m))

    def standard_error(self) -> float | None:
        """Return the jackknife standard error of the MMD; None if a side without one image has no pair."""
        if min(self.counts) < 3:
            return None
        variance = 0.0
        for side, (count, other) in enumerate((self.counts, self.counts[::-1])):
            within, across = self.within[side], self.across[side]
            values = (within.sum() - 2 * within) / ((count - 1) * (count - 2)) + self._mean_within(1 - side)
            values = values - 2 * (across.sum() - across) / ((count - 1) * other)
            variance += float((count - 1) / count * (values - values.mean()).square().sum())
        return variance**0.5

    def _mean_within(self, side: int) -> torch.Tensor:
        return self.within[side].sum() / (self.counts[side] * (self.counts[side] - 1))


def _sums(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums (n,) and (m,) of the kernel matrix (n, m) of two sides, over its columns and over its rows."""
    over_columns, over_rows = [], other.new_zeros(len(other))
    for block in one.split(_BLOCK):
        kernel = (block @ other.T / one.shape[1] + 1) ** 3
        over_columns.append(kernel.sum(1))
        over_rows += kernel.sum(0)
    return torch.cat(over_columns), over_rows


def _kernel_of_self(features: torch.Tensor) -> torch.Tensor:
    return (features.square().sum(1) / features.shape[1] + 1) ** 3
