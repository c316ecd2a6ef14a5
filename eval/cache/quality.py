"""What the sides of `psctl bench cache` cost in quality, beside the side without a cache."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from ...data.datasets.registry import open_dataset
from ...data.datasets.sampling import sample_pairs
from ...data.errors import UsageError
from ...data.resolution import Resolution
from ...profiling.steps.rows import median_interval
from ..metrics.bootstrap import mean_interval
from ..metrics.clip import Clip
from ..metrics.features import features_of
from ..metrics.fid import fid_of_features
from ..metrics.images import AnyImage, batches_by_size, to_array
from ..metrics.judges import Judges
from ..metrics.lpips import Lpips
from ..metrics.psnr import MAX_PSNR_DB, psnr
from ..metrics.ssim import ssim
from ..options import FEATURES_DIR, SAMPLES_DIR
from ..sets.image_sets import fitted_sample
from .sides import Side

_BATCH_SIZE = 16


@dataclass(frozen=True)
class QualityOptions:
    """What is measured of the images beside PSNR and SSIM; the defaults are the command's.

    Attributes:
        clip: whether CLIP says how well images fit their prompts.
        lpips: whether LPIPS says how far images look apart.
        fid_dataset: spec (`data.datasets.spec`) of the real images that FID compares with; None leaves FID out.
        num_real: how many of them.
        seed: of their draw.

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
        """Look for the weights of what is wanted. Raises as `Judges.check`."""
        wanted = {"clip": self.clip, "lpips": self.lpips, "fid": self.fid_dataset is not None}
        judges.check(tuple(name for name, is_wanted in wanted.items() if is_wanted))


def real_features(
    judges: Judges, options: QualityOptions, resolutions: Sequence[Resolution], workspace_root: Path
) -> Tensor | None:
    """Features (n, d) of real images, cut and scaled to the resolutions in turn; None without FID.

    Raises:
        UsageError: the data set cannot be read, or has too few images.
    """
    if options.fid_dataset is None:
        return None
    dataset = open_dataset(options.fid_dataset)
    sample = sample_pairs(dataset, options.num_real, options.seed, cache_dir=workspace_root / SAMPLES_DIR)
    if not sample.has_images:
        raise UsageError(f"{sample.name}: holds captions only, but FID needs reference images")
    sizes = {image_id: resolutions[number % len(resolutions)] for number, image_id in enumerate(sample.ids)}
    fitted = fitted_sample(sample, sizes)
    return features_of(fitted, judges.inception, judges.inception_sha256, workspace_root / FEATURES_DIR)


def compare_sides(
    sides: Sequence[Side],
    batch_size: int,
    texts: Sequence[str],
    judges: Judges,
    options: QualityOptions,
    real: Tensor | None,
) -> list[dict[str, Any]]:
    """Time and quality of every side as a row of figures; those of images are means over all.

    Args:
        sides: the first is the one without a cache.
        batch_size: requests of a batch.
        texts: the prompts of all images in order.
        judges: of the images.
        options: what they are asked.
        real: features of real images, for FID.
    """
    off = sides[0]
    plain_scores = _clip_scores(judges.clip, off.images, texts) if options.clip else None
    plain_features = None if real is None else _batched(off.images, judges.inception)
    rows = []
    for side in sides:
        row = _times(side, off, batch_size)
        if side is not off:
            found = _similarity(side.images, off.images, judges.lpips if options.lpips else None)
            row |= {name: float(values.mean()) for name, values in found.items()}
            row["ssim_min"] = float(found["ssim"].min())
            row["intervals"] |= {name: _ends(values) for name, values in found.items()}
        if plain_scores is not None:
            scores = plain_scores if side is off else _clip_scores(judges.clip, side.images, texts)
            change = scores - plain_scores
            low, high = mean_interval(change, seed=0) or (None, None)
            row["clip"] = float(scores.mean())
            row["intervals"]["clip"] = _ends(scores)
            row["clip_change"] = {"mean": float(change.mean()), "low": low, "high": high}
        if plain_features is not None and real is not None:
            features = plain_features if side is off else _batched(side.images, judges.inception)
            row["fid"] = fid_of_features(real, features).fid
            row["fid_to_off"] = fid_of_features(plain_features, features).fid
        rows.append(row)
    return rows


def _times(side: Side, off: Side, batch_size: int) -> dict[str, Any]:
    ratios = [plain / own for plain, own in zip(off.seconds, side.seconds, strict=True)]
    row: dict[str, Any] = {
        "label": side.setting.label,
        "kind": side.setting.kind,
        "threshold": side.setting.options.threshold,
        "image_ms": float(np.median(side.seconds)) / batch_size * 1e3,
        "speedup": float(np.median(ratios)),
        "speedup_min": min(ratios),
        "speedup_max": max(ratios),
        "num_images": len(side.images),
        # Of means over images; that of the speedup, a median over rounds, wants six of them.
        "intervals": {"speedup": None if side is off else median_interval(ratios)},
    }
    if side.cache is not None:
        stats = side.cache.stats
        saved = stats.saved_share
        row |= stats.to_json() | {
            "efficiency": (1 - 1 / row["speedup"]) / saved if saved else None,
            "cache_overhead_share": stats.overhead_s / sum(side.seconds),
            "cache_overhead_of_off": stats.overhead_s / sum(off.seconds),
        }
    return row


def _similarity(images: Sequence[Image], originals: Sequence[Image], lpips: Lpips | None) -> dict[str, np.ndarray]:
    """PSNR, SSIM and LPIPS of every image and its original, (n,) each."""

    def of_pairs(distance: Callable[[Tensor, Tensor], Tensor]) -> np.ndarray:
        # One above the other, so that both go into the same batch.
        pairs = (np.concatenate([to_array(image) for image in pair]) for pair in zip(images, originals, strict=True))
        return _batched(pairs, lambda batch: distance(*batch.chunk(2, dim=2))).double().numpy()

    found = {
        "psnr_db": np.array([min(psnr(one, other), MAX_PSNR_DB) for one, other in zip(images, originals, strict=True)]),
        "ssim": of_pairs(ssim),
    }
    if lpips is not None:
        found["lpips"] = of_pairs(lpips)
    return found


def _ends(values: np.ndarray) -> list[float] | None:
    """95 % interval of the mean over images, as JSON."""
    interval = mean_interval(values)
    return None if interval is None else list(interval)


def _clip_scores(clip: Clip, images: Sequence[Image], texts: Sequence[str]) -> np.ndarray:
    """100 max(cosine, 0) of every image and its prompt."""
    with torch.inference_mode():
        cosines = (clip.embed_images(images) * clip.embed_texts(texts)).sum(1)
    return 100 * cosines.clamp(min=0).double().cpu().numpy()


def _batched(images: Iterable[AnyImage], function: Callable[[Tensor], Tensor]) -> Tensor:
    """What the function makes of uint8 images (n, 3, height, width), gathered by size, in the order of the images."""
    parts, places = [], []
    for keys, batch in batches_by_size(enumerate(images), _BATCH_SIZE):
        parts.append(function(batch).cpu())
        places += keys
    return torch.cat(parts)[np.argsort(places)]
