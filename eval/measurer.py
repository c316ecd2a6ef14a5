"""Metrics of image sources, streamed, with what the measurements of one command share."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data.datasets.base import BadEntries, BadImageError
from ..data.datasets.loading import ImageSource, iter_images
from ..data.datasets.prefetch import prefetch
from ..data.errors import UsageError
from .metrics.bootstrap import bootstrap_mean
from .metrics.clip import clip_scores
from .metrics.features import features_of
from .metrics.judges import Judges
from .metrics.measure import BATCH_SIZE, PAIR_METRICS, pair_values, result_of
from .metrics.psnr import MAX_PSNR_DB
from .options import FEATURES_DIR, SAMPLES_DIR, EvalOptions
from .results import Direction, MetricResult

StartPhase = Callable[[str, int], Callable[[int], None]]
"""Called with the name and the number of units of a phase; returns the function to call with units done."""


def silent(what: str, total: int) -> Callable[[int], None]:
    """Report no progress."""
    return lambda count: None


@dataclass(frozen=True, slots=True)
class Measurer:
    """Measures sets of images.

    Attributes:
        judges: networks that judge images.
        root: root of the workspace, in which features and samples of data sets are cached; None for no cache.
        seed: seed of all random draws.
        max_bad: maximum number of images of a set, or of pairs, that may be missing or damaged.
        start_phase: reports progress.
    """

    judges: Judges
    root: Path | None = None
    seed: int = 0
    max_bad: int = 0
    start_phase: StartPhase = silent

    @classmethod
    def of(
        cls, options: EvalOptions, judges: Judges, root: Path | None, start_phase: StartPhase = silent
    ) -> "Measurer":
        """Return a measurer with the seed and the tolerance of these options."""
        return cls(judges, root, options.seed, options.max_bad, start_phase)

    @property
    def samples_dir(self) -> Path | None:
        """Cache folder of samples of data sets."""
        return None if self.root is None else self.root / SAMPLES_DIR

    def features(self, source: ImageSource, what: str = "", bad: BadEntries | None = None) -> torch.Tensor:
        """Return Inception features as `features_of`; `what` names the phase, and without it there is no progress."""
        return features_of(
            source,
            self.judges.inception,
            self.judges.inception_sha256,
            None if self.root is None else self.root / FEATURES_DIR,
            bad=bad,
            on_images=(self.start_phase if what else silent)(f"{what} features", len(source.ids)),
        )

    def clip(
        self, generated: ImageSource, captions: Mapping[str, str], what: str = "CLIP score", /, **details: Any
    ) -> tuple[MetricResult, dict[str, float]]:
        """Return the CLIP score and that of each image.

        It is the mean over images of 100 max(cosine to the caption, 0). Scores of two judges are not comparable, so the
        judge is part of the metric's name.

        Args:
            generated: the images.
            captions: caption by image id.
            what: name of the phase.
            details: details that are added to the result.

        Raises:
            UsageError: an image has no caption, too many images are bad, or none is left.
        """
        without = [image_id for image_id in generated.ids if image_id not in captions]
        if without:
            raise UsageError(f"{generated.name}: {len(without)} images have no caption; the first: {without[0]}")
        clip, values = self.judges.clip, dict[str, float]()
        advance = self.start_phase(what, len(generated.ids))
        images = iter_images(generated, crop="none", bad=BadEntries(generated.name, self.max_bad))
        while batch := dict(islice(images, BATCH_SIZE)):
            texts = clip.embed_texts([captions[image_id] for image_id in batch])
            scores = clip_scores(clip.embed_images(list(batch.values())), texts)
            values.update(zip(batch, scores.tolist(), strict=True))
            advance(len(batch))
        name, details = f"clip[{self.judges.clip_name}]", self.judges.clip_details | details
        return self._mean(name, values, generated, "", "higher", details)

    def pairs(
        self,
        names: tuple[str, ...],
        generated: ImageSource,
        reference: ImageSource,
        what: str = "pairs",
        /,
        **details: Any,
    ) -> tuple[dict[str, MetricResult], dict[str, dict[str, float]], list[str]]:
        """Measure PSNR, SSIM and LPIPS of each image to the reference of the same id, in one pass.

        Args:
            names: names from `PAIR_METRICS`.
            generated, reference: sources with the same ids; the two images of a pair must have one size.
            what: name of the phase.
            details: details that are added to the results.

        Returns:
            Results and values of each image, by metric, and warnings about pairs that were left out.

        Raises:
            UsageError: the ids or the sizes of a pair differ, too many pairs are bad, or none is left.
        """
        if set(generated.ids) != set(reference.ids):
            count = len(set(generated.ids) ^ set(reference.ids))
            raise UsageError(f"{generated.name} and {reference.name}: {count} images have no partner on the other side")
        bad = BadEntries(f"{generated.name} against {reference.name}", self.max_bad)
        lpips = self.judges.lpips if "lpips" in names else None
        advance = self.start_phase(what, len(generated.ids))
        found = pair_values(names, _pairs(generated, reference, bad), lpips, advance)
        results, values = {}, {}
        for name in names:
            more = details | (self.judges.lpips_details() if name == "lpips" else {})
            if name == "psnr":
                num_identical = sum(map(math.isinf, found[name].values()))
                more |= {"num_identical": num_identical, "identical_counts_as_db": MAX_PSNR_DB}
                found[name] = {key: min(value, MAX_PSNR_DB) for key, value in found[name].items()}
            results[name], values[name] = self._mean(name, found[name], generated, *PAIR_METRICS[name], more)
        return results, values, [f"pair left out: {each}" for each in bad.problems]

    def _mean(
        self,
        name: str,
        values: Mapping[str, float],
        source: ImageSource,
        unit: str,
        direction: Direction,
        details: dict[str, Any],
    ) -> tuple[MetricResult, dict[str, float]]:
        """Return the mean of the values, and the values in the order of the ids: a bootstrap must not depend on the
        order of the files.
        """
        if not values:
            raise UsageError(f"{name}: there is no image to measure")
        ordered = {image_id: values[image_id] for image_id in source.ids if image_id in values}
        mean = bootstrap_mean(list(ordered.values()), self.seed)
        more = {**details, "interval": "bootstrap over images"}
        return result_of(name, mean, unit, direction, self.seed, more), ordered


def _pairs(
    generated: ImageSource, reference: ImageSource, bad: BadEntries
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield each image and its reference, read ahead by threads.

    The order is that of the reference, which may be a table that can be read fast in one order only.
    """

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
