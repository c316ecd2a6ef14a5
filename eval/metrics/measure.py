"""Metrics of pairs of images, and of features of sets, with intervals."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from ...data.errors import UsageError
from ...data.statistics import Z95, Estimate
from ..results import Direction, MetricResult
from .fid import USUAL_NUM_IMAGES, fid, fid_infinity, paired_fid
from .images import AnyImage, batches_by_size, to_array
from .kid import kid
from .lpips import Lpips
from .psnr import psnr
from .ssim import ssim

PAIR_METRICS: dict[str, tuple[str, Direction]] = {
    "psnr": ("dB", "higher"),
    "ssim": ("", "higher"),
    "lpips": ("", "lower"),
}
BATCH_SIZE = 16

OnImages = Callable[[int], None]
Details = Mapping[str, Any]
Key = TypeVar("Key", bound=Hashable)


def pair_values(
    names: Iterable[str],
    pairs: Iterable[tuple[Key, AnyImage, AnyImage]],
    lpips: Lpips | None = None,
    on_images: OnImages = lambda count: None,
) -> dict[str, dict[Key, float]]:
    """Return distances of pairs of images by metric and key, in no particular order; equal images have infinite PSNR.

    Args:
        names: names from `PAIR_METRICS`.
        pairs: a key, an image and its reference, both of one size; sizes of pairs may differ.
        lpips: the network, if LPIPS is measured.
        on_images: called with the number of pairs after each batch.
    """
    values: dict[str, dict[Key, float]] = {name: {} for name in names}
    # One above the other, so that both go into the same batch.
    stacked = ((key, np.concatenate([to_array(one), to_array(other)])) for key, one, other in pairs)
    for keys, batch in batches_by_size(stacked, BATCH_SIZE):
        images, references = batch.chunk(2, dim=2)
        for name, known in values.items():
            if name == "psnr":
                found = [psnr(_array(one), _array(other)) for one, other in zip(images, references, strict=True)]
            elif name == "ssim":
                found = ssim(images, references).tolist()
            else:
                assert lpips is not None, "LPIPS was asked for without its network"
                found = lpips(images, references).tolist()
            known.update(zip(keys, found, strict=True))
        on_images(len(keys))
    return values


def measure_sets(
    names: tuple[str, ...],
    generated: torch.Tensor,
    reference: torch.Tensor,
    *,
    seed: int = 0,
    details: Details | None = None,
) -> tuple[dict[str, MetricResult], list[str]]:
    """Return FID and KID of features, and warnings for readers.

    Args:
        names: "fid", "kid" or both.
        generated, reference: features (n, d) and (m, d).
        seed: seed of all random draws.
        details: details that are added to the results.

    Raises:
        UsageError: there are fewer than two images on a side.
    """
    smallest = min(len(generated), len(reference))
    if smallest < 2:
        raise UsageError(
            f"FID and KID were given {len(reference)} reference and {len(generated)} generated images, but need at "
            "least 2 of each"
        )
    common = {**(details or {}), "num_reference": len(reference), "num_generated": len(generated)}
    results, warnings = {}, []
    if "fid" in names:
        found = fid(reference, generated, seed)
        assert found.high is not None
        endless = fid_infinity(reference, generated, (found.high - found.value) / Z95, seed)
        more: dict[str, Any] = {"interval": "bootstrap over images, centred"}
        if isinstance(endless, str):
            more["fid_infinity_missing"] = endless
        else:
            more |= {
                "fid_infinity": endless.estimate.value,
                "fid_infinity_low": endless.estimate.low,
                "fid_infinity_high": endless.estimate.high,
                "fid_infinity_r2": endless.r2,
                "finite_sample_bias": found.value - endless.estimate.value,
            }
        results["fid"] = result_of("fid", found, "", "lower", seed, common | more)
        if smallest < USUAL_NUM_IMAGES:
            hint = f"; fid_infinity is missing: {endless}" if isinstance(endless, str) else ", or see fid_infinity"
            warnings.append(
                f"FID of {smallest} images is biased upwards (papers use {USUAL_NUM_IMAGES} and more); compare it only "
                f"with FIDs of as many images{hint}"
            )
    if "kid" in names:
        each = kid(reference, generated, seed=seed)
        more = {"subset_size": each.subset_size, "num_subsets": each.num_subsets, "subset_std": each.subset_std}
        more["interval"] = "jackknife over images"
        results["kid"] = result_of("kid", each.estimate, "", "lower", seed, common | more)
    return results, warnings


def measure_paired_fid(
    first: torch.Tensor, second: torch.Tensor, *, seed: int = 0, details: Details | None = None
) -> MetricResult:
    """Return the FID between two draws of the same prompts and seeds.

    There is no extrapolation over the number of images: pairs are not independent samples, and more of them would not
    remove a bias that both sides share.

    Args:
        first, second: features (n, d), row i of both drawn for the same prompt and seed.
        seed: seed of the bootstrap.
        details: details that are added to the result.

    Raises:
        UsageError: the sides have different numbers of images, or fewer than two.
    """
    more = {**(details or {}), "interval": "bootstrap over pairs, centred"}
    return result_of("fid", paired_fid(first, second, seed), "", "lower", seed, more)


def result_of(
    name: str, estimate: Estimate, unit: str, direction: Direction, seed: int, details: dict[str, Any]
) -> MetricResult:
    """Return an estimate as the result of a metric."""
    assert estimate.n is not None
    return MetricResult(name, estimate.value, estimate.low, estimate.high, estimate.n, unit, direction, seed, details)


def _array(image: torch.Tensor) -> np.ndarray:
    return image.permute(1, 2, 0).numpy()
