"""Which columns of a table mean what, and entries made of its rows."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import UsageError
from ..prompts import PROMPT_COLUMNS
from .base import CaptionEntry, clean_captions, shortened, whole_number

CAPTION_COLUMNS = (*PROMPT_COLUMNS, "text", "captions")
ID_COLUMNS = ("id", "image_id", "coco_id", "image_name", "file_name")
SEED_COLUMNS = ("seed", "evaluation_seed")
NSFW_COLUMNS = ("image_nsfw", "prompt_nsfw")


@dataclass(frozen=True, slots=True)
class ColumnChoice:
    """Columns that the user names; None: found by the usual names."""

    caption: str | None = None
    image: str | None = None
    id: str | None = None

    def as_dict(self) -> dict[str, str | None]:
        return asdict(self)


def choose_column(
    names: Iterable[str], wanted: str | None, usual: tuple[str, ...], where: str, what: str
) -> str | None:
    """The column that the user names, or the first usual name that is there, or None.

    Raises:
        UsageError: the column that the user names is not there.
    """
    names = list(names)
    if wanted is None:
        return next((name for name in usual if name in names), None)
    if wanted not in names:
        raise UsageError(f"{where}: has the columns {', '.join(names)}, but the {what} should be in {wanted!r}")
    return wanted


def require_caption_column(names: Iterable[str], wanted: str | None, where: str) -> str:
    """As `choose_column`, for the captions, which must be somewhere.

    Raises:
        UsageError: there is no such column.
    """
    names = list(names)
    column = choose_column(names, wanted, CAPTION_COLUMNS, where, "captions")
    if column is None:
        raise UsageError(
            f"{where}: has the columns {', '.join(names)}, but one must be called {', '.join(CAPTION_COLUMNS[:-1])}"
            f" or {CAPTION_COLUMNS[-1]} (or name it: --caption-column)"
        )
    return column


def entry_of_record(
    record: Mapping[str, Any], entry_id: str, location: str | None, columns: ColumnChoice, where: str
) -> CaptionEntry:
    """An entry of a row with captions (one text, or a list of texts) and perhaps width, height and seed.

    Raises:
        UsageError: there is no column of captions.
    """
    value = record[require_caption_column(record, columns.caption, where)]
    captions, problem = clean_captions(value if isinstance(value, list | tuple) else [value])
    numbers: dict[str, int | None] = {}
    for field, names in (("width", ("width",)), ("height", ("height",)), ("seed", SEED_COLUMNS)):
        column = next((name for name in names if name in record), None)
        given = None if column is None else record[column]
        low = 0 if field == "seed" else 1
        try:
            number = whole_number(given)
        except (ValueError, OverflowError):
            number = -1
        if number is not None and number < low:
            problem = problem or f"has {column} {shortened(repr(given))}, but it must be a whole number from {low}"
            number = None
        numbers[field] = number
    return CaptionEntry(entry_id, captions, location, problem=problem, **numbers)
