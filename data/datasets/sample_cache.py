"""Samples that were drawn before, kept as small JSON files named by what decides them."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..files import write_json

_VERSION = 1  # changes whenever another sample would be drawn, or the file has another form
_TYPES: dict[str, tuple[type, ...]] = {
    "id": (str,),
    "caption": (str,),
    "location": (str, type(None)),
    "width": (int, type(None)),
    "height": (int, type(None)),
    "seed": (int, type(None)),
}


def sample_key(fingerprint: dict[str, Any], n: int | None, seed: int) -> dict[str, Any]:
    """All that decides a sample, as JSON."""
    key = {"version": _VERSION, "n": n, "seed": seed, "dataset": fingerprint}
    return json.loads(json.dumps(key))


def read_cached(folder: Path, key: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The pairs that were kept under a key; None if there are none or the file is damaged (it is then drawn again)."""
    try:
        content = json.loads(_path(folder, key).read_text(encoding="utf-8"))
        rows = content["items"]
        is_sound = content["key"] == key and content["sha256"] == _digest(rows) and all(map(_is_pair, rows))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return rows if is_sound else None


def write_cached(folder: Path, key: dict[str, Any], items: Sequence[Any]) -> None:
    """Keep pairs under a key, atomically. Raises OSError."""
    rows = [asdict(item) for item in items]
    write_json(_path(folder, key), {"key": key, "sha256": _digest(rows), "items": rows})


def _path(folder: Path, key: dict[str, Any]) -> Path:
    return folder / f"sample-{_digest(key)[:24]}.json"


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _is_pair(row: Any) -> bool:
    return row.keys() == _TYPES.keys() and all(isinstance(row[name], types) for name, types in _TYPES.items())
