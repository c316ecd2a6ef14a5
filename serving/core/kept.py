"""Measurements that are made once for the same circumstances and kept in the workspace."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from ...data.errors import RunError
from ...data.files import write_json

_VERSION = 2
Point = TypeVar("Point")


def load_or_measure(
    folder: Path,
    name: str,
    circumstances: dict[str, Any],
    kind: Callable[..., Point],
    measure: Callable[[], Sequence[Point]],
) -> list[Point]:
    """What was measured in the same circumstances, from `folder` if it is there.

    Args:
        folder: holds a JSON file for each set of circumstances.
        name: what the file's name begins with.
        circumstances: all that matter.
        kind: dataclass of a measurement; its fields are the columns of the file.
        measure: makes the measurements.

    Raises:
        RunError: if the file is damaged.
    """
    digest = hashlib.sha256(json.dumps([_VERSION, circumstances]).encode()).hexdigest()[:8]
    path = folder / f"{name}-{digest}.json"
    if not path.exists():
        rows: list[Any] = [asdict(point) for point in measure()]  # type: ignore[call-overload]
        write_json(path, {"version": _VERSION, "context": circumstances, "rows": rows})
    # Read back right after measuring, too, so that later runs choose the same.
    try:
        return [kind(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is damaged ({error}); delete it to measure again") from error
