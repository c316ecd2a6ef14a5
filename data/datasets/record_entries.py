"""Columns of a table and their meaning, and the entries of its rows."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..prompts.captions import PROMPT_COLUMNS
from ..records import read_records
from .base import CaptionEntry, clean_captions, shortened, whole_number

CAPTION_COLUMNS = (*PROMPT_COLUMNS, "text", "captions")
ID_COLUMNS = ("id", "image_id", "coco_id", "image_name", "file_name")
SEED_COLUMNS = ("seed", "evaluation_seed")
NSFW_COLUMNS = ("image_nsfw", "prompt_nsfw")


@dataclass(frozen=True, slots=True)
class ColumnChoice:
    """Columns that the user names; None searches for the usual names."""

    caption: str | None = None
    image: str | None = None
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of a table that make up an entry.

    Attributes:
        caption: column of the captions.
        id: column of the ids, or None.
        numbers: field of `CaptionEntry`, column and smallest allowed number, for each column that exists.
    """

    caption: str
    id: str | None
    numbers: tuple[tuple[str, str, int], ...]


def choose_column(
    names: Iterable[str], wanted: str | None, usual: tuple[str, ...], where: str, what: str
) -> str | None:
    """Return the column that the user names, or the first usual name that exists, or None.

    Raises UsageError if the column that the user names does not exist.
    """
    names = list(names)
    if wanted is None:
        return next((name for name in usual if name in names), None)
    if wanted not in names:
        raise UsageError(f"{where}: has the columns {', '.join(names)}, but the {what} should be in {wanted!r}")
    return wanted


def find_columns(names: Iterable[str], choice: ColumnChoice, where: str) -> Columns:
    """Find the columns of a table that make up an entry.

    Raises UsageError if there is no column of captions, or one that the user names does not exist.
    """
    names = list(names)
    caption = choose_column(names, choice.caption, CAPTION_COLUMNS, where, "captions")
    if caption is None:
        raise UsageError(
            f"{where}: has the columns {', '.join(names)}, but one must be called {', '.join(CAPTION_COLUMNS[:-1])}"
            f" or {CAPTION_COLUMNS[-1]} (or, but for diffusiondb, name it: "
            "?caption_column=NAME after the path)"
        )
    numbers = []
    for field, usual in (("width", ("width",)), ("height", ("height",)), ("seed", SEED_COLUMNS)):
        column = next((name for name in usual if name in names), None)
        if column is not None:
            numbers.append((field, column, 0 if field == "seed" else 1))
    return Columns(caption, choose_column(names, choice.id, ID_COLUMNS, where, "ids"), tuple(numbers))


def records_with_columns(path: Path, what: str, choice: ColumnChoice) -> Iterator[tuple[int, dict[str, Any], Columns]]:
    """Yield (line, record, columns) of a file; columns may differ between the records of a JSONL file. Raises as
    `records.read_records` and `find_columns`.
    """
    names: tuple[str, ...] | None = None
    columns: Columns | None = None
    for line, record in read_records(path, what):
        if columns is None or tuple(record) != names:
            names = tuple(record)
            columns = find_columns(names, choice, f"{path}:{line}")
        yield line, record, columns


def entry_of_record(record: Mapping[str, Any], entry_id: str, location: str | None, columns: Columns) -> CaptionEntry:
    """Return the entry of a row with captions (one text, or a list of texts) and optional width, height and seed."""
    value = record[columns.caption]
    captions, problem = clean_captions(value if isinstance(value, list | tuple) else [value])
    numbers: dict[str, int] = {}
    for field, column, low in columns.numbers:
        try:
            number = whole_number(record[column])
        except (ValueError, OverflowError):
            number = -1
        if number is None:
            continue
        if number >= low:
            numbers[field] = number
        else:
            given = shortened(repr(record[column]))
            problem = problem or f"has {column} {given}, but it must be a whole number from {low}"
    return CaptionEntry(entry_id, captions, location, problem=problem, **numbers)
