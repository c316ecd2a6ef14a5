"""Measurements that are made once for the same circumstances and kept in the workspace."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ...data.errors import RunError
from ...data.files import write_json

VERSION = 2
Parsed = TypeVar("Parsed")


def load_or_measure(
    folder: Path,
    name: str,
    context: dict[str, Any],
    measure: Callable[[], list[dict[str, Any]]],
    parse: Callable[[list[dict[str, Any]]], Parsed],
) -> Parsed:
    """What was measured in the same circumstances, from `folder` if it is there.

    Args:
        folder: holds a JSON file for each set of circumstances.
        name: what the file's name begins with.
        context: all circumstances that matter.
        measure: returns the rows to keep.
        parse: makes something useful of them; its ValueError, KeyError and TypeError mean that the file is damaged.

    Raises:
        RunError: if the file is damaged.
    """
    digest = hashlib.sha256(json.dumps([VERSION, context]).encode()).hexdigest()[:8]
    path = folder / f"{name}-{digest}.json"
    if not path.exists():
        write_json(path, {"version": VERSION, "context": context, "rows": measure()})
    # Also right after measuring, so that later runs choose the same.
    try:
        return parse(json.loads(path.read_text(encoding="utf-8"))["rows"])
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is damaged ({error}); delete it to measure again") from error
