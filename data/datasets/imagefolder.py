"""Hugging Face's `imagefolder`: folders of images, each with a metadata.csv or metadata.jsonl that names them."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import UsageError
from ..files import sha256_of
from ..records import column_name
from .base import CaptionEntry, ImageKind, require_existing
from .files import ImageFiles, images_below, name_problem
from .record_entries import ColumnChoice, entry_of_record, records_with_columns

METADATA_NAMES = ("metadata.csv", "metadata.jsonl")
_FILE_COLUMN = "file_name"


@dataclass(frozen=True, slots=True)
class ImageFolderCaptions(ImageFiles):
    """Images named by metadata files. An entry's id is the path of its image below `root`, with slashes."""

    metadata: tuple[Path, ...]
    columns: ColumnChoice
    image_kind: ImageKind = "stored"

    @property
    def name(self) -> str:
        return f"imagefolder:{self.root}"

    def entries(self) -> Iterator[CaptionEntry]:
        """Yield the lines of all metadata files. An image without a line is an entry with a problem; to find these, the
        image names of one metadata file are in memory (about 100 bytes each).
        """
        for path in self.metadata:
            listed: set[str] = set()
            below = path.parent.relative_to(self.root).as_posix()
            for line, record, columns in records_with_columns(path, "names and captions of images", self.columns):
                if _FILE_COLUMN not in record:
                    raise UsageError(
                        f"{path}:{line}: has {', '.join(record)}, but one column must be called {_FILE_COLUMN}"
                    )
                problem = name_problem(record[_FILE_COLUMN])
                if problem is not None:
                    yield CaptionEntry(f"{path.name} line {line}", (), problem=problem)
                    continue
                location = PurePosixPath(below, record[_FILE_COLUMN]).as_posix()
                listed.add(location)
                yield entry_of_record(record, location, location, columns)
            owners = {each.parent for each in self.metadata}
            for image in images_below(path.parent, owners):
                location = image.relative_to(self.root).as_posix()
                if location not in listed:
                    yield CaptionEntry(location, (), problem=f"has no line in {path.name}")

    def fingerprint(self) -> dict[str, Any]:
        """Return the digests of the metadata files, the folder of the images, and the chosen columns."""
        files = {path.relative_to(self.root).as_posix(): sha256_of(path) for path in self.metadata}
        return {"imagefolder": files, "root": str(self.root.resolve()), "columns": asdict(self.columns)}


def open_imagefolder(path: str, *, split: str | None = None, caption_column: str | None = None) -> ImageFolderCaptions:
    """Open a folder with metadata.csv or metadata.jsonl at its top or in the folders below.

    Options are as in `spec.parse_spec`. Raises UsageError if there is no such folder, or it has no metadata, or two
    metadata files are in one place.
    """
    root = require_existing(path, "an image folder")
    if split is not None:
        root = require_existing(root / split, f"the folder of the split {split!r}")
    if not root.is_dir():
        raise UsageError(f"{root}: is a file, but it must be a folder of images with {' or '.join(METADATA_NAMES)}")
    found = sorted(file for name in METADATA_NAMES for file in root.rglob(name) if file.is_file())
    if not found:
        raise UsageError(f"{root}: holds no {' or '.join(METADATA_NAMES)}, which would give the captions")
    for one, other in pairwise(found):
        if one.parent == other.parent:
            raise UsageError(f"{one.parent}: holds both {one.name} and {other.name}, but one of them must go")
    return ImageFolderCaptions(root, tuple(found), ColumnChoice(caption=caption_column and column_name(caption_column)))
