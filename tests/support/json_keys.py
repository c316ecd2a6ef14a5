"""Keys of the JSON that commands print, compared with those in `tests/psctl/json_keys.json`.

A key is a path: `rows[].latency_s`, or `models.*.dtype` where `*` stands for names that are data. Each command has one
or several shapes: lists of keys that its result always has, unless the value above them is null or empty.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "psctl" / "json_keys.json"


def known_shapes() -> dict[str, list[list[str]]]:
    """Return the shapes of every command's result."""
    return json.loads(FILE.read_text())


def missing_keys(payload: Any, shape: list[str]) -> list[str]:
    """Return the keys of a shape that a result lacks."""
    return [key for key in shape if not _has(payload, re.findall(r"\[\]|[^.\[\]]+", key))]


def _has(value: Any, parts: list[str]) -> bool:
    if not parts or not value:
        return True
    part, *rest = parts
    if part == "[]":
        return isinstance(value, list) and all(_has(each, rest) for each in value)
    if not isinstance(value, Mapping):
        return False
    if part == "*":
        return all(_has(each, rest) for each in value.values())
    return part in value and _has(value[part], rest)


def lost_keys(command: str, payload: Any) -> list[str]:
    """Return the keys that are missing from a command's result: none if it has all keys of one of its shapes."""
    return min((missing_keys(payload, shape) for shape in known_shapes()[command]), key=len)
