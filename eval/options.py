"""Options of `psctl eval`, checked before anything heavy is loaded. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..data.errors import UsageError
from ..data.resolution import parse_list
from ..serving.models.defaults import ModelDefaults
from ..serving.scheduling.policies import get_policy

if TYPE_CHECKING:
    from ..data.datasets.folders import ImageFolder
    from ..data.datasets.sampling import Sample
    from .sets.generate import ImageItem

METRICS = ("fid", "kid", "clip", "lpips", "psnr", "ssim")
PAIRED = ("lpips", "psnr", "ssim")
SETWISE = ("fid", "kid")
SAMPLES_DIR, FEATURES_DIR = "samples", "features"
"""Folders in the root of the workspace, shared by all models."""


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """Options of an evaluation; the defaults are the command's.

    Attributes:
        metrics: some of `METRICS`.
        dataset: spec (`data.datasets.spec`) of the text-image pairs: their captions are drawn, their images are the
            reference.
        num_prompts: number of pairs.
        seed: seed of the sample, of the first image, and of all random draws in the metrics.
        resolutions: resolutions as text, such as "128,192", assigned in turn; None for the model's.
        num_inference_steps, guidance_scale: parameters of every request; None for the model's.
        policy: name of the policy that admits requests to the batch.
        max_batch_size: maximum number of requests in the engine's batch.
        max_bad: maximum number of images that may be missing, damaged or fail.

    Raises:
        UsageError: a value is out of its range.
    """

    metrics: tuple[str, ...] = METRICS
    dataset: str = "emoji"
    num_prompts: int = 256
    seed: int = 0
    resolutions: str | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    policy: str = "continuous"
    max_batch_size: int = 16
    max_bad: int = 0

    def __post_init__(self) -> None:
        unknown = [name for name in self.metrics if name not in METRICS]
        if unknown or not self.metrics:
            raise UsageError(
                f"metrics are {', '.join(self.metrics) or 'none'}, but must be some of {', '.join(METRICS)}"
            )
        for name, value, least in (
            ("--num-prompts", self.num_prompts, 1),
            ("--max-batch-size", self.max_batch_size, 1),
            ("--max-bad", self.max_bad, 0),
        ):
            if value < least:
                raise UsageError(f"{name} is {value}, but it must be at least {least}")
        if self.num_prompts < 2 and set(SETWISE) & set(self.metrics):
            raise UsageError(f"FID and KID need at least 2 images, but --num-prompts is {self.num_prompts}")
        get_policy(self.policy)


@dataclass(frozen=True)
class EvalPlan:
    """Images for a model to draw: the sample, an item for each pair, and steps and guidance scale of every request."""

    sample: "Sample"
    items: "tuple[ImageItem, ...]"
    num_inference_steps: int
    guidance_scale: float


def plan_eval(options: EvalOptions, defaults: ModelDefaults, workspace_root: Path) -> EvalPlan:
    """Draw the text-image pairs and plan an image for each. Images are decoded only to check them.

    Raises:
        UsageError: the data set cannot be read, has too few pairs or no images where a metric needs them, or a
            resolution is malformed.
        OSError: the sample cannot be cached.
    """
    # Imported here, because the command line reads the options' defaults, and its help must not wait for data sets.
    from ..data.datasets.registry import open_dataset
    from ..data.datasets.sampling import sample_pairs
    from .sets.generate import make_items

    resolutions = defaults.resolutions if options.resolutions is None else parse_list(options.resolutions)
    sample = sample_pairs(
        open_dataset(options.dataset),
        options.num_prompts,
        options.seed,
        max_bad=options.max_bad,
        cache_dir=workspace_root / SAMPLES_DIR,
    )
    needing = [name for name in options.metrics if name != "clip"]
    if needing and not sample.has_images:
        raise UsageError(
            f"{sample.name}: holds captions only, but {', '.join(needing)} need reference images; measure clip only"
        )
    steps, scale = options.num_inference_steps, options.guidance_scale
    return EvalPlan(
        sample,
        make_items(list(zip(sample.ids, sample.captions, strict=True)), resolutions, options.seed),
        defaults.num_inference_steps if steps is None else steps,
        defaults.guidance_scale if scale is None else scale,
    )


def open_folders(
    metrics: Sequence[str], generated: Path, reference: Path | None
) -> "tuple[ImageFolder, ImageFolder | None]":
    """Open the folders to measure.

    Raises:
        UsageError: one is missing or holds no image, or a metric needs reference images and there are none.
    """
    from ..data.datasets.folders import open_folder

    needing = [name for name in metrics if name != "clip"]
    if needing and reference is None:
        verb = "compares" if len(needing) == 1 else "compare"
        raise UsageError(f"{', '.join(needing)} {verb} with reference images: give --reference DIR")
    return open_folder(generated), None if reference is None else open_folder(reference)
