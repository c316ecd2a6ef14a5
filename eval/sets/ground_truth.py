"""The real images that belong to a set of generated ones: those of the data set whose captions were drawn."""

from pathlib import Path

from ...data.datasets.registry import open_dataset
from ...data.datasets.sampling import sample_pairs
from ...data.errors import UsageError
from ...data.resolution import Resolution
from .generate import Manifest
from .image_sets import GivenImages, fitted_sample


def ground_truth_of(manifest: Manifest, *, max_bad: int = 0, cache_dir: Path | None = None) -> GivenImages:
    """Real images under the ids of a set, each cut and scaled to the size of the generated one.

    Args:
        manifest: of the set, drawn by `psctl eval`, which names the data set; its first seed is the sample's.
        max_bad: how many entries of the data set may be bad, as when the set was drawn.
        cache_dir: where samples are kept.

    Raises:
        UsageError: the set was drawn for no data set, the data set cannot be read or has captions only, or gives other
            pairs now.
    """
    spec = manifest.settings.get("dataset")
    if not isinstance(spec, str):
        raise UsageError("fid compares with real images: give --reference DIR, or other --metrics")
    items = manifest.items
    sample = sample_pairs(open_dataset(spec), len(items), items[0].seed, max_bad=max_bad, cache_dir=cache_dir)
    if not sample.has_images:
        raise UsageError(f"{sample.name}: holds captions only; fid compares with real images: give --reference DIR")
    if sample.ids != tuple(item.id for item in items):
        raise UsageError(
            f"{sample.name}: gives other pairs now than when the images were drawn; give --reference DIR, or draw again"
        )
    return fitted_sample(sample, {item.id: Resolution(item.width, item.height) for item in items})
