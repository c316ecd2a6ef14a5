"""What the measurements of one command share: networks, caches, seed, tolerance, and progress."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..data.datasets.base import BadEntries
from ..data.datasets.loading import ImageSource
from .metrics.features import features_of
from .metrics.judges import Judges
from .metrics.measure import measure_clip, measure_pairs
from .options import FEATURES_DIR, SAMPLES_DIR, EvalOptions
from .results import MetricResult

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
        self, source: ImageSource, captions: Mapping[str, str], what: str = "CLIP score", **details: Any
    ) -> tuple[MetricResult, dict[str, float]]:
        """Return the CLIP score and that of each image, as `measure_clip`; `what` names the phase."""
        return measure_clip(
            self.judges.clip,
            self.judges.clip_name,
            source,
            captions,
            seed=self.seed,
            bad=BadEntries(source.name, self.max_bad),
            details=self.judges.clip_details | details,
            on_images=self.start_phase(what, len(source.ids)),
        )

    def pairs(
        self, names: tuple[str, ...], one: ImageSource, other: ImageSource, what: str = "pairs", **details: Any
    ) -> tuple[dict[str, MetricResult], dict[str, dict[str, float]], list[str]]:
        """Return distances of images to those of the same ids, by metric, as `measure_pairs`, and warnings about pairs
        that were left out; `what` names the phase.
        """
        bad = BadEntries(f"{one.name} against {other.name}", self.max_bad)
        found, values = measure_pairs(
            names,
            one,
            other,
            lpips=self.judges.lpips if "lpips" in names else None,
            seed=self.seed,
            bad=bad,
            details={name: details | (self.judges.lpips_details() if name == "lpips" else {}) for name in names},
            on_images=self.start_phase(what, len(one.ids)),
        )
        return found, values, [f"pair left out: {each}" for each in bad.problems]
