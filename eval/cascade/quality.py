"""FID of the images that a cascade has served, not taken from a curve over f (DiffServe section 4.1)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...data.errors import UsageError
from ...serving.cascade.legs import SIDES, Side
from ..compare.paired import FidOfCounts, PairedResult, compare_fids
from ..metrics.fid import counts_of, frechet_distance
from ..metrics.kid import kid

MIN_IMAGES, KID_WINDOW = 2, 256
_CURVE_POINTS = 21
"""Number of points of a quality curve: shares of deferred images a twentieth apart."""


def served_features(
    features: Mapping[str, torch.Tensor], places: Sequence[int], served_by: Sequence[Side | None]
) -> torch.Tensor:
    """Return features of the served images, in the order of the requests; requests without an image have no row.

    Args:
        features: features of a bank, by side.
        places: index of each request's entry in the bank.
        served_by: side whose image each request received; None for none.
    """
    rows = [features[leg][place] for place, leg in zip(places, served_by, strict=True) if leg is not None]
    return torch.stack(rows) if rows else torch.zeros(0, features["light"].shape[1])


def served_quality(
    features: Mapping[str, torch.Tensor], places: Sequence[int], served_by: Sequence[Side | None]
) -> dict[str, Any]:
    """Return the FID of the served images, and that of each side's images alone for the same prompts.

    FID is None with fewer than two images.
    """
    reference = features["reference"]
    served = _served_counts(features, places, served_by)
    prompts = sum(served.values(), start=torch.zeros(len(features["light"]), dtype=torch.int64))

    def fid(counts: Mapping[Side, torch.Tensor]) -> float | None:
        return None if int(prompts.sum()) < MIN_IMAGES else _fid(features, counts)

    return {
        "fid": fid(served),
        **{f"fid_{side}": fid({side: prompts}) for side in SIDES if side in features},
        "num_images": int(prompts.sum()),
        "num_prompts": int((prompts > 0).sum()),
        "num_reference": len(reference),
    }


def quality_over_time(
    features: Mapping[str, torch.Tensor],
    places: Sequence[int],
    served_by: Sequence[Side | None],
    arrivals_s: Sequence[float],
    window: int = KID_WINDOW,
) -> list[dict[str, float | None]]:
    """Return the KID of served images by time of arrival (figure 5); FID of so few images would mainly reflect their
    number.

    Args:
        features, places, served_by: as in `served_features`.
        arrivals_s: arrival of each request, ascending.
        window: minimum number of images of each value; with fewer in total there are no values.

    Returns:
        For each window its first and last arrival, the KID, and its 95 % interval.
    """
    known = [index for index, leg in enumerate(served_by) if leg is not None]
    images = served_features(features, places, served_by)
    rows: list[dict[str, float | None]] = []
    for number in range(len(known) // window):
        is_last = number == len(known) // window - 1
        part = slice(number * window, None if is_last else (number + 1) * window)
        inside = known[part]
        found = kid(features["reference"], images[part], subset_size=len(inside)).estimate
        rows.append(
            {
                "start_s": arrivals_s[inside[0]],
                "end_s": arrivals_s[inside[-1]],
                "kid": found.value,
                "low": found.low,
                "high": found.high,
            }
        )
    return rows


def quality_curve(
    features: Mapping[str, torch.Tensor],
    confidences: Sequence[float],
    num_points: int = _CURVE_POINTS,
    *,
    reuses_light: bool = False,
) -> tuple[tuple[float, float], ...]:
    """Return the FID of a bank's images by threshold; heavy images are used where the light one's confidence is below.

    Args:
        features: features of the bank, by side.
        confidences: confidences of its light images; NaN is deferred by any threshold but 0.
        num_points: number of thresholds, at which the shares of deferred images are spread evenly from 0 to 1.
        reuses_light: whether heavy images are those that start from light ones.

    Returns:
        Pairs (threshold, FID) with ascending thresholds from 0 to 1.

    Raises:
        UsageError: the bank has fewer than two images.
    """
    known = torch.tensor(confidences, dtype=torch.float64).nan_to_num(nan=-1.0)
    shares = torch.linspace(0, 1, num_points, dtype=torch.float64)
    between = torch.quantile(known, shares).clamp(0, 1)
    # At 1 every image with a confidence below 1 is deferred, at 0 none is.
    thresholds = torch.cat([torch.zeros(1), between, torch.ones(1)]).unique()
    heavy: Side = "reused" if reuses_light else "heavy"
    curve = []
    for threshold in thresholds.tolist():
        is_heavy = (known < threshold) & (threshold > 0)
        images = torch.where(is_heavy[:, None], features[heavy], features["light"])
        curve.append((threshold, frechet_distance(features["reference"], images)))
    return tuple(curve)


def compare_served(
    features: Mapping[str, torch.Tensor],
    places: Sequence[int],
    first: Sequence[Side | None],
    second: Sequence[Side | None],
    *,
    seed: int = 0,
    num_resamples: int = 100,
) -> PairedResult:
    """Compare the FID of two systems on the same requests, with an interval over prompts of the bank.

    Requests that either system did not serve are omitted on both sides. Raises UsageError if fewer than two are left.
    """
    both = [index for index, legs in enumerate(zip(first, second, strict=True)) if None not in legs]
    if len(both) < MIN_IMAGES:
        raise UsageError(f"{len(both)} requests were served by both systems, but FID needs at least {MIN_IMAGES}")
    known = [places[index] for index in both]
    prompts, size = torch.tensor(sorted(set(known))), len(features["light"])

    def fid_of(served: Sequence[Side | None]) -> FidOfCounts:
        counts = _served_counts(features, known, [served[index] for index in both])

        def fid(times: torch.Tensor, reference: torch.Tensor) -> float:
            each = torch.zeros(size, dtype=torch.int64).index_copy(0, prompts, times)
            return _fid(features, {side: own * each for side, own in counts.items()}, reference)

        return fid

    sizes = len(prompts), len(features["reference"])
    return compare_fids(fid_of(first), fid_of(second), sizes, seed, num_resamples)


def _served_counts(
    features: Mapping[str, torch.Tensor], places: Sequence[int], served_by: Sequence[Side | None]
) -> dict[Side, torch.Tensor]:
    """Return how often each image of the bank was served (n,), by side; a bank is smaller than a trace."""
    given = list(zip(places, served_by, strict=True))
    assert {each for _, each in given} <= {*features, None}, "a bank has features of all that is served"
    return {
        side: counts_of(np.array([place for place, each in given if each == side], dtype=int), len(features[side]))
        for side in SIDES
        if side in features
    }


def _fid(
    features: Mapping[str, torch.Tensor], counts: Mapping[Side, torch.Tensor], reference: torch.Tensor | None = None
) -> float:
    images = torch.cat([features[leg] for leg in counts])
    return frechet_distance(features["reference"], images, reference, torch.cat(list(counts.values())))
