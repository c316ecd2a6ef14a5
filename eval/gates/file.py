"""The TOML file of quality gates.

results = ["results.json"]          # result files or folders of runs, relative to this file
baseline = "baseline.json"          # for relative bounds

[[gate]]
metric = "fid"
max = 30                            # or min, max_ratio, min_ratio, max_increase, max_decrease
min_samples = 256                   # optional, as are name, file and repeats
"""

import math
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...data.errors import UsageError
from .judging import ABSOLUTE, RELATIVE, Gate

_GATE_KEYS = ("metric", "name", "file", "repeats", "min_samples", *ABSOLUTE, *RELATIVE)
_FILE_KEYS = ("results", "baseline", "gate")
_HEADER = re.compile(r"\s*\[\[\s*gate\s*\]\]")
_EXAMPLE = '[[gate]] with metric = "fid" and max = 30, say'


@dataclass(frozen=True, slots=True)
class GateFile:
    """What a gate file says: the gates, the result files to look at, and the baseline; paths are absolute."""

    path: Path
    gates: tuple[Gate, ...]
    results: tuple[Path, ...]
    baseline: Path | None


def read_gates(path: Path) -> GateFile:
    """Read a gate file.

    Raises:
        UsageError: it cannot be read, is no TOML (the line is named), or a gate has no metric, no bound, or a key or
            value that is not allowed (the line of its header is named).
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: is not valid TOML: {error}") from error
    unknown = sorted(set(content) - set(_FILE_KEYS))
    if unknown:
        raise UsageError(f"{path}: unknown key {unknown[0]!r}; known: {', '.join(_FILE_KEYS)}")
    folder = path.absolute().parent
    entries = content.get("gate", [])
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"{path}: there is no gate; write {_EXAMPLE}")
    results = content.get("results", [])
    if not isinstance(results, list) or not all(isinstance(item, str) for item in results):
        raise UsageError(f"{path}: results is {results!r}, but it must be a list of file names")
    baseline = content.get("baseline")
    if baseline is not None and not isinstance(baseline, str):
        raise UsageError(f"{path}: baseline is {baseline!r}, but it must be a file name")
    lines = [number for number, line in enumerate(text.splitlines(), 1) if _HEADER.match(line)]
    gates = []
    for index, entry in enumerate(entries):
        # Gates may also be written as an inline list, which has no headers.
        where = f"{path}, line {lines[index]}" if len(lines) == len(entries) else f"{path}, gate {index + 1}"
        gates.append(_read_gate(entry, where, folder))
    names = [gate.name for gate in gates]
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise UsageError(f"{path}: two gates are called {twice[0]!r}; give each its own name")
    return GateFile(
        path, tuple(gates), tuple(folder / item for item in results), None if baseline is None else folder / baseline
    )


def _read_gate(entry: dict[str, Any], where: str, folder: Path) -> Gate:
    unknown = sorted(set(entry) - set(_GATE_KEYS))
    if unknown:
        raise UsageError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(_GATE_KEYS)}")
    metric = entry.get("metric")
    if not isinstance(metric, str) or not metric:
        raise UsageError(f"{where}: a gate needs a metric, as in {_EXAMPLE}")
    bounds = {kind: entry[kind] for kind in (*ABSOLUTE, *RELATIVE) if kind in entry}
    if not bounds:
        raise UsageError(f"{where}: the gate of {metric} has no bound; give one of {', '.join((*ABSOLUTE, *RELATIVE))}")
    for kind, bound in bounds.items():
        if not isinstance(bound, int | float) or isinstance(bound, bool) or not math.isfinite(bound):
            raise UsageError(f"{where}: {kind} is {bound!r}, but it must be a finite number")
        if kind in RELATIVE and bound < 0:
            raise UsageError(f"{where}: {kind} is {bound!r}, but it must not be negative")
    for key, kind, what in (("name", str, "text"), ("file", str, "a file name"), ("repeats", bool, "true or false")):
        if key in entry and not isinstance(entry[key], kind):
            raise UsageError(f"{where}: {key} is {entry[key]!r}, but it must be {what}")
    least = entry.get("min_samples", 0)
    if not isinstance(least, int) or isinstance(least, bool) or least < 0:
        raise UsageError(f"{where}: min_samples is {least!r}, but it must be a whole number that is not negative")
    return Gate(
        metric,
        {kind: float(bound) for kind, bound in bounds.items()},
        entry.get("name") or " ".join([metric, *(f"{kind} {bound:g}" for kind, bound in bounds.items())]),
        folder / entry["file"] if "file" in entry else None,
        entry.get("repeats", False),
        least,
    )
