"""Measurements that are made once per set of circumstances and kept in the workspace."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from ...data.files import quarantine, write_json
from ...data.parsing import parse

_VERSION = 2
Point = TypeVar("Point")


def load_or_measure(
    folder: Path,
    name: str,
    circumstances: dict[str, Any],
    kind: type[Point],
    measure: Callable[[], Sequence[Point]],
) -> list[Point]:
    """Load the measurements for these circumstances from `folder`, or make them.

    Each set of circumstances has a JSON file `name-*.json`, whose columns are the fields of the dataclass `kind`.
    `measure` is called if the file does not exist, or if it is damaged, which gives a warning.
    """
    digest = hashlib.sha256(json.dumps([_VERSION, circumstances]).encode()).hexdigest()[:8]
    path = folder / f"{name}-{digest}.json"
    if path.exists():
        try:
            return _read(path, kind)
        except (ValueError, KeyError, TypeError) as error:
            quarantine(path, str(path), error)
    rows: list[Any] = [asdict(point) for point in measure()]  # type: ignore[call-overload]
    write_json(path, {"version": _VERSION, "context": circumstances, "rows": rows})
    # Read back after measuring, too, so that later runs make the same choices.
    return _read(path, kind)


def _read(path: Path, kind: type[Point]) -> list[Point]:
    return parse(list[kind], json.loads(path.read_text(encoding="utf-8"))["rows"])
