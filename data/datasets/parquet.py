"""Parquet files with images, local: what Hugging Face's `push_to_hub` writes and others like it."""

import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import UsageError
from .base import existing
from .record_entries import ColumnChoice
from .tables import TableCaptions, table_captions

_SPLIT = re.compile(r"(?:^|/)(train|validation|val|dev|test)(?:[-_./]|$)")
_ROWS_AT_A_TIME = 1024
_IMAGES_AT_A_TIME = 16
# Without a buffer Arrow reads a whole column of a row group at once: 500 MB where it holds a thousand images.
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ParquetRows:
    """The rows of several parquet files of one schema, in the order of the files' names.

    A location is "FILE#ROW" with nine digits. Parquet cannot jump to a row, so images are read by a cursor that only
    goes forward within a file: reading all of them in order is one pass with 32 images in memory, going further back
    than these starts the row group again.
    """

    root: Path
    files: tuple[str, ...]
    _cursor: "_Cursor" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_cursor", _Cursor())

    @property
    def name(self) -> str:
        return str(self.root / self.files[0] if len(self.files) == 1 else self.root)

    @property
    def schema(self) -> pa.Schema:
        """See `RowTable`. Raises UsageError if a file is damaged or the files differ in their columns."""
        schema: pa.Schema | None = None
        for name in self.files:
            with _opened(self.root / name) as file:
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
        """See `RowTable`."""
        wanted = [*columns, f"{path_of}.path"] if path_of is not None else [*columns]
        for name in self.files:
            with _opened(self.root / name) as file:
                row = 0
                for batch in _batches(self.root / name, file, _ROWS_AT_A_TIME, None, wanted):
                    for record in batch.to_pylist():
                        if path_of is not None:
                            record["path"] = (record[path_of] or {}).get("path")
                        yield f"{name}#{row:09d}", record
                        row += 1

    def cell(self, location: str, column: str) -> Any:
        """See `RowTable`."""
        name, _, row = location.rpartition("#")
        return self._cursor.cell(self.root / name, int(row), column)

    def fingerprint(self) -> dict[str, Any]:
        """See `CaptionDataset`. Sizes and times of the files, because reading them would be reading all images."""
        states = {name: (self.root / name).stat() for name in self.files}
        return {"root": str(self.root.resolve()), "files": {k: [s.st_size, s.st_mtime_ns] for k, s in states.items()}}


@dataclass(frozen=True, slots=True)
class _Held:
    """Rows from `begin` on of one column of a file that are in memory."""

    path: Path
    column: str
    begin: int
    batch: pa.RecordBatch

    @property
    def end(self) -> int:
        return self.begin + self.batch.num_rows

    def holds(self, path: Path, row: int, column: str) -> bool:
        return (path, column) == (self.path, self.column) and self.begin <= row < self.end


class _Cursor:
    """Reads single cells of one column, forward as cheaply as a scan. Safe for several threads.

    The rows before the current ones are kept, also those of the row group before: threads that read ahead come to the
    end of a batch out of order.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: pq.ParquetFile | None = None
        self._file_path: Path | None = None
        self._held: tuple[_Held, ...] = ()  # the newest last
        self._group_end = 0
        self._batches: Iterator[pa.RecordBatch] = iter(())

    def cell(self, path: Path, row: int, column: str) -> Any:
        with self._lock:
            held = next((each for each in self._held if each.holds(path, row, column)), None)
            if held is None:
                held = self._read(path, row, column)
            return held.batch.column(0)[row - held.begin].as_py()

    def _read(self, path: Path, row: int, column: str) -> _Held:
        newest = self._held[-1] if self._held else None
        is_ahead = newest is not None and (path, column) == (newest.path, newest.column)
        # Zero until the rows are there: if opening or reading fails, the next call starts afresh.
        group_end, self._group_end = self._group_end, 0
        if newest is not None and is_ahead and newest.end <= row < group_end:
            begin = newest.end
        else:
            begin, group_end = self._start(path, row, column)
        while True:
            # The oldest is released before another is read, so that two batches are in memory and not three.
            self._held = self._held[-1:]
            held = _Held(path, column, begin, next(self._batches))
            self._held += (held,)
            if held.holds(path, row, column):
                self._group_end = group_end
                return held
            begin = held.end

    def _start(self, path: Path, row: int, column: str) -> tuple[int, int]:
        """Begin with the row group that has the row; returns its first row and the one after its last."""
        if self._file is None or path != self._file_path:
            if self._file is not None:
                self._file.close()
            self._file, self._file_path = None, None
            self._file, self._file_path = _opened(path), path
        begin = 0
        for group in range(self._file.num_row_groups):
            end = begin + self._file.metadata.row_group(group).num_rows
            if row < end:
                self._batches = _batches(path, self._file, _IMAGES_AT_A_TIME, [group], [column])
                return begin, end
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
    """Open local parquet files with images and captions.

    Args:
        path: a file, or a folder with parquet files at any depth.
        split: "train" for files whose path says so; needed where a folder holds several splits.
        caption_column: by default the first of `record_entries.CAPTION_COLUMNS`.
        image_column: bytes, or structs of bytes and path; by default "image" or the first such column.
        id_column: by default the first of `record_entries.ID_COLUMNS`, otherwise the path in the image's struct.

    Raises:
        UsageError: a file is damaged, no file is there, or a column is missing.
    """
    columns = ColumnChoice(caption_column, image_column, id_column)
    return table_captions("parquet", parquet_rows(path, split), columns)


def parquet_rows(path: str | Path, split: str | None = None) -> ParquetRows:
    """The parquet files at a path, of one split. Raises as `open_parquet`."""
    root = existing(path, "a parquet file or a folder of them")
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
    if split is None and len(by_split) == 1:
        return ParquetRows(root, tuple(names))
    found = ", ".join(sorted(filter(None, by_split))) or "none"
    if split is None:
        raise UsageError(f"{root}: holds the splits {found}; choose one: ?split=NAME after the path")
    if split not in by_split:
        raise UsageError(f"{root}: has no split {split!r}; it holds {found}")
    return ParquetRows(root, tuple(by_split[split]))


def _opened(path: Path) -> pq.ParquetFile:
    try:
        if path.stat().st_size == 0:
            raise UsageError(f"{path}: the file is empty, but it must be parquet")
        return pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        what = error.strerror if isinstance(error, OSError) and error.strerror else "it is damaged or not parquet"
        raise UsageError(f"{path}: cannot read the file: {what}") from error


def _batches(
    path: Path, file: pq.ParquetFile, batch_size: int, groups: list[int] | None, columns: list[str]
) -> Iterator[pa.RecordBatch]:
    try:
        yield from file.iter_batches(batch_size, row_groups=groups, columns=columns, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{path}: the file is damaged: {reason}") from error
