"""Images that lie as files below one folder, at locations relative to it."""

import os
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from .decode import decode_rgb, is_image_name, read_content, size_of


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """What data sets whose images are files are made on; a location is a path below `root`, with slashes."""

    root: Path

    def open_image(self, location: str) -> Image.Image:
        """See `CaptionDataset`."""
        return decode_rgb(self.content(location), str(self.path(location)))

    def content(self, location: str) -> bytes:
        """See `CaptionDataset`."""
        return read_content(self.path(location))

    def image_size(self, location: str) -> tuple[int, int]:
        """(width, height) of what `open_image` would return, in pixels, from the header alone. Raises BadImageError."""
        return size_of(self.content(location), str(self.path(location)))

    def path(self, location: str) -> Path:
        """Where the file lies."""
        return self.root / location


def images_below(folder: Path, skip: Set[Path] = frozenset()) -> Iterator[Path]:
    """The files below a folder that their names say are images, but hidden ones and those below folders in `skip`."""
    for current, folders, files in os.walk(folder):
        here = Path(current)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and here / name not in skip)
        yield from (here / name for name in files if is_image_name(name))


def name_problem(name: object) -> str | None:
    """What is wrong with a file name that an annotation gives: it must be text, and stay below its folder."""
    if not isinstance(name, str) or not name.strip():
        return f"has {name!r} where a file name should be"
    # Plain text, because a path object an image would be a third of the time of reading COCO's annotations.
    if name.startswith("/") or ".." in name.split("/") or "\0" in name:
        return f"has a file name that leads out of its folder: {name!r}"
    return None
