"""Reading of users' files record by record: CSV, TSV, JSONL and JSON. Errors are one line that names the place."""

import csv
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from .errors import UsageError

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl")
Pairs = list[tuple[str, Any]]


@contextmanager
def open_text(path: Path, what: str, hint: str = "") -> Iterator[TextIO]:
    """Open a UTF-8 file, with or without a byte order mark, with unchanged line ends.

    Raises:
        UsageError: the file cannot be opened, or the body reads text that is not UTF-8. In the message, `what` is what
            the file should hold, and `hint` what else the user may have meant.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield file
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot read {what}: {error.strerror}{hint}") from error


def csv_rows(path: Path, file: TextIO) -> Iterator[tuple[int, list[str]]]:
    """Yield (line, cells) of a CSV file, or of a tab-separated file if its name ends in .tsv, without blank lines.

    A quoted cell may span lines; `line` is the one on which the row begins. Raises UsageError if a row is malformed.
    """
    reader = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
    above = 0
    try:
        for row in reader:
            if row:
                yield above + 1, row
            above = reader.line_num
    except csv.Error as error:
        raise UsageError(f"{path}:{reader.line_num}: malformed table: {error}") from error


def parsed_lines(path: Path, file: TextIO, parse: Callable[[str], Any]) -> Iterator[tuple[int, Any]]:
    """Yield (line, `parse(text)`) of the lines that are not blank. Raises UsageError if `parse` fails."""
    for number, line in enumerate(file, start=1):
        text = line.strip().removeprefix("\ufeff")  # concatenated files have one in the middle
        if text:
            try:
                yield number, parse(text)
            except (ValueError, RecursionError, MemoryError) as error:
                raise UsageError(f"{path}:{number}: {error}") from error


def parse_json(text: str, hook: Callable[[Pairs], Any] | None = None) -> Any:
    """Return the value of a JSON text; `hook` builds objects from their pairs. Raises UsageError if it is not JSON."""
    try:
        return json.loads(text, object_pairs_hook=hook)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not valid JSON: {error}") from error


def unique_keys(pairs: Pairs) -> dict[str, Any]:
    """Return a mapping of (key, value) pairs. Raises UsageError if a key is given twice; `dict` would keep the last."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise UsageError(f"{keys_given_twice(pairs)[0]} is given twice")
    return values


def keys_given_twice(pairs: Pairs) -> list[str]:
    """Return the keys of (key, value) pairs that repeat the key of an earlier pair."""
    seen: set[str] = set()
    return [key for key, _ in pairs if key in seen or seen.add(key)]


def read_json(path: Path, what: str, twice: set[str] | None = None) -> dict[str, Any]:
    """Parse a JSON file that holds one object (`what`, in messages). The whole file is in memory meanwhile.

    `twice` collects the keys that occur twice in one object; the parser silently keeps their last value. Raises
    UsageError if the file cannot be read, is empty, half-written or otherwise not JSON, or not an object.
    """

    def noting(pairs: Pairs) -> dict[str, Any]:
        content = dict(pairs)
        if twice is not None and len(content) < len(pairs):
            twice.update(keys_given_twice(pairs))
        return content

    with open_text(path, what) as file:
        text = file.read()
    if not text.strip():
        raise UsageError(f"{path}: the file is empty, but it must hold {what}")
    try:
        content = json.loads(text, object_pairs_hook=None if twice is None else noting)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not valid JSON, perhaps half-written: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path}: holds {json_type(content)}, but {what} must be an object")
    return content


def json_type(value: object) -> str:
    """Return the JSON type of a value with its article; null, true and false as they are."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return {dict: "an object", list: "a list", str: "a text"}.get(type(value), "a number")


def read_records(path: Path, what: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line, record) of a CSV or TSV file with a header, or of a JSONL file of objects, one at a time.

    Column names are lower-cased and stripped. A cell that is missing at the end of a row is None.

    Raises:
        UsageError: the file cannot be read or has another form, or a line is malformed.
    """
    suffix = path.suffix.lower()
    if suffix not in TABLE_SUFFIXES:
        raise UsageError(f"{path}: {what} must come from a file that ends in {', '.join(TABLE_SUFFIXES)}")
    with open_text(path, what) as file:
        yield from _json_records(path, file) if suffix == ".jsonl" else _table_records(path, file)


def column_name(name: str) -> str:
    """Return the name of a column in the form that `read_records` uses."""
    return name.strip().lower()


def _table_records(path: Path, file: TextIO) -> Iterator[tuple[int, dict[str, Any]]]:
    header: list[str] | None = None
    for number, row in csv_rows(path, file):
        if header is None:
            header = [column_name(name) for name in row]
            twice = sorted(keys_given_twice([(name, None) for name in header]))
            if twice:
                raise UsageError(f"{path}:{number}: column {twice[0]!r} occurs twice in the header")
        elif len(row) > len(header):
            raise UsageError(f"{path}:{number}: has {len(row)} cells, but the header has {len(header)}")
        else:
            yield number, dict.fromkeys(header) | dict(zip(header, row, strict=False))


def _json_records(path: Path, file: TextIO) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, record in parsed_lines(path, file, parse_json):
        if not isinstance(record, dict):
            raise UsageError(f"{path}:{number}: holds {json_type(record)}, but every line must be an object")
        yield number, {column_name(name): value for name, value in record.items()}
