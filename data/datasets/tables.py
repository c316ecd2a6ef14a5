"""Data sets in tables with a column of captions and a column of images."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from PIL import Image

from ..errors import UsageError
from .base import BadImageError, CaptionEntry, ImageKind, shortened
from .decode import decode_rgb, read_content
from .record_entries import (
    NSFW_COLUMNS,
    ColumnChoice,
    Columns,
    choose_column,
    entry_of_record,
    find_columns,
)

_USUAL_IMAGE_COLUMNS = ("image", "img", "jpg", "png")


class RowTable(Protocol):
    """Table of rows with images, whose other columns can be read without the images."""

    @property
    def name(self) -> str: ...

    @property
    def schema(self) -> pa.Schema:
        """Columns and their Arrow types."""
        ...

    def rows(self, columns: Sequence[str], path_of: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (location, row) for all rows in order, as few at a time as the files allow.

        Args:
            columns: columns to read.
            path_of: image column (struct of bytes and path) of which only the path is read, as the column "path".
        """
        ...

    def cell(self, location: str, column: str) -> Any:
        """Return one value of one row. Safe for several threads; fastest in the order of the locations."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """Return what determines the rows, as JSON."""
        ...


@dataclass(frozen=True, slots=True)
class NsfwFilter:
    """Filter of images whose own score or whose prompt's score is above `limit` (0 to 1; DiffusionDB gives 2 to blurred
    images). None filters nothing. Its text is the suffix of the name of a filtered data set.
    """

    limit: float | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and not 0 <= self.limit <= 2:
            raise UsageError(f"the largest NSFW score allowed is {self.limit}, but it must be a number from 0 to 2")

    def __str__(self) -> str:
        return "" if self.limit is None else f" (NSFW scores up to {self.limit:g})"

    def apply(self, entry: CaptionEntry, scores: Sequence[float | None]) -> Iterator[CaptionEntry]:
        """Yield the entry unless a score is above the limit; an entry that lacks a score has a problem."""
        known = [score for score in scores if score is not None and not math.isnan(score)]
        # The scores are stored in 32 bits, so the limit is rounded like them.
        if self.limit is None or (entry.problem is not None and not known):
            yield entry
        elif len(known) < len(NSFW_COLUMNS):
            yield CaptionEntry(entry.id, (), problem="has no NSFW score, but a limit is given")
        elif max(known) <= np.float32(self.limit):
            yield entry


@dataclass(frozen=True, slots=True)
class TableCaptions:
    """Captions of a table, with images as encoded bytes, as structs of bytes and path (Hugging Face), or none.

    An entry's id comes from the id column, or is the path in the image's struct, or else the number of the row over all
    files, in which case the order of the rows matters.
    """

    kind: str
    table: RowTable
    columns: Columns
    image_column: str | None
    path_of: str | None
    nsfw: NsfwFilter

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.table.name}{self.nsfw}"

    @property
    def image_kind(self) -> ImageKind:
        return "none" if self.image_column is None else "stored"

    def entries(self) -> Iterator[CaptionEntry]:
        """Yield every row as an entry, without reading the images."""
        id_column, path_of = self.columns.id, self.path_of
        score_columns = () if self.nsfw.limit is None else NSFW_COLUMNS
        wanted = {self.columns.caption, *(column for _, column, _ in self.columns.numbers), *score_columns}
        wanted |= set() if id_column is None else {id_column}
        for number, (location, row) in enumerate(self.table.rows(sorted(wanted), path_of), start=1):
            row_id = number
            if id_column is not None:
                row_id = row[id_column]
            elif path_of is not None:
                row_id = row["path"] or number
            if row_id == "" or not isinstance(row_id, int | str):
                yield CaptionEntry(f"row {number}", (), problem=f"has no id in the column {id_column}: {row_id!r}")
                continue
            image_location = None if self.image_column is None else location
            entry = entry_of_record(row, str(row_id), image_location, self.columns)
            yield from self.nsfw.apply(entry, [row[name] for name in score_columns])

    def open_image(self, location: str) -> Image.Image:
        return decode_rgb(self.content(location), f"{self.table.name}: {location}")

    def content(self, location: str) -> bytes:
        """Return the bytes of an image, from the table or from the file at its path. Raises BadImageError."""
        if self.image_column is None:
            raise UsageError(f"{self.name}: holds captions only, no images")
        label = f"{self.table.name}: {location}"
        value = self.table.cell(location, self.image_column)
        if isinstance(value, dict):
            path = value.get("path")
            value = value.get("bytes")
            if value is None and path:
                return read_content(Path(path), label)
        if not isinstance(value, bytes):
            raise BadImageError(f"{label}: the image is missing")
        return value

    def fingerprint(self) -> dict[str, Any]:
        """Return the fingerprint of the table, the columns and the filter."""
        columns = [self.columns.caption, self.columns.id, self.image_column]
        return {"table": self.table.fingerprint(), "columns": columns, "max_nsfw": self.nsfw.limit}


def table_captions(
    kind: str, table: RowTable, columns: ColumnChoice, *, max_nsfw: float | None = None, needs_images: bool = True
) -> TableCaptions:
    """Find the columns of a table.

    Raises:
        UsageError: there is no column of captions or of images, a named column does not exist, or NSFW scores are
            limited but missing.
    """
    schema = table.schema
    found = find_columns(schema.names, columns, table.name)
    usual = tuple(name for name in (*_USUAL_IMAGE_COLUMNS, *schema.names) if _holds_images(schema, name))
    image_column = choose_column(schema.names, columns.image, usual, table.name, "images")
    if image_column is not None and not _holds_images(schema, image_column):
        kind_found = shortened(str(schema.field(image_column).type))
        raise UsageError(
            f"{table.name}: column {image_column!r} is {kind_found}, but images must be bytes or a struct with bytes"
        )
    if image_column is None and needs_images:
        raise UsageError(f"{table.name}: has the columns {', '.join(schema.names)}, but none of them holds images")
    if max_nsfw is not None and not set(NSFW_COLUMNS) <= set(schema.names):
        raise UsageError(f"{table.name}: NSFW scores are limited, but it has no columns {' and '.join(NSFW_COLUMNS)}")
    tells_path = image_column is not None and found.id is None and _has_field(schema, image_column, "path")
    path_of = image_column if tells_path else None
    return TableCaptions(kind, table, found, image_column, path_of, NsfwFilter(max_nsfw))


def _holds_images(schema: pa.Schema, name: str) -> bool:
    if name not in schema.names:
        return False
    kind = schema.field(name).type
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or _has_field(schema, name, "bytes")


def _has_field(schema: pa.Schema, name: str, child: str) -> bool:
    kind = schema.field(name).type
    return pa.types.is_struct(kind) and kind.get_field_index(child) >= 0
