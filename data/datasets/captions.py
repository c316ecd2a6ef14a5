"""Plain files of captions without images: enough for the CLIP score, which needs no real images."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..errors import UsageError
from ..files import sha256_of
from ..records import TABLE_SUFFIXES, column_name
from .base import CaptionEntry, ImageKind, require_existing
from .record_entries import ColumnChoice, entry_of_record, records_with_columns


@dataclass(frozen=True, slots=True)
class CaptionFile:
    """Captions of a CSV, TSV or JSONL file, one per image, optionally with id, width, height and seed.

    An entry's id comes from the id column. Without an id column it is the number of the record in the file, from 1, and
    the order of the records matters.
    """

    path: Path
    columns: ColumnChoice
    image_kind: ImageKind = "none"

    @property
    def name(self) -> str:
        return f"captions:{self.path}"

    def entries(self) -> Iterator[CaptionEntry]:
        """Yield every record as an entry, with one record in memory at a time."""
        records = records_with_columns(self.path, "captions", self.columns)
        for number, (line, record, columns) in enumerate(records, start=1):
            value = number if columns.id is None else record[columns.id]
            if value is None or value == "" or isinstance(value, bool) or not isinstance(value, int | str):
                yield CaptionEntry(f"line {line}", (), problem=f"has no id in the column {columns.id}: {value!r}")
            else:
                yield entry_of_record(record, str(value).strip(), None, columns)

    def open_image(self, location: str) -> NoReturn:
        raise UsageError(f"{self.name}: holds captions only, no images")

    def content(self, location: str) -> NoReturn:
        self.open_image(location)

    def fingerprint(self) -> dict[str, Any]:
        """Return the digest of the file and the chosen columns."""
        return {"captions": sha256_of(self.path), "columns": asdict(self.columns)}


def open_captions(path: str, *, caption_column: str | None = None, id_column: str | None = None) -> CaptionFile:
    """Open a file of captions: .csv or .tsv with a header, or .jsonl of objects. Options are as in `spec.parse_spec`.

    Raises UsageError if there is no such file, or it has another suffix.
    """
    file = require_existing(path, "a file of captions")
    if not file.is_file() or file.suffix.lower() not in TABLE_SUFFIXES:
        raise UsageError(f"{path}: captions must come from a file that ends in {', '.join(TABLE_SUFFIXES)}")
    names = [name and column_name(name) for name in (caption_column, id_column)]
    return CaptionFile(file, ColumnChoice(caption=names[0], id=names[1]))
