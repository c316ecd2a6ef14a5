"""Annotation files: JSON as a whole, and tables of one record a line (CSV, TSV, JSONL), streamed."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from ..errors import UsageError

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl")


def read_json(path: Path, what: str, twice: set[str] | None = None) -> dict[str, Any]:
    """Parse a JSON file that holds one object; the whole file is in memory meanwhile.

    Args:
        path: the file.
        what: what it should hold, for messages.
        twice: takes the keys that occur twice in one object, of which the parser keeps the last value and says nothing.

    Raises:
        UsageError: the file cannot be read, is empty, half-written or otherwise no JSON, or no object.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path}: cannot read {what}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text") from error
    if not text.strip():
        raise UsageError(f"{path}: the file is empty, but it must hold {what}")
    try:
        content = json.loads(text, object_pairs_hook=None if twice is None else lambda pairs: _noting(pairs, twice))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not valid JSON, perhaps half-written: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path}: holds {json_type(content)}, but {what} must be an object")
    return content


def _noting(pairs: list[tuple[str, Any]], twice: set[str]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        seen: set[str] = set()
        twice.update(key for key, _ in pairs if key in seen or seen.add(key))
    return content


def json_type(value: object) -> str:
    """What JSON calls a value, with its article."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), "null")


def read_records(path: Path, what: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line, record) of a CSV or TSV file with a header, or of a JSONL file of objects, one at a time.

    Column names are lower-cased and stripped. A cell that is missing at the end of a line is None. A quoted cell may
    span lines; the line told is its last one.

    Raises:
        UsageError: the file cannot be read, has another form, or a line is malformed.
    """
    readers = {".csv": _read_table, ".tsv": _read_table, ".jsonl": _read_jsonl}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UsageError(f"{path}: {what} must come from a file that ends in {', '.join(TABLE_SUFFIXES)}")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from reader(path, file)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot read {what}: {error.strerror}") from error


def column_name(name: str) -> str:
    """The form in which `read_records` gives the names of columns."""
    return name.strip().lower()


def _read_table(path: Path, file: TextIO) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
    header: list[str] | None = None
    try:
        for row in reader:
            if header is None:
                header = [column_name(name) for name in row]
                twice = sorted({name for name in header if header.count(name) > 1})
                if twice:
                    raise UsageError(f"{path}:{reader.line_num}: column {twice[0]!r} stands twice in the header")
            elif len(row) > len(header):
                raise UsageError(f"{path}:{reader.line_num}: has {len(row)} cells, but the header has {len(header)}")
            elif row:
                yield reader.line_num, dict.fromkeys(header) | dict(zip(header, row, strict=False))
    except csv.Error as error:
        raise UsageError(f"{path}:{reader.line_num}: malformed table: {error}") from error


def _read_jsonl(path: Path, file: TextIO) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}:{number}: not valid JSON: {error}") from error
        if not isinstance(record, dict):
            raise UsageError(f"{path}:{number}: holds {json_type(record)}, but every line must be an object")
        yield number, {column_name(name): value for name, value in record.items()}
