"""Image files below one folder, at locations relative to it."""

import os
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from .decode import decode_rgb, is_image_name, read_content, size_of


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """Base of data sets whose images are files; a location is a path below `root`, with slashes."""

    root: Path

    def open_image(self, location: str) -> Image.Image:
        """Return the decoded image of a file. Raises BadImageError."""
        return decode_rgb(self.content(location), str(self.path(location)))

    def content(self, location: str) -> bytes:
        """Return the bytes of an image file. Raises BadImageError."""
        return read_content(self.path(location))

    def image_size(self, location: str) -> tuple[int, int]:
        """Return (width, height) in pixels of the image of `open_image`, from the header. Raises BadImageError."""
        return size_of(self.content(location), str(self.path(location)))

    def path(self, location: str) -> Path:
        """Return the path of the file at a location."""
        return self.root / location


def images_below(folder: Path, skip: Set[Path] = frozenset()) -> Iterator[Path]:
    """Yield the files below a folder whose names are those of images, except hidden ones and those below `skip`."""
    for current, folders, files in os.walk(folder):
        here = Path(current)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and here / name not in skip)
        yield from (here / name for name in files if is_image_name(name))


def name_problem(name: object) -> str | None:
    """Return the problem of a file name from an annotation, which must be text and stay below its folder, or None."""
    if not isinstance(name, str) or not name.strip():
        return f"has {name!r} where a file name should be"
    # Plain text, because creating a path object per image takes a third of the time of reading COCO's annotations.
    if name.startswith("/") or ".." in name.split("/") or "\0" in name:
        return f"has a file name that leads out of its folder: {name!r}"
    return None
