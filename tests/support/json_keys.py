"""Keys of the JSON that commands print, compared with those in `FILE`, so that no key disappears unnoticed.

A key is a path: `rows[].latency_s`, or `models.*.dtype` where `*` stands for names that are data. `FILE` has the keys
that all results of a command have; where a value is null or empty, the keys below it do not count. To rewrite it:

    RESULTS_FOLDER=FOLDER python -m pytest tests/docs/test_commands.py
    python tests/support/json_keys.py FOLDER
"""

import json
import os
import re
import sys
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from patchedserve.data.files import write_json
from patchedserve.psctl.output import plain

FILE = Path(__file__).parents[1] / "psctl" / "json_keys.json"
RESULTS = "RESULTS_FOLDER"
"""Variable of the environment: a folder for results, which are then not compared."""
_FIELD = re.compile(r"[a-z][a-z0-9_]*")
"""Names of fields. Other names are data: sizes, models, files, policies with hyphens."""


def known_keys() -> dict[str, list[str]]:
    """Return the keys of every command's result, by the command's name."""
    return json.loads(FILE.read_text())


def check_result(command: str, payload: Any) -> None:
    """Raise AssertionError if a command's result lacks known keys; write it to the folder `RESULTS`, if that is set."""
    if folder := os.environ.get(RESULTS):
        write_json(Path(folder) / f"{command}-{uuid.uuid4()}.json", plain(payload))
        return
    lost = lost_keys(command, payload)
    assert not lost, f"psctl {command} --json has lost {', '.join(lost)}"


def lost_keys(command: str, payload: Any) -> list[str]:
    """Return the known keys of a command that a result lacks."""
    found = plain(payload)
    return [key for key in known_keys()[command] if not _has(found, _parts_of(key))]


def keys_of_all(payloads: Sequence[Any]) -> list[str]:
    """Return the keys that all results have."""
    plain_ones = [plain(payload) for payload in payloads]
    keys = {key for payload in plain_ones for key in _keys(payload)}
    return sorted(key for key in keys if all(_has(payload, _parts_of(key)) for payload in plain_ones))


def _keys(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            own = f"{path}.{name if _FIELD.fullmatch(name) else '*'}".removeprefix(".")
            yield own
            yield from _keys(part, own)
    elif isinstance(value, list):
        for part in value:
            yield from _keys(part, f"{path}[]")


def _parts_of(key: str) -> list[str]:
    return re.findall(r"\[\]|[^.\[\]]+", key)


def _has(value: Any, parts: list[str]) -> bool:
    if not parts or not value:
        return True
    part, *rest = parts
    if part == "[]":
        return isinstance(value, list) and all(_has(each, rest) for each in value)
    if not isinstance(value, Mapping):
        return False
    if part == "*":
        return all(_has(each, rest) for name, each in value.items() if not _FIELD.fullmatch(name))
    return part in value and _has(value[part], rest)


if __name__ == "__main__":
    results = defaultdict[str, list[Any]](list)
    for path in Path(sys.argv[1]).glob("*.json"):
        results[path.name.rsplit("-", 5)[0]].append(json.loads(path.read_text()))
    write_json(FILE, {command: keys_of_all(results[command]) for command in sorted(results)})
