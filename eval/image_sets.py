"""What is measured: generated images and the references that they are held against, under the same ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from ..data.datasets.folders import FolderPairs, ImageFolder
from ..data.datasets.loading import fitted
from ..data.datasets.sampling import Sample
from ..data.errors import UsageError
from ..data.resolution import Resolution
from .generate_set import Manifest


@dataclass(frozen=True)
class NamedFiles:
    """Images of a folder under ids of their own; an `ImageSource`.

    Attributes:
        folder: where they lie.
        files: id of each image in `folder`, by the id that it has here.
    """

    folder: ImageFolder
    files: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def ids(self) -> Sequence[str]:
        return tuple(self.files)

    @property
    def reading_order(self) -> Sequence[str]:
        return self.ids

    def open_image(self, image_id: str) -> Image.Image:
        return self.folder.open_image(self.files[image_id])

    def content(self, image_id: str) -> bytes:
        return self.folder.content(self.files[image_id])


@dataclass(frozen=True)
class FittedSample:
    """Real images of a sample, each cut and scaled to the size of the generated one; an `ImageSource`.

    Metrics of pairs need equal sizes, and a set of small generated images would otherwise be told from a set of large
    real ones by nothing but its blur.
    """

    sample: Sample
    sizes: Mapping[str, Resolution]

    @property
    def name(self) -> str:
        return self.sample.name

    @property
    def ids(self) -> Sequence[str]:
        return self.sample.ids

    @property
    def reading_order(self) -> Sequence[str]:
        return self.sample.reading_order

    def open_image(self, image_id: str) -> Image.Image:
        return fitted(self.sample.open_image(image_id), self.sizes[image_id], "center-square")

    def content(self, image_id: str) -> bytes:
        # The size belongs to the content, or features of another size would be taken for these.
        return str(self.sizes[image_id]).encode() + b"|" + self.sample.content(image_id)


def set_of(root: Path, manifest: Manifest) -> NamedFiles:
    """The images of a generated set by the ids of their text-image pairs.

    A missing file is met when it is read, and counts as bad then.
    """
    return NamedFiles(
        ImageFolder(root, tuple(item.file for item in manifest.items)), {item.id: item.file for item in manifest.items}
    )


def sources_of_pairs(pairs: FolderPairs) -> tuple[NamedFiles, NamedFiles]:
    """Generated and reference images of two folders by the stems that they share."""
    return (
        NamedFiles(pairs.generated, dict(zip(pairs.stems, pairs.generated_ids, strict=True))),
        NamedFiles(pairs.reference, dict(zip(pairs.stems, pairs.reference_ids, strict=True))),
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
