"""Local parquet files with images, such as those of Hugging Face's `push_to_hub`."""

import re
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..errors import UsageError
from ..tables.schemas import parquet_file
from .base import choose_split, require_existing
from .record_entries import ColumnChoice
from .tables import TableCaptions, table_captions

_SPLIT = re.compile(r"(?:^|/)(train|validation|val|dev|test)(?:[-_./]|$)")
_ROWS_AT_A_TIME = 1024
_IMAGES_AT_A_TIME = 16
# Without a buffer Arrow reads a whole column of a row group at once: 500 MB if it holds a thousand images.
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ParquetRows:
    """Rows of several parquet files with one schema, in the order of the files' names.

    A location is "FILE#ROW" with nine digits. Parquet cannot jump to a row, so a cursor that only moves forward in a
    file reads the images. Reading all images in order is one pass with 32 images in memory; going back further restarts
    the row group.
    """

    root: Path
    files: tuple[str, ...]
    _cursor: "_Cursor" = field(init=False, repr=False, compare=False, default_factory=lambda: _Cursor())

    @property
    def name(self) -> str:
        return str(self.root / self.files[0] if len(self.files) == 1 else self.root)

    @property
    def schema(self) -> pa.Schema:
        """Columns and their Arrow types. Raises UsageError if a file is damaged or the files' columns differ."""
        schema: pa.Schema | None = None
        for name in self.files:
            if not (self.root / name).stat().st_size:
                raise UsageError(f"{self.root / name}: the file is empty, but it must be parquet")
            with parquet_file(self.root / name, "the file") as file:
                found = file.schema_arrow
            if schema is not None and found.names != schema.names:
                raise UsageError(
                    f"{self.root / name}: has the columns {', '.join(found.names)}, but the files before it have "
                    f"{', '.join(schema.names)}"
                )
            schema = schema or found
        assert schema is not None
        return schema

    def rows(self, columns: Sequence[str], path_of: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (location, row) for all rows, file by file."""
        wanted = [*columns, f"{path_of}.path"] if path_of is not None else [*columns]
        for name in self.files:
            row = 0
            with parquet_file(self.root / name, "the file", buffer_size=_BUFFER_BYTES) as file:
                for batch in file.iter_batches(_ROWS_AT_A_TIME, columns=wanted, use_threads=False):
                    for record in batch.to_pylist():
                        if path_of is not None:
                            record["path"] = (record[path_of] or {}).get("path")
                        yield f"{name}#{row:09d}", record
                        row += 1

    def cell(self, location: str, column: str) -> Any:
        """Return one value of one row. Safe for several threads; fastest in the order of the locations."""
        name, _, row = location.rpartition("#")
        return self._cursor.cell(self.root / name, int(row), column)

    def fingerprint(self) -> dict[str, Any]:
        """Return sizes and times of the files; digests would require reading all images."""
        states = {name: (self.root / name).stat() for name in self.files}
        return {"root": str(self.root.resolve()), "files": {k: [s.st_size, s.st_mtime_ns] for k, s in states.items()}}


class _Cursor:
    """Cursor over single cells of one column; reading forward is as cheap as a scan. Safe for several threads.

    The previous batch is kept, even if it belongs to the previous row group, because threads that read ahead reach the
    end of a batch out of order.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._source: tuple[Path, str] | None = None
        self._held: deque[tuple[range, int, pa.RecordBatch]] = deque()  # rows, end of their group; the newest last
        self._batches: Iterator[tuple[range, int, pa.RecordBatch]] = iter(())

    def cell(self, path: Path, row: int, column: str) -> Any:
        with self._lock:
            if self._source != (path, column):
                self._source = path, column
                self._held.clear()
            while True:
                for rows, _, batch in self._held:
                    if row in rows:
                        return batch.column(0)[row - rows.start].as_py()
                self._read_on(path, row, column)

    def _read_on(self, path: Path, row: int, column: str) -> None:
        newest = self._held[-1] if self._held else None
        if newest is None or not newest[0].stop <= row < newest[1]:
            self._batches = _scan(path, row, column)
        # The oldest is released before another is read, so that two batches are in memory and not three.
        while len(self._held) > 1:
            self._held.popleft()
        try:
            self._held.append(next(self._batches))
        except UsageError:
            self._held.clear()  # so that the next call starts from scratch
            raise


def _scan(path: Path, row: int, column: str) -> Iterator[tuple[range, int, pa.RecordBatch]]:
    """Yield the batches of the row group that holds the row, each with its rows and the end of the group."""
    begin = 0
    with parquet_file(path, "the file", buffer_size=_BUFFER_BYTES) as file:
        for group in range(file.num_row_groups):
            end = begin + file.metadata.row_group(group).num_rows
            if row < end:
                batches = file.iter_batches(_IMAGES_AT_A_TIME, row_groups=[group], columns=[column], use_threads=False)
                for batch in batches:
                    yield range(begin, begin + batch.num_rows), end, batch
                    begin += batch.num_rows
                return
            begin = end
    raise UsageError(f"{path}: has {begin} rows, but row {row} was asked for; has the file changed?")


def open_parquet(
    path: str,
    *,
    split: str | None = None,
    caption_column: str | None = None,
    image_column: str | None = None,
    id_column: str | None = None,
) -> TableCaptions:
    """Open a parquet file, or a folder of them at any depth, with captions and images: bytes, or structs of bytes and
    path. Without an id column, the path is the id.

    Options are as in `spec.parse_spec`. Raises UsageError if a file is damaged, there is none, or a column is missing.
    """
    columns = ColumnChoice(caption_column, image_column, id_column)
    return table_captions("parquet", parquet_rows(path, split), columns)


def parquet_rows(path: str | Path, split: str | None = None) -> ParquetRows:
    """Return the rows of the parquet files at a path, of one split. Raises as `open_parquet`."""
    root = require_existing(path, "a parquet file or a folder of them")
    if root.is_file():
        if split is not None:
            raise UsageError(f"{root}: split is {split!r}, but it is one file, and splits are for folders of them")
        return ParquetRows(root.parent, (root.name,))
    names = sorted(file.relative_to(root).as_posix() for file in root.rglob("*.parquet") if file.is_file())
    by_split: dict[str, list[str]] = {}
    for name in names:
        match = _SPLIT.search(name)
        by_split.setdefault(match[1] if match else "", []).append(name)
    if not names:
        raise UsageError(f"{root}: holds no parquet files")
    return ParquetRows(root, tuple(choose_split(root, by_split, split)))
