"""Tables of millions of rows, written and read in pieces, so that memory use stays constant.

The files are the same as those of `schemas`, with a head of facts about the table as a whole.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..errors import RunError, UsageError
from ..files import atomic_write
from .schemas import TableSchema, about_of, opened

_GROUP_ROWS = 1 << 18
_BATCH_ROWS = 1 << 16


class TableWriter:
    """Writes a table row group by row group, under a temporary name until it is complete.

        with TableWriter(path, BLOCKS, facts) as writer:
            writer.write({"request_id": 7, "patch": np.arange(16), ...})

    If the context ends without an error, the file appears under its name; after an error there is no file.

    Args:
        path, schema: as in `schemas.write_table`.
        facts: facts of the whole table, as a JSON mapping.
        group_rows: number of rows that are kept in memory before they are written as a row group.
    """

    def __init__(
        self, path: str | Path, schema: TableSchema, facts: Mapping[str, Any], *, group_rows: int = _GROUP_ROWS
    ) -> None:
        self.path = Path(path)
        self.num_rows = 0
        self._schema = schema
        self._arrow_schema = schema.to_arrow(dict(facts))
        self._group_rows = group_rows
        self._floats = [field.name for field in self._arrow_schema if pa.types.is_floating(field.type)]
        self._waiting: list[tuple[dict[str, np.ndarray], int]] = []
        self._num_waiting = 0
        self._writer: pq.ParquetWriter | None = None
        self._context = self._opened()

    @contextmanager
    def _opened(self) -> Iterator["TableWriter"]:
        with (
            atomic_write(self.path) as temporary,
            pq.ParquetWriter(temporary, self._arrow_schema, write_page_checksum=True) as self._writer,
        ):
            yield self
            self._flush()

    def __enter__(self) -> "TableWriter":
        return self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def write(self, columns: Mapping[str, Any]) -> None:
        """Append rows.

        Args:
            columns: every column of the schema: an array of one value per row, or one value for all rows. At least one
                is an array, and all arrays have one length, which may be 0.

        Raises:
            RunError: a value is NaN or infinite.
            RuntimeError: the columns do not fit the schema. They come from our own code, so this is a bug.
        """
        self._schema.require_columns(columns)
        lengths = {len(value) for value in columns.values() if isinstance(value, np.ndarray | list | tuple)}
        if len(lengths) != 1:
            raise RuntimeError(f"{self._schema.name} table: columns have {sorted(lengths)} rows")
        # Copied, because the caller may reuse its buffers.
        piece = {name: np.array(value) for name, value in columns.items()}
        for name in self._floats:
            if piece[name].dtype.kind not in "fiu":
                raise RuntimeError(f"{self._schema.name} table: {name} has the wrong type: {piece[name].dtype}")
            if not np.isfinite(piece[name]).all():
                raise RunError(f"{self.path}: column {name} would hold NaN or infinity; nothing was written")
        num_rows = lengths.pop()
        # Converted to Arrow arrays in bulk: a conversion costs a millisecond however few rows there are.
        self._waiting.append((piece, num_rows))
        self._num_waiting += num_rows
        self.num_rows += num_rows
        if self._num_waiting >= self._group_rows:
            self._flush()

    def append_from(self, path: str | Path) -> None:
        """Append all rows of another file of the same table, such as a part that an earlier run has finished.

        Raises UsageError as `read_batches`, or if the file's facts differ.
        """
        if read_facts(path, self._schema) != about_of(self._arrow_schema, self.path):
            raise UsageError(f"{path}: was made under other circumstances than {self.path}; the two cannot be joined")
        self._flush()
        for batch in read_batches(path, self._schema, batch_rows=self._group_rows):
            self._open_writer.write_batch(batch.replace_schema_metadata(self._arrow_schema.metadata))
            self.num_rows += batch.num_rows

    @property
    def _open_writer(self) -> pq.ParquetWriter:
        if self._writer is None:
            raise RuntimeError("a TableWriter is used as a context manager")
        return self._writer

    def _flush(self) -> None:
        waiting, self._waiting, self._num_waiting = self._waiting, [], 0
        if waiting:
            arrays = [self._array(field, waiting) for field in self._arrow_schema]
            self._open_writer.write_table(pa.Table.from_arrays(arrays, schema=self._arrow_schema))

    def _array(self, field: pa.Field, pieces: list[tuple[dict[str, np.ndarray], int]]) -> pa.Array:
        values: list[np.ndarray] = []
        for columns, num_rows in pieces:
            value = columns[field.name]
            values.append(value if value.ndim else np.full(num_rows, value))
        try:
            array = pa.array(np.concatenate(values), from_pandas=False)
            # Rounding to float32 is intended; an integer that does not fit is an error.
            array = array.cast(field.type, safe=not pa.types.is_floating(field.type))
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            raise RuntimeError(f"{self._schema.name} table: {field.name} has the wrong type: {error}") from error
        if array.null_count and not field.nullable:
            raise RuntimeError(f"{self._schema.name} table: {field.name} is empty in some rows")
        if _first_not_finite(array) is not None:
            raise RunError(f"{self.path}: column {field.name} holds a number too large for {field.type}")
        return array


def read_batches(
    path: str | Path, schema: TableSchema, columns: Sequence[str] | None = None, *, batch_rows: int = _BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a table in order, at most `batch_rows` at a time; `columns` are those to read, None for all.

    Raises UsageError as `schemas.read_table`, also for damage in the middle, or if a number is NaN or infinite.
    """
    first_row = 0
    with opened(path, schema) as file:
        for batch in file.iter_batches(
            batch_rows, columns=None if columns is None else list(columns), use_threads=False
        ):
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                if (bad := _first_not_finite(column)) is not None:
                    raise UsageError(f"{path}: column {name} holds {column[bad].as_py()} in row {first_row + bad}")
            yield batch
            first_row += batch.num_rows


def count_rows(path: str | Path, schema: TableSchema) -> int:
    """Return the number of rows of a table, from its footer. Raises UsageError as `schemas.read_table`."""
    with opened(path, schema) as file:
        return file.metadata.num_rows


def read_facts(path: str | Path, schema: TableSchema) -> dict[str, Any]:
    """Return the facts of the whole table. Raises UsageError as `schemas.read_table`, or if the file has no facts."""
    with opened(path, schema) as file:
        return about_of(file.schema_arrow, path)


def _first_not_finite(array: pa.Array) -> int | None:
    if not pa.types.is_floating(array.type):
        return None
    place = pc.index(pc.is_finite(array), False).as_py()  # type: ignore[attr-defined]
    return None if place < 0 else place
