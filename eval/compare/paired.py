"""Paired comparison of two configurations that drew the same prompts with the same seeds.

The difference of paired values varies far less than either side, so it needs far fewer images than two separate
figures. Intervals of differences are bootstraps over pairs. Those of win rates are Wilson's, which do not collapse to a
point at 0 and 1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...data.errors import UsageError
from ...data.statistics import Estimate, wilson_interval
from ..metrics.bootstrap import bootstrap_centred, bootstrap_mean
from ..results import Direction

if TYPE_CHECKING:
    import torch

FID_RESAMPLES = 100
FidOfCounts = Callable[["torch.Tensor", "torch.Tensor"], float]
"""Returns the FID of a side, given how often each prompt and each reference image counts."""


@dataclass(frozen=True, slots=True)
class PairedResult:
    """Difference of the second side from the first in one metric.

    Attributes:
        name: name of the metric.
        first, second: value on both sides, over the same images.
        difference: second - first.
        low, high: 95 % interval of the difference; None with fewer than two pairs.
        win_rate: share of pairs in which the second is better, ties counting half; None for metrics of whole sets.
        win_low, win_high: 95 % interval of the win rate (Wilson's, of wins and half the ties).
        tie_rate: share of pairs with equal values.
        n: number of pairs.
        direction: whether a higher or a lower value is better.
        seed: seed of the bootstrap.
    """

    name: str
    first: float
    second: float
    difference: float
    low: float | None
    high: float | None
    n: int
    direction: Direction
    win_rate: float | None = None
    win_low: float | None = None
    win_high: float | None = None
    tie_rate: float | None = None
    seed: int = 0

    @property
    def estimate(self) -> Estimate:
        """Difference with its interval."""
        return Estimate(self.difference, self.low, self.high, self.n)

    @property
    def wins(self) -> Estimate | None:
        """Win rate with its interval; None if the metric has none."""
        return None if self.win_rate is None else Estimate(self.win_rate, self.win_low, self.win_high, self.n)


def compare_values(
    name: str, first: Mapping[str, float], second: Mapping[str, float], direction: Direction, seed: int = 0
) -> PairedResult:
    """Compare the values of single images, matched by their names.

    Raises:
        UsageError: the sides do not have the same images, or none.
    """
    if set(first) != set(second):
        only = sorted(set(first) ^ set(second))
        side = "first" if only[0] in first else "second"
        raise UsageError(
            f"{name}: the two sides must have values of the same images, but {len(only)} are on one side only; "
            f"{only[0]} is on the {side}"
        )
    if not first:
        raise UsageError(f"{name}: no pair to compare")
    one = np.array([first[key] for key in first], dtype=np.float64)
    other = np.array([second[key] for key in first], dtype=np.float64)
    differences = other - one
    better = differences > 0 if direction == "higher" else differences < 0
    wins = better + 0.5 * (differences == 0)
    difference = bootstrap_mean(differences, seed)
    win_low, win_high = wilson_interval(float(wins.sum()), len(wins))
    return PairedResult(
        name,
        float(one.mean()),
        float(other.mean()),
        difference.value,
        difference.low,
        difference.high,
        n=len(one),
        direction=direction,
        win_rate=float(wins.mean()),
        win_low=win_low,
        win_high=win_high,
        tie_rate=float((differences == 0).mean()),
        seed=seed,
    )


def compare_fid(
    first: "torch.Tensor",
    second: "torch.Tensor",
    reference: "torch.Tensor",
    seed: int = 0,
    num_resamples: int = FID_RESAMPLES,
) -> PairedResult:
    """Return the difference of two FIDs against the same reference images.

    Both sides are resampled with the same indices, so that effects of the prompts cancel.

    Args:
        first, second: features (n, d), row i of both drawn for the same prompt and seed.
        reference: features (m, d) of the reference images.
        seed: seed of the bootstrap.
        num_resamples: number of resamples of the bootstrap.

    Raises:
        UsageError: the sides have different numbers of images, or fewer than two.
    """
    from ..metrics.fid import frechet_distance, require_pairs

    require_pairs(first, second)

    def fid_of(side: "torch.Tensor") -> FidOfCounts:
        return lambda pairs, others: frechet_distance(reference, side, others, pairs)

    return compare_fids(fid_of(first), fid_of(second), (len(first), len(reference)), seed, num_resamples)


def compare_fids(
    first: FidOfCounts,
    second: FidOfCounts,
    sizes: tuple[int, int],
    seed: int = 0,
    num_resamples: int = FID_RESAMPLES,
) -> PairedResult:
    """Return the difference of two FIDs, both functions of how often each prompt and each reference image counts.

    Args:
        first, second: the sides.
        sizes: numbers of prompts and of reference images.
        seed, num_resamples: as in `compare_fid`.
    """
    import torch

    from ..metrics.fid import counts_of

    def both(*counts: "torch.Tensor") -> tuple[float, float]:
        return first(*counts), second(*counts)

    def difference(*drawn: np.ndarray) -> float:
        one, other = both(*map(counts_of, drawn, sizes))
        return other - one

    one, other = both(*(torch.ones(size, dtype=torch.int64) for size in sizes))
    found = bootstrap_centred(other - one, sizes, difference, seed=seed, num_resamples=num_resamples)
    return PairedResult("fid", one, other, found.value, found.low, found.high, n=sizes[0], direction="lower", seed=seed)
