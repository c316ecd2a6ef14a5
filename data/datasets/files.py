"""Images that lie as files below one folder, at locations relative to it."""

from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from .decode import decode_rgb, read_content, size_of


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """The image side of a data set whose images are files; a location is a path below `root`, with slashes."""

    root: Path

    def open(self, location: str) -> Image.Image:
        """See `CaptionDataset.open_image`."""
        return decode_rgb(self.content(location), str(self.path(location)))

    def size(self, location: str) -> tuple[int, int]:
        """(width, height) of what `open` would return, in pixels, from the image's header. Raises BadImageError."""
        return size_of(self.content(location), str(self.path(location)))

    def content(self, location: str) -> bytes:
        """See `CaptionDataset.content`."""
        return read_content(self.path(location))

    def path(self, location: str) -> Path:
        """Where the file lies."""
        return self.root / location


def name_problem(name: object) -> str | None:
    """What is wrong with a file name that an annotation gives: it must be text, and stay below its folder."""
    if not isinstance(name, str) or not name.strip():
        return f"has {name!r} where a file name should be"
    # Plain text, because a path object an image would be a third of the time of reading COCO's annotations.
    if name.startswith("/") or ".." in name.split("/") or "\0" in name:
        return f"has a file name that leads out of its folder: {name!r}"
    return None
