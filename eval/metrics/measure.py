"""The metrics of `psctl eval` on image sources: streamed, counted, with intervals."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ...data.datasets.base import BadEntries, BadImageError
from ...data.datasets.loading import ImageSource, iter_images
from ...data.datasets.prefetch import prefetch
from ...data.errors import UsageError
from ...data.statistics import Z95
from ..results import Direction, MetricResult
from .bootstrap import mean_interval
from .clip import Clip
from .fid import fid_of_features
from .fid_stats import USUAL_NUM_IMAGES, fid_infinity, fid_interval, paired_fid_interval, require_pairs
from .images import batches_by_size
from .kid import kid_of_features
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


def clip_metric_name(judge: str) -> str:
    """Name of the CLIP score by this judge: scores of two judges cannot be compared."""
    return f"clip[{judge}]"


def measure_clip(
    clip: Clip,
    judge: str,
    generated: ImageSource,
    captions: Mapping[str, str],
    *,
    seed: int = 0,
    bad: BadEntries | None = None,
    details: Mapping[str, Any] | None = None,
    on_images: OnImages | None = None,
) -> tuple[MetricResult, dict[str, float]]:
    """CLIP score: mean over images of 100 max(cosine to the caption, 0), and the value of each image.

    Args:
        clip: the judge.
        judge: what it is called.
        generated: the images.
        captions: caption by image id.
        seed: of the bootstrap.
        bad: counts images that cannot be read.
        details: goes into the result.
        on_images: called with the number of images that were just done.

    Raises:
        UsageError: an image has no caption, too many images are bad, or none is left.
    """
    name = clip_metric_name(judge)
    without = [image_id for image_id in generated.ids if image_id not in captions]
    if without:
        raise UsageError(f"{generated.name}: {len(without)} images have no caption; the first: {without[0]}")
    values: dict[str, float] = {}
    batch: list[tuple[str, np.ndarray]] = []

    def score() -> None:
        images = clip.embed_images([image for _, image in batch])
        texts = clip.embed_texts([captions[image_id] for image_id, _ in batch])
        cosines = (images * texts).sum(-1).clamp(min=0)
        values.update({image_id: 100 * float(cosine) for (image_id, _), cosine in zip(batch, cosines, strict=True)})
        if on_images is not None:
            on_images(len(batch))
        batch.clear()

    for pair in iter_images(generated, crop="none", bad=bad):
        batch.append(pair)
        if len(batch) == BATCH_SIZE:
            score()
    if batch:
        score()
    values = _in_order(values, generated)
    return _mean_result(name, values, "", "higher", seed, details), values


def measure_pairs(
    names: tuple[str, ...],
    generated: ImageSource,
    reference: ImageSource,
    *,
    lpips: Lpips | None = None,
    seed: int = 0,
    bad: BadEntries | None = None,
    details: Mapping[str, Mapping[str, Any]] | None = None,
    on_images: OnImages | None = None,
) -> tuple[dict[str, MetricResult], dict[str, dict[str, float]]]:
    """PSNR, SSIM and LPIPS of each image to the reference of the same id, in one pass.

    Args:
        names: which of `PAIR_METRICS`.
        generated, reference: sources with the same ids; the two images of a pair must have one size.
        lpips: the network, if LPIPS is wanted.
        seed: of the bootstrap.
        bad: counts pairs of which an image cannot be read.
        details: goes into the results, by metric.
        on_images: called with the number of pairs that were just done.

    Returns:
        Results and values of each image, by metric.

    Raises:
        UsageError: the ids or the sizes of a pair differ, too many images are bad, or none is left.
    """
    if set(generated.ids) != set(reference.ids):
        count = len(set(generated.ids) ^ set(reference.ids))
        raise UsageError(f"{generated.name} and {reference.name}: {count} images have no partner on the other side")
    values: dict[str, dict[str, float]] = {name: {} for name in names}
    num_identical = 0
    pairs = _stacked_pairs(generated, reference, bad)
    for ids, batch in batches_by_size(pairs, BATCH_SIZE):
        images, references = batch.chunk(2, dim=2)
        found: dict[str, list[float]] = {}
        if "psnr" in names:
            exact = [psnr(_array(one), _array(other)) for one, other in zip(images, references, strict=True)]
            num_identical += sum(math.isinf(value) for value in exact)
            found["psnr"] = [min(value, MAX_PSNR_DB) for value in exact]
        if "ssim" in names:
            found["ssim"] = ssim(images, references).tolist()
        if "lpips" in names:
            assert lpips is not None, "LPIPS was asked for without its network"
            found["lpips"] = lpips(images, references).tolist()
        for name, each in found.items():
            values[name].update(zip(ids, each, strict=True))
        if on_images is not None:
            on_images(len(ids))
    values = {name: _in_order(each, generated) for name, each in values.items()}
    results = {}
    for name in names:
        more = dict((details or {}).get(name, {}))
        if name == "psnr":
            more |= {"num_identical": num_identical, "identical_counts_as_db": MAX_PSNR_DB}
        results[name] = _mean_result(name, values[name], *PAIR_METRICS[name], seed, more)
    return results, values


def measure_sets(
    names: tuple[str, ...],
    generated: torch.Tensor,
    reference: torch.Tensor,
    *,
    seed: int = 0,
    details: Mapping[str, Any] | None = None,
) -> tuple[dict[str, MetricResult], list[str]]:
    """FID and KID of features, and what a reader must be warned of.

    Args:
        names: "fid", "kid" or both.
        generated, reference: features (n, d) and (m, d).
        seed: of everything drawn.
        details: goes into the results.

    Raises:
        UsageError: there are fewer than two images on a side.
        MissingExtraError: torchmetrics is not installed.
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
        value = fid_of_features(reference, generated).fid
        low, high = fid_interval(reference, generated, value, seed)
        endless = fid_infinity(reference, generated, (high - value) / Z95, seed)
        more: dict[str, Any] = {"interval": "bootstrap over images, centred"}
        if isinstance(endless, str):
            more["fid_infinity_missing"] = endless
        else:
            more |= {
                "fid_infinity": endless.fid,
                "fid_infinity_low": endless.low,
                "fid_infinity_high": endless.high,
                "fid_infinity_r2": endless.r2,
                "finite_sample_bias": value - endless.fid,
            }
        results["fid"] = MetricResult("fid", value, low, high, smallest, "", "lower", seed, common | more)
        if smallest < USUAL_NUM_IMAGES:
            hint = f"; fid_infinity is missing: {endless}" if isinstance(endless, str) else ", or see fid_infinity"
            warnings.append(
                f"FID of {smallest} images is biased upwards (papers use {USUAL_NUM_IMAGES} and more); compare it only "
                f"with FIDs of as many images{hint}"
            )
    if "kid" in names:
        kid = kid_of_features(reference, generated, seed=seed)
        is_known = math.isfinite(kid.low)
        more = {"subset_size": kid.subset_size, "num_subsets": kid.num_subsets, "subset_std": kid.subset_std}
        results["kid"] = MetricResult(
            "kid",
            kid.kid,
            kid.low if is_known else None,
            kid.high if is_known else None,
            smallest,
            "",
            "lower",
            seed,
            common | more | {"interval": "jackknife over images"},
        )
    return results, warnings


