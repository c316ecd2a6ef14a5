"""Metrics of `psctl eval` on image sources: streamed, with intervals, and with counts of bad images."""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch

from ...data.datasets.base import BadEntries, BadImageError
from ...data.datasets.loading import ImageSource, iter_images
from ...data.datasets.prefetch import prefetch
from ...data.errors import UsageError
from ...data.statistics import Z95, Estimate
from ..results import Direction, MetricResult
from .bootstrap import bootstrap_mean
from .clip import Clip, clip_scores
from .fid import USUAL_NUM_IMAGES, fid, fid_infinity, paired_fid
from .images import AnyImage, batches_by_size, to_array
from .kid import kid
from .lpips import Lpips
from .psnr import MAX_PSNR_DB, psnr
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


def measure_clip(
    clip: Clip,
    judge: str,
    generated: ImageSource,
    captions: Mapping[str, str],
    *,
    seed: int = 0,
    bad: BadEntries | None = None,
    details: Details | None = None,
    on_images: OnImages = lambda count: None,
) -> tuple[MetricResult, dict[str, float]]:
    """Return the CLIP score, the mean over images of 100 max(cosine to the caption, 0), and the value of each image.

    Args:
        clip: the judge.
        judge: name of the judge, included in the metric's name, because scores of two judges are not comparable.
        generated: the images.
        captions: caption by image id.
        seed: seed of the bootstrap.
        bad: counts images that cannot be read.
        details: details that are added to the result.
        on_images: called with the number of images after each batch.

    Raises:
        UsageError: an image has no caption, too many images are bad, or none is left.
    """
    without = [image_id for image_id in generated.ids if image_id not in captions]
    if without:
        raise UsageError(f"{generated.name}: {len(without)} images have no caption; the first: {without[0]}")
    values: dict[str, float] = {}
    images = iter_images(generated, crop="none", bad=bad)
    while batch := dict(islice(images, BATCH_SIZE)):
        texts = clip.embed_texts([captions[image_id] for image_id in batch])
        scores = clip_scores(clip.embed_images(list(batch.values())), texts)
        values.update(zip(batch, scores.tolist(), strict=True))
        on_images(len(batch))
    values = _in_order(values, generated)
    return _result_of_mean(f"clip[{judge}]", values, "", "higher", seed, details or {}), values


def measure_pairs(
    names: tuple[str, ...],
    generated: ImageSource,
    reference: ImageSource,
    *,
    lpips: Lpips | None = None,
    seed: int = 0,
    bad: BadEntries | None = None,
    details: Mapping[str, Details] | None = None,
    on_images: OnImages = lambda count: None,
) -> tuple[dict[str, MetricResult], dict[str, dict[str, float]]]:
    """Measure PSNR, SSIM and LPIPS of each image to the reference of the same id, in one pass.

    Args:
        names: names from `PAIR_METRICS`.
        generated, reference: sources with the same ids; the two images of a pair must have one size.
        lpips: the network, if LPIPS is measured.
        seed: seed of the bootstrap.
        bad: counts pairs of which an image cannot be read.
        details: details that are added to the results, by metric.
        on_images: called with the number of pairs after each batch.

    Returns:
        Results and values of each image, by metric.

    Raises:
        UsageError: the ids or the sizes of a pair differ, too many images are bad, or none is left.
    """
    if set(generated.ids) != set(reference.ids):
        count = len(set(generated.ids) ^ set(reference.ids))
        raise UsageError(f"{generated.name} and {reference.name}: {count} images have no partner on the other side")
    found = pair_values(names, _pairs(generated, reference, bad), lpips, on_images)
    results, values = {}, {}
    for name in names:
        more = dict((details or {}).get(name, {}))
        if name == "psnr":
            num_identical = sum(map(math.isinf, found[name].values()))
            more |= {"num_identical": num_identical, "identical_counts_as_db": MAX_PSNR_DB}
            found[name] = {key: min(value, MAX_PSNR_DB) for key, value in found[name].items()}
        values[name] = _in_order(found[name], generated)
        results[name] = _result_of_mean(name, values[name], *PAIR_METRICS[name], seed, more)
    return results, values


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
        results["fid"] = _result("fid", found, "", "lower", seed, common | more)
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
        results["kid"] = _result("kid", each.estimate, "", "lower", seed, common | more)
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
    return _result("fid", paired_fid(first, second, seed), "", "lower", seed, more)


def _result_of_mean(
    name: str, values: Mapping[str, float], unit: str, direction: Direction, seed: int, details: Details
) -> MetricResult:
    if not values:
        raise UsageError(f"{name}: there is no image to measure")
    more = {**details, "interval": "bootstrap over images"}
    return _result(name, bootstrap_mean(list(values.values()), seed), unit, direction, seed, more)


def _result(
    name: str, estimate: Estimate, unit: str, direction: Direction, seed: int, details: dict[str, Any]
) -> MetricResult:
    assert estimate.n is not None
    return MetricResult(name, estimate.value, estimate.low, estimate.high, estimate.n, unit, direction, seed, details)


def _in_order(values: Mapping[str, float], source: ImageSource) -> dict[str, float]:
    """Return the values in the order of the source's ids: a bootstrap must not depend on the order of the files."""
    return {image_id: values[image_id] for image_id in source.ids if image_id in values}


def _pairs(
    generated: ImageSource, reference: ImageSource, bad: BadEntries | None
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield each image and its reference, read ahead by threads.

    The order is that of the reference, which may be a table that can be read fast in one order only.
    """
    bad = BadEntries(f"{generated.name} against {reference.name}") if bad is None else bad

    def load(image_id: str) -> tuple[str, np.ndarray, np.ndarray] | tuple[str, BadImageError]:
        try:
            return image_id, np.array(generated.open_image(image_id)), np.array(reference.open_image(image_id))
        except BadImageError as error:
            return image_id, error

    for loaded in prefetch(reference.reading_order, load, 2):
        if len(loaded) == 2:
            bad.add(loaded[0], loaded[1])
            continue
        image_id, image, other = loaded
        if image.shape != other.shape:
            raise UsageError(
                f"{image_id}: the image is {image.shape[1]}x{image.shape[0]}, but its reference "
                f"{other.shape[1]}x{other.shape[0]}; pairs need one size"
            )
        yield loaded


def _array(image: torch.Tensor) -> np.ndarray:
    return image.permute(1, 2, 0).numpy()
