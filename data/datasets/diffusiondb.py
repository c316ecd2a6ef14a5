"""DiffusionDB (Wang et al., 2022): parts of a thousand images, each with a JSON of prompts, and metadata tables."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..files import sha256_of
from ..records import json_type, read_json
from .base import CaptionDataset, CaptionEntry, ImageKind, clean_captions, require_existing, shortened
from .decode import is_image_name
from .diffusiondb_metadata import ImageFacts, Metadata
from .files import ImageFiles, name_problem
from .hub import DISK_MARKS, rows_from_disk, rows_from_hub
from .parquet import parquet_rows
from .record_entries import ColumnChoice
from .tables import NsfwFilter, table_captions

HUB_REPOSITORY = "poloclub/diffusiondb"
HUB_CONFIG = "2m_random_1k"
"""The hub's own default; larger ones, such as 2m_first_5k, are at revision "refs/convert/parquet"."""

_PART = re.compile(r"part-\d{6}")
_PARENTS = ("", "images", "diffusiondb-large-part-1", "diffusiondb-large-part-2")
_METADATA_NAMES = ("metadata.parquet", "metadata-large.parquet")


@dataclass(frozen=True, slots=True)
class DiffusionDBParts(ImageFiles):
    """Parts on disk, 2M (PNG) or Large (WebP). An entry's id is the image's name, a UUID with its suffix.

    The JSON of a part lists its images with prompts and seeds; the metadata table, if there is one, adds sizes and NSFW
    scores.
    """

    parts: tuple[Path, ...]
    metadata: Metadata | None
    nsfw: NsfwFilter
    image_kind: ImageKind = "stored"

    @property
    def name(self) -> str:
        return f"diffusiondb:{self.root}{self.nsfw}"

    def entries(self) -> Iterator[CaptionEntry]:
        """Yield the images of all parts. One part is in memory at a time, and 24 bytes of metadata per image. An image
        that the JSON of its part does not name is an entry with a problem.
        """
        facts = None
        if self.metadata is not None:
            facts = self.metadata.facts({int(part.name.removeprefix("part-")) for part in self.parts})
        for part in self.parts:
            yield from self._part_entries(part, facts)

    def fingerprint(self) -> dict[str, Any]:
        """Return the digests of the JSON files, the state of the metadata table, the filter and the folder."""
        digests = {part.name: sha256_of(self._json_of(part)) for part in self.parts if self._json_of(part).is_file()}
        metadata = None if self.metadata is None else self.metadata.fingerprint()
        return {"parts": digests, "metadata": metadata, "max_nsfw": self.nsfw.limit, "root": str(self.root.resolve())}

    @staticmethod
    def _json_of(part: Path) -> Path:
        return part / f"{part.name}.json"

    def _part_entries(self, part: Path, facts: ImageFacts | None) -> Iterator[CaptionEntry]:
        path = self._json_of(part)
        twice: set[str] = set()
        content = read_json(path, "names and prompts of images", twice)
        found = {} if facts is None else facts.of(list(content))
        for name, values in content.items():
            location = f"{part.relative_to(self.root).as_posix()}/{name}"
            entry = _entry(name, location, values, found.get(name))
            if name in twice:
                yield CaptionEntry(name, (), problem=f"occurs twice in {path.name}")
            else:
                yield from self.nsfw.apply(entry, found[name].scores if name in found else ())
        for file in part.iterdir():
            if is_image_name(file.name) and file.name not in content:
                yield CaptionEntry(file.name, (), problem=f"has no prompt in {path.name}")


def open_diffusiondb(
    path: str,
    *,
    max_nsfw: float | None = None,
    split: str | None = None,
    config: str | None = None,
    revision: str | None = None,
) -> CaptionDataset:
    """Open DiffusionDB in any form in which it is distributed.

    Args:
        path: a folder with `part-000001/part-000001.json` and so on, directly or in `images` or
            `diffusiondb-large-part-1` and `-2`, optionally with `metadata.parquet` or `metadata-large.parquet`; such a
            metadata table itself (prompts without images); a folder written by `save_to_disk`; a parquet file or a
            folder of them with images; or "hub".
        max_nsfw, split, config, revision: as in `spec.parse_spec`.

    Raises:
        UsageError: the path holds none of these forms, or scores are limited and there are none.
        MissingExtraError: the form needs `datasets`, which is not installed.
        RunError: the hub cannot be reached.
    """
    limit: Any = {"max_nsfw": max_nsfw}
    if path == "hub":
        table = rows_from_hub(HUB_REPOSITORY, config or HUB_CONFIG, split or "train", revision)
        return table_captions("diffusiondb", table, ColumnChoice(), needs_images=False, **limit)
    if config is not None or revision is not None:
        raise UsageError(f"diffusiondb:{path} is local, but config and revision are for diffusiondb:hub")
    root = require_existing(path, "a folder of DiffusionDB")
    if root.is_file():
        return table_captions("diffusiondb", parquet_rows(root, split), ColumnChoice(), needs_images=False, **limit)
    if any((root / mark).is_file() for mark in DISK_MARKS):
        return table_captions("diffusiondb", rows_from_disk(root, split), ColumnChoice(), **limit)
    parts = _parts(root)
    if not parts and any(file.name not in _METADATA_NAMES for file in root.rglob("*.parquet")):
        return table_captions("diffusiondb", parquet_rows(root, split), ColumnChoice(), **limit)
    if not parts:
        raise UsageError(
            f"{root}: holds no DiffusionDB: neither part-000001/part-000001.json (here or in images), nor a saved data "
            "set, nor parquet files with images"
        )
    if split is not None:
        raise UsageError(f"{root}: split is {split!r}, but the parts of DiffusionDB have no splits")
    metadata = _metadata(root)
    if max_nsfw is not None and metadata is None:
        raise UsageError(f"{root}: NSFW scores are limited, but there is no {' or '.join(_METADATA_NAMES)} with them")
    return DiffusionDBParts(root, parts, metadata, NsfwFilter(max_nsfw))


def _parts(root: Path) -> tuple[Path, ...]:
    if _PART.fullmatch(root.name) and (root / f"{root.name}.json").is_file():
        return (root,)
    return tuple(
        sorted(
            folder
            for parent in _PARENTS
            for folder in (root / parent).glob("part-*")
            if folder.is_dir() and _PART.fullmatch(folder.name)
        )
    )


def _metadata(root: Path) -> Metadata | None:
    # The table is at the top of the data set, which is above a single part and above `images`.
    folders = [root.absolute()]
    while _PART.fullmatch(folders[-1].name) or folders[-1].name in _PARENTS[1:]:
        folders.append(folders[-1].parent)
    for folder in folders:
        for name in _METADATA_NAMES:
            if (folder / name).is_file():
                return Metadata(folder / name)
    return None


def _entry(name: str, location: str, values: object, facts: Any) -> CaptionEntry:
    problem = name_problem(name)
    if problem is None and "/" in name:
        problem = f"has a name with a folder in it: {name!r}"
    if not isinstance(values, dict):
        return CaptionEntry(name, (), problem=problem or f"is {json_type(values)}, but it must be an object")
    captions, no_caption = clean_captions([values.get("p")])
    seed = values.get("se")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or seed < 0):
        no_caption = no_caption or f"has the seed {shortened(repr(seed))}, but it must be a whole number from 0"
        seed = None
    size = (None, None) if facts is None else (facts.width, facts.height)
    return CaptionEntry(name, captions, location, *size, seed, problem or no_caption)