def measure_paired_fid(
    first: torch.Tensor, second: torch.Tensor, *, seed: int = 0, details: Mapping[str, Any] | None = None
) -> MetricResult:
    """FID between two draws of the same prompts and seeds.

    There is no extrapolation over the number of images: pairs are no independent samples, and more of them would not
    take a bias away that both sides share.

    Args:
        first, second: features (n, d), row i of both drawn for the same prompt and seed.
        seed: of the bootstrap.
        details: goes into the result.

    Raises:
        UsageError: the sides have different numbers of images, or fewer than two.
        MissingExtraError: torchmetrics is not installed.
    """
    require_pairs(first, second)
    value = fid_of_features(first, second).fid
    low, high = paired_fid_interval(first, second, value, seed)
    more = dict(details or {}) | {"interval": "bootstrap over pairs, centred"}
    return MetricResult("fid", value, low, high, len(first), "", "lower", seed, more)


def _mean_result(
    name: str,
    values: Mapping[str, float],
    unit: str,
    direction: Direction,
    seed: int,
    details: Mapping[str, Any] | None,
) -> MetricResult:
    if not values:
        raise UsageError(f"{name}: there is no image to measure")
    numbers = list(values.values())
    low, high = mean_interval(numbers, seed) or (None, None)
    more = dict(details or {}) | {"interval": "bootstrap over images"}
    return MetricResult(name, float(np.mean(numbers)), low, high, len(numbers), unit, direction, seed, more)


def _in_order(values: Mapping[str, float], source: ImageSource) -> dict[str, float]:
    """The values in the order of the source's ids: those of a bootstrap must not depend on how the files lie."""
    return {image_id: values[image_id] for image_id in source.ids if image_id in values}


def _stacked_pairs(
    generated: ImageSource, reference: ImageSource, bad: BadEntries | None
) -> Iterator[tuple[str, np.ndarray]]:
    """Each image above its reference, so that both go into the same batch; read ahead by threads.

    They come in the order of the reference, which may be a table that is read fast in one order only.
    """
    bad = BadEntries(f"{generated.name} against {reference.name}") if bad is None else bad

    def load(image_id: str) -> tuple[str, np.ndarray, np.ndarray] | tuple[str, BadImageError]:
        try:
            return (
                image_id,
                np.array(generated.open_image(image_id)),
                np.array(reference.open_image(image_id)),
            )
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
        yield image_id, np.concatenate([image, other], axis=0)


def _array(image: torch.Tensor) -> np.ndarray:
    return image.permute(1, 2, 0).numpy()
