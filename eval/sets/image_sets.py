"""What is measured: generated images, and the references that they are compared with, under the same ids."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from ...data.datasets.folders import FolderPairs, ImageFolder
from ...data.datasets.loading import fitted
from ...data.datasets.registry import open_dataset
from ...data.datasets.sampling import Sample, sample_pairs
from ...data.errors import UsageError
from ...data.resolution import Resolution
from .generate import Manifest


@dataclass(frozen=True)
class RemappedImages:
    """Images of another source under ids, or in sizes, of their own; an `ImageSource`."""

    name: str
    ids: Sequence[str]
    reading_order: Sequence[str]
    open_image: Callable[[str], Image.Image]
    content: Callable[[str], bytes]


def named_files(folder: ImageFolder, files: Mapping[str, str]) -> RemappedImages:
    """Images of a folder under ids of their own; `files` has the id of each in `folder` by the id that it has here."""
    ids = tuple(files)
    return RemappedImages(
        folder.name,
        ids,
        ids,
        lambda image_id: folder.open_image(files[image_id]),
        lambda image_id: folder.content(files[image_id]),
    )


def fitted_sample(sample: Sample, sizes: Mapping[str, Resolution]) -> RemappedImages:
    """Real images of a sample, each cut and scaled to the size of the generated one.

    Metrics of pairs need equal sizes, and a set of small generated images would otherwise differ from a set of large
    real ones by its blur alone.
    """
    return RemappedImages(
        sample.name,
        sample.ids,
        sample.reading_order,
        lambda image_id: fitted(sample.open_image(image_id), sizes[image_id], "center-square"),
        # The size belongs to the content, or features of another size would be taken for these.
        lambda image_id: str(sizes[image_id]).encode() + b"|" + sample.content(image_id),
    )


def set_of(root: Path, manifest: Manifest) -> RemappedImages:
    """The images of a generated set by the ids of their text-image pairs.

    A missing file is met when it is read, and counts as bad then.
    """
    folder = ImageFolder(root, tuple(item.file for item in manifest.items))
    return named_files(folder, {item.id: item.file for item in manifest.items})


def ground_truth_of(manifest: Manifest, *, max_bad: int = 0, cache_dir: Path | None = None) -> RemappedImages:
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


def sources_of_pairs(pairs: FolderPairs) -> tuple[RemappedImages, RemappedImages]:
    """Generated and reference images of two folders by the stems that they share."""
    return (
        named_files(pairs.generated, dict(zip(pairs.stems, pairs.generated_ids, strict=True))),
        named_files(pairs.reference, dict(zip(pairs.stems, pairs.reference_ids, strict=True))),
    )


def require_same_prompts(first: Manifest, second: Manifest) -> None:
    """Check that two sets were drawn for the same prompts with the same seeds and sizes.

    Raises:
        UsageError: they were not; the first item that differs is named.
    """
    if first.prompts_digest == second.prompts_digest:
        return
    if len(first.items) != len(second.items):
        raise UsageError(f"the two sets have {len(first.items)} and {len(second.items)} images, but pairs need as many")
    for one, other in zip(first.items, second.items, strict=True):
        for name in ("id", "prompt", "seed", "width", "height"):
            if getattr(one, name) != getattr(other, name):
                raise UsageError(
                    f"{one.file} has {name} {getattr(one, name)!r} in the first set and {getattr(other, name)!r} in "
                    "the second, but pairs need the same prompts, seeds and sizes"
                )
    raise UsageError("the two sets name their files differently, so pairs are not clear")
