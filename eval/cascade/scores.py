"""Quality of scores for deferring light images: FID over the share of heavy images (DiffServe section 4.4).

For each scorer, a growing share of the images with its lowest scores is replaced by heavy ones. The result is compared
with random choices, which every scorer must beat, and with the score difference between the light and the heavy image
of a prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from ...data.errors import UsageError
from ...data.statistics import wilson_interval
from ...serving.cascade.legs import LEGS, Leg
from ...serving.cascade.profile import CascadeProfile
from ..measurer import StartPhase
from ..metrics.bootstrap import bootstrap_centred
from ..metrics.fid import counts_of, frechet_distance

RANDOM = "random"


@dataclass(frozen=True, slots=True)
class ScoreSettings:
    """Settings of the comparison of scorers.

    Attributes:
        shares: shares of deferred images, for curves.
        tested: shares at which the difference from random choices has an interval.
        num_draws: number of random choices.
        num_resamples: number of resamples of prompts for intervals.
        seed: seed of random choices and resamples.

    Raises:
        UsageError: a share is not from 0 to 1, or a number is too small.
    """

    shares: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    tested: tuple[float, ...] = (0.2, 0.4, 0.6)
    num_draws: int = 20
    num_resamples: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        for share in (*self.shares, *self.tested):
            if not 0 <= share <= 1:
                raise UsageError(f"a share of deferred images is {share:g}, but it must be from 0 to 1")
        if self.num_draws < 2 or self.num_resamples < 2:
            raise UsageError(
                f"{self.num_draws} random draws and {self.num_resamples} resamples are given, but at least 2 of each "
                "are needed"
            )


def compare_scores(
    features: Mapping[str, torch.Tensor],
    scores: Mapping[str, Mapping[Leg, Sequence[float]]],
    settings: ScoreSettings,
    *,
    start_phase: StartPhase,
) -> dict[str, Any]:
    """Return FID over the share of deferred images for each scorer, and for random choices.

    Args:
        features: features of a bank, by model, and of real images.
        scores: scores of all light and heavy images by each scorer; higher is better, and NaN is worst.
        settings: settings of the comparison.
        start_phase: reports progress.

    Raises:
        UsageError: the bank has too few images.
    """
    count = len(features["light"])
    rng = np.random.default_rng(settings.seed)
    orders = [rng.permutation(count) for _ in range(settings.num_draws)]
    inner = [share for share in settings.shares if 0 < share < 1]
    advance = start_phase("FIDs of random choices", len(inner) * len(orders))
    ends = {share: [_fid(features, np.full(count, share > 0))] for share in (0.0, 1.0)}
    draws: dict[float, list[float]] = {share: ends[share] for share in settings.shares if share in ends}
    for share in sorted({*inner, *(each for each in settings.tested if 0 < each < 1)}):
        draws[share] = []
        for order in orders:
            draws[share].append(_fid(features, _first(order, share)))
            advance(1)
    advance = start_phase("FIDs of scorers", len(scores) * (len(settings.shares) + len(settings.tested)))
    rows = []
    for name, both in scores.items():
        order = np.argsort(np.nan_to_num(np.asarray(both["light"], dtype=float), nan=-np.inf), kind="stable")
        curve = []
        for share in settings.shares:
            curve.append({"share": share, "fid": _fid(features, _first(order, share))})
            advance(1)
        against = []
        for share in settings.tested:
            against.append(_against_random(features, order, share, draws[share], settings))
            advance(1)
        rows.append({"scorer": name, "curve": curve, "against_random": against, "easy": _easy(both)})
    curve = [
        {"share": share, "fid": float(np.mean(draws[share])), "low": min(draws[share]), "high": max(draws[share])}
        for share in sorted(draws)
    ]
    return {"settings": asdict(settings), "num_prompts": count, "random": curve, "rows": rows}


def mean_latency_s(profile: CascadeProfile, share: float) -> float:
    """Return the mean latency of requests one by one, over all resolutions: e_light(1), plus e_heavy(1) for a share."""
    names = [str(size) for size in profile.resolutions]
    light, heavy = (np.mean([profile.legs[leg].sizes[name].latency_s[0] for name in names]) for leg in LEGS)
    return float(light + share * heavy)


def allocations(
    profile: CascadeProfile, curve: Sequence[Mapping[str, float]], num_workers: int
) -> list[dict[str, float]]:
    """Return requests a second and FID of allocations of workers, batch sizes and shares (DiffServe figure 1c).

    Args:
        profile: profile of both models, whose resolutions are requested equally often.
        curve: FID by share of deferred images.
        num_workers: number of workers, S.
    """
    weights = dict.fromkeys(map(str, profile.resolutions), 1.0)
    light, heavy = (profile.legs[leg].batches(weights) for leg in LEGS)
    rows = []
    for num_light in range(1, num_workers + 1):
        for light_batch, light_rate in zip(light.batch_sizes, light.throughput, strict=True):
            for heavy_batch, heavy_rate in zip(heavy.batch_sizes, heavy.throughput, strict=True):
                for point in curve:
                    share, num_heavy = point["share"], num_workers - num_light
                    if share > 0 and not num_heavy:
                        continue
                    rate = num_light * light_rate
                    rate = rate if share == 0 else min(rate, num_heavy * heavy_rate / share)
                    rows.append(
                        {
                            "light_workers": num_light,
                            "light_batch": light_batch,
                            "heavy_batch": heavy_batch,
                            "share": share,
                            "requests_per_s": rate,
                            "fid": point["fid"],
                        }
                    )
    return rows


def _first(order: np.ndarray, share: float) -> np.ndarray:
    """Return which images are heavy: the first ones of an order, up to a share."""
    is_heavy = np.zeros(len(order), dtype=bool)
    is_heavy[order[: round(share * len(order))]] = True
    return is_heavy


def _fid(features: Mapping[str, torch.Tensor], is_heavy: np.ndarray) -> float:
    return frechet_distance(features["reference"], _mixed(features, is_heavy))


def _mixed(features: Mapping[str, torch.Tensor], is_heavy: np.ndarray) -> torch.Tensor:
    return torch.where(torch.from_numpy(is_heavy)[:, None], features["heavy"], features["light"])


def _against_random(
    features: Mapping[str, torch.Tensor], order: np.ndarray, share: float, draws: list[float], settings: ScoreSettings
) -> dict[str, float | None]:
    """Compare a scorer with random choices; each resample of the prompts has its own random choice."""
    mixed, reference = _mixed(features, _first(order, share)), features["reference"]
    chance = np.random.default_rng(settings.seed + 1)

    def difference(pairs: np.ndarray, others: np.ndarray) -> float:
        at_random = _mixed(features, _first(chance.permutation(len(order)), share))
        counts = counts_of(others, len(reference)), counts_of(pairs, len(mixed))
        return frechet_distance(reference, mixed, *counts) - frechet_distance(reference, at_random, *counts)

    fid, mean = frechet_distance(reference, mixed), float(np.mean(draws))
    found = bootstrap_centred(
        fid - mean,
        (len(order), len(reference)),
        difference,
        seed=settings.seed,
        num_resamples=settings.num_resamples,
    )
    return {
        "share": share, "fid": fid, "fid_random": mean, "difference": found.value, "low": found.low, "high": found.high
    }  # fmt: skip


def _easy(both: Mapping[Leg, Sequence[float]]) -> dict[str, Any]:
    """Return the share of prompts whose light image scores at least as well as the heavy one (figure 1b)."""
    differences = np.asarray(both["light"], dtype=float) - np.asarray(both["heavy"], dtype=float)
    known = differences[np.isfinite(differences)]
    low, high = wilson_interval(float((known >= 0).sum()), len(known)) if len(known) else (None, None)
    return {
        "share": float((known >= 0).mean()) if len(known) else None,
        "low": low,
        "high": high,
        "differences": known.tolist(),
    }
