"""Folders of images: generated images, and their references."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..errors import UsageError
from ..resolution import Resolution
from .base import require_existing
from .decode import IMAGE_SUFFIXES
from .files import ImageFiles, images_below


@dataclass(frozen=True, slots=True)
class ImageFolder(ImageFiles):
    """Images below a folder. An id is the relative path with slashes; ids are sorted."""

    ids: tuple[str, ...]

    @property
    def name(self) -> str:
        return str(self.root)

    @property
    def reading_order(self) -> tuple[str, ...]:
        return self.ids

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class FolderPairs:
    """Paired images of two folders, in the order of their stems.

    Attributes:
        generated, reference: the two folders.
        stems: relative paths without the suffix, which the two names of a pair share.
        generated_ids, reference_ids: ids of the two images of each pair.
    """

    generated: ImageFolder
    reference: ImageFolder
    stems: tuple[str, ...]
    generated_ids: tuple[str, ...]
    reference_ids: tuple[str, ...]


def open_folder(path: str | Path) -> ImageFolder:
    """List the images of a folder and its subfolders by suffix, without hidden files.

    Raises UsageError if it is not a folder, or holds no image.
    """
    root = require_existing(path, "a folder of images")
    if not root.is_dir():
        raise UsageError(f"{path}: is a file, but it must be a folder of images")
    ids = [path.relative_to(root).as_posix() for path in images_below(root)]
    if not ids:
        raise UsageError(f"{path}: holds no image ({', '.join(sorted(IMAGE_SUFFIXES))})")
    return ImageFolder(root, tuple(sorted(ids)))


def pair_folders(generated: ImageFolder, reference: ImageFolder) -> FolderPairs:
    """Pair images by their stems, `a/1.png` with `a/1.jpg`, and check by the headers that both have the same size.

    Raises:
        UsageError: a stem occurs twice in one folder, the counts differ, names have no partner, or sizes differ.
        BadImageError: a header cannot be read.
    """
    left, right = _by_stem(generated), _by_stem(reference)
    if left.keys() != right.keys():
        raise UsageError(_mismatch(generated, reference, sorted(left.keys() - right), sorted(right.keys() - left)))
    stems = tuple(sorted(left))
    differing: list[str] = []
    for stem in stems:
        found = Resolution(*generated.image_size(left[stem]))
        wanted = Resolution(*reference.image_size(right[stem]))
        if found != wanted:
            differing.append(f"{stem} is {found}, but its reference is {wanted}")
    if differing:
        raise UsageError(f"{len(differing)} of {len(stems)} pairs differ in size; the first: {differing[0]}")
    return FolderPairs(
        generated, reference, stems, tuple(left[stem] for stem in stems), tuple(right[stem] for stem in stems)
    )


def _by_stem(folder: ImageFolder) -> dict[str, str]:
    by_stem: dict[str, str] = {}
    for image_id in folder.ids:
        stem = PurePosixPath(image_id).with_suffix("").as_posix()
        if stem in by_stem:
            raise UsageError(
                f"{folder.root}: {by_stem[stem]} and {image_id} differ in their suffix only, so pairs are not clear"
            )
        by_stem[stem] = image_id
    return by_stem


def _mismatch(
    generated: ImageFolder, reference: ImageFolder, only_left: Sequence[str], only_right: Sequence[str]
) -> str:
    if len(generated) != len(reference):
        message = (
            f"{generated.root} holds {len(generated)} images and {reference.root} {len(reference)}, but pairs need as "
            "many of each"
        )
    else:
        message = f"{len(only_left)} of {len(generated)} names in {generated.root} and {reference.root} have no partner"
    for folder, names in ((generated, only_left), (reference, only_right)):
        if names:
            message += f"; only in {folder.root}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
    return message
