"""Cache of drawn samples: small JSON files named by what determines the sample."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ..files import write_json
from .base import CaptionedImage

_VERSION = 1  # changes whenever another sample would be drawn, or the file has another form


@dataclass(frozen=True)
class _CachedSample:
    key: dict[str, Any]
    sha256: str
    items: tuple[CaptionedImage, ...]


_adapter = TypeAdapter(_CachedSample)


def sample_key(fingerprint: dict[str, Any], n: int | None, seed: int) -> dict[str, Any]:
    """Return all that determines a sample, as JSON."""
    key = {"version": _VERSION, "n": n, "seed": seed, "dataset": fingerprint}
    return json.loads(json.dumps(key))


def read_cached(folder: Path, key: dict[str, Any]) -> tuple[CaptionedImage, ...] | None:
    """Return the pairs kept under a key; None if there are none or the file is damaged: they are drawn again."""
    try:
        kept = _adapter.validate_json(_path(folder, key).read_bytes(), strict=True)
    except (OSError, ValidationError):
        return None
    return kept.items if kept.key == key and kept.sha256 == _digest(list(map(asdict, kept.items))) else None


def write_cached(folder: Path, key: dict[str, Any], items: Sequence[CaptionedImage]) -> None:
    """Keep pairs under a key, atomically. Raises OSError."""
    rows = [asdict(item) for item in items]
    write_json(_path(folder, key), {"key": key, "sha256": _digest(rows), "items": rows})


def _path(folder: Path, key: dict[str, Any]) -> Path:
    return folder / f"sample-{_digest(key)[:24]}.json"


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
