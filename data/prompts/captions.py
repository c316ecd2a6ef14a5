"""Prompts: the bundled captions, or a file of the user's."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from ..errors import UsageError

BUNDLED_PROMPTS = Path(__file__).with_name("emoji-captions.txt")
"""Captions in the words that the bundled models were trained on, one per line."""

PROMPT_COLUMNS = ("prompt", "caption")
_FORMS = "a .txt file with one prompt per line, a .csv or .tsv file with a prompt column, or a .jsonl file"


def load_prompts(path: str | Path | None = None) -> list[str]:
    """Read prompts in the order of the file; blank ones are left out.

    Args:
        path: `.txt` (one per line), `.csv` or `.tsv` (column "prompt" or "caption", in any case), `.jsonl` (texts, or
            objects with such a key). None: the bundled captions.

    Raises:
        UsageError: the file cannot be read, has another form, or holds no prompt.
    """
    path = BUNDLED_PROMPTS if path is None else Path(path)
    readers = {".txt": _read_lines, ".csv": _read_csv, ".tsv": _read_csv, ".jsonl": _read_jsonl}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UsageError(f"{path}: prompts must come from {_FORMS}")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            prompts = [prompt for text in reader(path, file) if (prompt := text.strip())]
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot read prompts: {error.strerror}") from error
    if not prompts:
        raise UsageError(f"{path}: holds no prompt, but at least one is needed")
    return prompts


def _read_lines(path: Path, file: TextIO) -> Iterator[str]:
    yield from file


def _read_csv(path: Path, file: TextIO) -> Iterator[str]:
    reader = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
    column: int | None = None
    try:
        for row in reader:
            if column is None:
                column = _prompt_column(path, row)
            elif len(row) > column:
                yield row[column]
            elif row:
                raise UsageError(
                    f"{path}:{reader.line_num}: has {len(row)} columns, but the prompt is column {column + 1}"
                )
    except csv.Error as error:
        raise UsageError(f"{path}:{reader.line_num}: malformed table: {error}") from error


def _prompt_column(path: Path, header: list[str]) -> int:
    names = [name.strip().lower() for name in header]
    for wanted in PROMPT_COLUMNS:
        if wanted in names:
            return names.index(wanted)
    raise UsageError(f"{path}:1: columns are {', '.join(header)}, but one must be called {' or '.join(PROMPT_COLUMNS)}")


def _read_jsonl(path: Path, file: TextIO) -> Iterator[str]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}:{number}: not valid JSON: {error}") from error
        if isinstance(value, dict):
            value = next((value[name] for name in PROMPT_COLUMNS if name in value), None)
        if not isinstance(value, str):
            raise UsageError(
                f"{path}:{number}: must be a text, or an object with a text under {' or '.join(PROMPT_COLUMNS)}"
            )
        yield value
