"""COCO captions, 2014 and 2017 (Lin et al., 2014; Chen et al., 2015): captions_*.json beside folders of images."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..files import sha256_of
from ..records import json_type, read_json
from .base import CaptionEntry, ImageKind, choose_split, clean_captions, require_existing, shortened
from .files import ImageFiles, name_problem

_PREFIX = "captions_"


@dataclass(frozen=True, slots=True)
class CocoCaptions(ImageFiles):
    """One annotation file and the folder of its images. An entry's id is COCO's image id."""

    annotations: Path
    image_kind: ImageKind = "stored"

    @property
    def name(self) -> str:
        return f"coco:{self.annotations}"

    def entries(self) -> Iterator[CaptionEntry]:
        """Yield the images with their captions. The whole annotation file is in memory meanwhile, because the json
        module needs it. An image without captions and captions without an image are entries with a problem.
        """
        content = read_json(self.annotations, "COCO captions")
        images, annotations = (self._list(content, key) for key in ("images", "annotations"))
        texts: dict[str, list[object]] = {}
        for number, annotation in enumerate(annotations):
            image_id = _id(annotation, "image_id")
            if image_id is None:
                label = f"annotations[{number}]"
                yield CaptionEntry(label, (), problem=f"has no image_id: {shortened(repr(annotation))}")
            else:
                texts.setdefault(image_id, []).append(annotation.get("caption"))
        pictured: set[str] = set()
        for number, image in enumerate(images):
            image_id = _id(image, "id")
            if image_id is None:
                yield CaptionEntry(f"images[{number}]", (), problem=f"has no id: {shortened(repr(image))}")
                continue
            pictured.add(image_id)
            yield _entry(image_id, image, texts.get(image_id, []))
        for image_id in texts.keys() - pictured:
            yield CaptionEntry(image_id, (), problem="has captions, but the annotations list no such image")

    def fingerprint(self) -> dict[str, Any]:
        """Return the digest of the annotations, and the folder of the images."""
        return {"coco": sha256_of(self.annotations), "images": str(self.root.resolve())}

    def _list(self, content: dict[str, Any], key: str) -> list[Any]:
        if key not in content:
            hint = "; the captions are in captions_*.json" if key == "annotations" else ""
            raise UsageError(f"{self.annotations}: has no {key!r}, so it holds no COCO captions{hint}")
        if not isinstance(content[key], list):
            raise UsageError(f"{self.annotations}: {key!r} is {json_type(content[key])}, but it must be a list")
        return content[key]


def open_coco(path: str, *, split: str | None = None, image_dir: str | Path | None = None) -> CocoCaptions:
    """Open a folder with `annotations/captions_*.json` (or with these files themselves), or one such file.

    Options are as in `spec.parse_spec`. Raises UsageError if something is missing, or a split must be chosen.
    """
    root = require_existing(path, "a folder of COCO or a captions_*.json")
    if split is not None and not root.is_dir():
        raise UsageError(f"{root}: split is {split!r}, but one annotation file is one split")
    annotations = _annotation_file(root, split) if root.is_dir() else root
    if image_dir is not None:
        images = require_existing(image_dir, "the folder of the images")
        if not images.is_dir():
            raise UsageError(f"{image_dir}: is a file, but it must be the folder of the images")
        return CocoCaptions(images, annotations)
    base = annotations.parent.parent if annotations.parent.name == "annotations" else annotations.parent
    name = annotations.stem.removeprefix(_PREFIX)
    candidates = (base / name, base / "images" / name)
    for candidate in candidates:
        if candidate.is_dir():
            return CocoCaptions(candidate, annotations)
    tried = " and ".join(map(str, candidates))
    raise UsageError(f"{annotations}: its images are not in {tried}; give their folder: ?image_dir=DIR after the path")


def _annotation_file(root: Path, split: str | None) -> Path:
    found = {
        file.stem.removeprefix(_PREFIX): file
        for folder in (root / "annotations", root)
        for file in sorted(folder.glob(f"{_PREFIX}*.json"))
    }
    if not found:
        raise UsageError(f"{root}: holds no annotations/captions_*.json")
    return choose_split(root, found, split)


def _id(record: object, key: str) -> str | None:
    value = record.get(key) if isinstance(record, dict) else None
    return str(value) if isinstance(value, int | str) and not isinstance(value, bool) and value != "" else None


def _entry(image_id: str, image: dict[str, Any], texts: list[object]) -> CaptionEntry:
    captions, problem = clean_captions(texts)
    file_name = image.get("file_name")
    problem = name_problem(file_name) or problem
    if problem is not None:
        return CaptionEntry(image_id, captions, problem=problem)
    return CaptionEntry(image_id, captions, file_name, _side(image.get("width")), _side(image.get("height")))


def _side(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
