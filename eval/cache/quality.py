"""Quality of the sides of `psctl bench cache`, relative to the side without a cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL.Image import Image
from torch import Tensor

from ...data.datasets.registry import open_dataset
from ...data.datasets.sampling import sample_pairs
from ...data.errors import UsageError
from ...data.resolution import Resolution
from ...data.statistics import Estimate, ratios_of
from ...profiling.experiment.rows import Row, row_of
from ..measurer import Measurer
from ..metrics.bootstrap import bootstrap_mean
from ..metrics.clip import clip_scores
from ..metrics.features import features_of_images
from ..metrics.fid import frechet_distance
from ..metrics.judges import Judges
from ..metrics.lpips import Lpips
from ..metrics.measure import pair_values
from ..metrics.psnr import MAX_PSNR_DB
from ..sets.image_sets import fitted_sample
from .sides import CacheBenchSide


@dataclass(frozen=True)
class QualityOptions:
    """Metrics of the images in addition to PSNR and SSIM; the defaults are the command's.

    Attributes:
        clip: whether the CLIP score of images and prompts is measured.
        lpips: whether LPIPS is measured.
        fid_dataset: spec (`data.datasets.spec`) of the real images that FID compares with; None omits FID.
        num_real: number of real images.
        seed: seed of the draw of real images.

    Raises:
        UsageError: there are fewer than two real images.
    """

    clip: bool = True
    lpips: bool = False
    fid_dataset: str | None = None
    num_real: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_real < 2:
            raise UsageError(f"FID needs at least 2 real images, but --num-real is {self.num_real}")

    def check(self, judges: Judges) -> None:
        """Check that the weights for the chosen metrics exist. Raises as `Judges.check`."""
        wanted = {"clip": self.clip, "lpips": self.lpips, "fid": self.fid_dataset is not None}
        judges.check(tuple(name for name, is_wanted in wanted.items() if is_wanted))


def real_features(
    judges: Judges, options: QualityOptions, resolutions: Sequence[Resolution], workspace_root: Path
) -> Tensor | None:
    """Return the features (n, d) of real images, cropped and scaled to the resolutions in turn; None without FID.

    Raises:
        UsageError: the data set cannot be read, or has too few images.
    """
    if options.fid_dataset is None:
        return None
    dataset = open_dataset(options.fid_dataset)
    measurer = Measurer(judges, workspace_root)
    sample = sample_pairs(dataset, options.num_real, options.seed, cache_dir=measurer.samples_dir)
    if not sample.has_images:
        raise UsageError(f"{sample.name}: holds captions only, but FID needs reference images")
    sizes = {image_id: resolutions[number % len(resolutions)] for number, image_id in enumerate(sample.ids)}
    fitted = fitted_sample(sample, sizes)
    return measurer.features(fitted)


def compare_sides(
    sides: Sequence[CacheBenchSide],
    num_requests: int,
    texts: Sequence[str],
    judges: Judges,
    options: QualityOptions,
    real: Tensor | None,
) -> list[dict[str, Any]]:
    """Return time and quality of every side as a row of figures; figures of images are means over all images.

    Args:
        sides: the sides, starting with the one without a cache.
        num_requests: number of requests of each round.
        texts: prompts of all images in order.
        judges: networks that judge the images.
        options: metrics of the images.
        real: features of real images, for FID.
    """
    off = sides[0]
    embedded_texts = judges.clip.embed_texts(texts) if options.clip else None
    plain_scores = plain_features = None
    rows = []
    for side in sides:
        row = _times(side, off, num_requests)
        if side is not off:
            found = similarity(side.images, off.images, judges.lpips if options.lpips else None)
            for name, values in found.items():
                _note(row, name, values)
            row["ssim_min"] = float(found["ssim"].min())
        if embedded_texts is not None:
            scores = clip_scores(judges.clip.embed_images(side.images), embedded_texts).numpy()
            plain_scores = scores if plain_scores is None else plain_scores
            _note(row, "clip", scores)
            change = bootstrap_mean(scores - plain_scores)
            row["clip_change"] = {"mean": change.value, "low": change.low, "high": change.high}
        if real is not None:
            features = features_of_images(enumerate(side.images), judges.inception)
            plain_features = features if plain_features is None else plain_features
            row["fid"] = frechet_distance(real, features)
            row["fid_to_off"] = frechet_distance(plain_features, features)
        rows.append(row)
    return rows


def _note(row: dict[str, Any], name: str, values: np.ndarray) -> None:
    """Put the mean over images and its interval into a row."""
    mean = bootstrap_mean(values)
    row[name] = mean.value
    row["intervals"][name] = None if mean.interval is None else list(mean.interval)


def _times(side: CacheBenchSide, off: CacheBenchSide, num_requests: int) -> dict[str, Any]:
    ratios = ratios_of(off.seconds, side.seconds)
    row: Row = {
        "label": side.setting.label,
        "kind": side.setting.kind,
        "threshold": side.setting.options.threshold,
        "image_ms": float(np.median(side.seconds)) / num_requests * 1e3,
        # Intervals of means over images are added later; that of the speedup, a median, needs six rounds.
        **row_of({"speedup": Estimate(1.0) if side is off else Estimate.of_median(ratios)}),
        "speedup_min": min(ratios),
        "speedup_max": max(ratios),
        "num_images": len(side.images),
        "seconds_by_round": side.seconds,
    }
    if (stats := side.model.cache_stats) is not None:
        saved = stats.saved_share
        row |= stats.to_json() | {
            "max_reuse": None if side.cache is None else side.cache.max_reuse,
            "efficiency": (1 - 1 / row["speedup"]) / saved if saved else None,
            "saved_by_round": side.saved,
            "overhead_s_by_round": side.overhead_s,
            "cache_overhead_share": stats.overhead_s / sum(side.seconds),
            "cache_overhead_of_off": stats.overhead_s / sum(off.seconds),
        }
    return row


def similarity(images: Sequence[Image], originals: Sequence[Image], lpips: Lpips | None) -> dict[str, np.ndarray]:
    """Return PSNR, SSIM and LPIPS of every image and its original, (n,) each."""
    names = {"psnr": "psnr_db", "ssim": "ssim"} | ({} if lpips is None else {"lpips": "lpips"})
    pairs = ((place, *pair) for place, pair in enumerate(zip(images, originals, strict=True)))
    found = {names[name]: values for name, values in pair_values(names, pairs, lpips).items()}
    in_order = {name: np.array([values[place] for place in range(len(images))]) for name, values in found.items()}
    return in_order | {"psnr_db": np.minimum(in_order["psnr_db"], MAX_PSNR_DB)}
