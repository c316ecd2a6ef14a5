"""Tables that commands exchange: their columns with types and units, and parquet files that carry their schema."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import UsageError
from ..files import atomic_write

if TYPE_CHECKING:
    import pandas

_NAME_KEY, _VERSION_KEY, _ABOUT_KEY = b"psctl.table", b"psctl.version", b"psctl.about"


def column(name: str, kind: pa.DataType, unit: str = "", nullable: bool = False, meaning: str = "") -> pa.Field:
    """Return a column: name, Arrow type, unit ("s", "px"; "" for none), whether it may be empty, and meaning."""
    return pa.field(name, kind, nullable, {"unit": unit, "meaning": meaning})


@dataclass(frozen=True, slots=True)
class TableSchema:
    """Columns of one kind of table. The version changes whenever a column does, so that old files are recognised.

    Attributes:
        name, version: name and version of the schema.
        columns: the columns.
        oldest: oldest version that can still be read; such files lack only columns at the end, which may be empty. None
            if only `version` can be read.
    """

    name: str
    version: int
    columns: tuple[pa.Field, ...]
    oldest: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Column names in order."""
        return tuple(each.name for each in self.columns)

    def to_arrow(self, about: Mapping[str, Any] | None = None) -> pa.Schema:
        """Return the Arrow schema. Its metadata hold units, meanings, this schema's name and version, and `about`, the
        facts of the table as a whole, as JSON, which `about_of` reads.
        """
        metadata = {_NAME_KEY: self.name.encode(), _VERSION_KEY: str(self.version).encode()}
        if about is not None:
            metadata[_ABOUT_KEY] = json.dumps(about, ensure_ascii=False, allow_nan=False).encode()
        return pa.schema(self.columns, metadata)

    def require_columns(self, names: Iterable[str], where: str = "") -> None:
        """Raise RuntimeError unless these are the names of the columns."""
        wrong = sorted(set(names) ^ set(self.names))
        if wrong:
            raise RuntimeError(f"{self.name} table{where}: columns {wrong} are missing or unknown")


_I, _F, _S, _B = pa.int64(), pa.float64(), pa.string(), pa.bool_()
# For tables with millions of rows: half the bytes, and a repeated text is stored once.
_SMALL_I, _SMALL_F, _WORD = pa.int32(), pa.float32(), pa.dictionary(pa.int32(), pa.string())

RECORDS = TableSchema(
    "records",
    6,
    (
        column("request_id", _I, meaning="number of the request in its trace"),
        column("prompt", _S),
        column("width", _I, "px"),
        column("height", _I, "px"),
        column("num_inference_steps", _I),
        column("guidance_scale", _F),
        column("seed", _I),
        column("arrival_s", _F, "s", meaning="all times count from the start of the trace"),
        column("prepare_start_s", _F, "s", True),
        column("prepare_end_s", _F, "s", True),
        column("admitted_s", _F, "s", True, "when it joined the active queue"),
        column("denoise_end_s", _F, "s", True),
        column("finish_s", _F, "s", True, "when the image was there, or the request ended without one"),
        column("slo_s", _F, "s", True, "how long it was allowed to take"),
        column("deadline_s", _F, "s", True, "arrival_s + slo_s"),
        column("status", _S, meaning="completed, failed, discarded or cancelled"),
        column("reason", _S, "", True, "why it was not completed"),
        column("queueing_s", _F, "s", True, "admitted_s - arrival_s"),
        column("latency_s", _F, "s", True, "finish_s - arrival_s of a completed request"),
        column("slo_met", _B, "", True, "whether latency_s <= slo_s; false without an image"),
        column("image_path", _S, "", True, "where the image was saved"),
        column("served_by", _S, "", True, "of a cascade: light or heavy, whose image it is"),
        column("confidence", _F, "", True, "of the light image, where it was judged"),
        column("threshold", _F, "", True, "that the confidence was compared with"),
        column("strength", _F, "", True, "of an image that starts from another one: share of the steps that are taken"),
        column("mask_ratio", _F, "", True, "of an edit: share of the pixels in its mask"),
        column("active_share", _F, "", True, "of an edit: share of the cells with a latent in its mask"),
        column("reused", _B, "", True, "of an edit: whether the other cells were read from its template's record"),
        column("lora", _S, "", True, "adapters that it names, with their scales"),
        column("steps_reused", _I, "", True, "steps that reused anything of cache or record; with 0 it is exact"),
        column("references", _S, "", True, "sizes of the images that it saw beside its prompt: 128x128 192x144"),
    ),
    oldest=1,
)
"""One row per request (`serving.core.request_state.RequestRecord.to_row`)."""

STEPS = TableSchema(
    "steps",
    3,
    (
        column("step", _I, meaning="number of the denoising iteration, from 0"),
        column("start_s", _F, "s", meaning="from the start of the trace"),
        column("duration_s", _F, "s"),
        column("active", _I, meaning="requests in the batch"),
        column("waiting", _I, meaning="requests that had arrived and were not in the batch"),
        column("resolutions", pa.map_(_S, _I), meaning="requests in the batch by resolution, as WIDTHxHEIGHT"),
        column("schedule_s", _F, "s", meaning="what the policy took since the step before"),
        column(
            "computed", pa.map_(_S, _I), nullable=True, meaning="of these, requests that the model ran for; null: all"
        ),
    ),
)
"""One row per denoising iteration, in order (`serving.core.step_row.StepRow.to_row`)."""

BLOCKS = TableSchema(
    "blocks",
    1,
    (
        column("request_id", _I, meaning="number of the request in the profile"),
        column("width", _SMALL_I, "px", meaning="of the image"),
        column("height", _SMALL_I, "px", meaning="of the image"),
        column("scheduler", _WORD, meaning="class of the diffusers scheduler"),
        column("num_steps", _SMALL_I, meaning="denoising steps of the request"),
        column("step", _SMALL_I, meaning="from 0; at least lag"),
        column("step_fraction", _SMALL_F, meaning="step / num_steps"),
        column("block", _WORD, meaning="name of the block; model for all as one"),
        column("block_index", _SMALL_I, meaning="place of the block in a step's order, from 0; model comes last"),
        column("patch", _SMALL_I, meaning="number of the patch within the image, row by row"),
        column("lag", _SMALL_I, "steps", meaning="how many steps earlier the cached tensor was computed, from 1"),
        column("input_mse", _SMALL_F, meaning="mean square difference of the block's input and the cached one"),
        column(
            "output_mse",
            _SMALL_F,
            meaning="mean square difference of the block's output and the cached one; of all as one, and the forecast",
        ),
        column("input_mse_normalised", _SMALL_F, meaning="input_mse / mean square of the cached input"),
        column("output_mse_normalised", _SMALL_F, meaning="output_mse / mean square of the cached output"),
    ),
)
"""One row per request, block, step, patch and lag: the difference of a block's tensors from those of an earlier step
(PatchedServe sections 3 and 7). `streams` writes and reads it, with `block_facts.BlockFacts` in its head."""


def write_table(
    path: str | Path,
    schema: TableSchema,
    rows: Iterable[Mapping[str, Any]],
    *,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write rows, mappings with exactly the schema's columns, as parquet, atomically. `about` is as in
    `TableSchema.to_arrow`.

    Raises:
        RuntimeError: a row does not fit the schema (a column is missing, unknown, empty, not finite or of another
            type). Rows come from our own code, so this is a bug.
        OSError: the file cannot be written; no partial file is left.
    """
    checked = [_checked(schema, i, row) for i, row in enumerate(rows)]
    try:
        table = pa.Table.from_pylist(checked, schema.to_arrow(about))
    except (pa.ArrowException, OverflowError, TypeError) as error:
        raise RuntimeError(f"{schema.name} table: a value has the wrong type: {error}") from error
    with atomic_write(path) as temporary:
        pq.write_table(table, temporary, write_page_checksum=True)


def read_table(path: str | Path, schema: TableSchema, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a table that `write_table` wrote, or some of its columns.

    Columns that an older version lacks are empty.

    Raises UsageError if the file cannot be read, is damaged or not parquet, or is another table or version.
    """
    with opened(path, schema) as file:
        there = file.schema_arrow.names
        wanted = schema.names if columns is None else columns
        table = file.read(columns=[name for name in wanted if name in there], use_threads=False)
    for each in schema.columns:
        if each.name in wanted and each.name not in there:
            table = table.append_column(each, pa.nulls(len(table), each.type))
    return table


@contextmanager
def opened(path: str | Path, schema: TableSchema) -> Iterator[pq.ParquetFile]:
    """Open a table and check its schema. Errors while the body reads it are reported as by `read_table`.

    Tables are read in the calling thread: a process that ended while Arrow was starting its own threads was aborted, 5
    of 75 times on a busy machine.
    """
    with parquet_file(path, f"the {schema.name} table") as file:
        _check_schema(path, file.schema_arrow, schema)
        yield file


@contextmanager
def parquet_file(path: str | Path, what: str, **options: Any) -> Iterator[pq.ParquetFile]:
    """Open any parquet file. `what` names its content in messages; options are those of `pyarrow.parquet.ParquetFile`.

    Raises UsageError if the file cannot be read, is damaged (also if the body finds the damage while reading) or is not
    parquet.
    """
    try:
        # Opened here, not by Arrow, whose messages repeat the path; and as one file, so that no folder adds columns.
        with (
            Path(path).open("rb") as raw,
            pq.ParquetFile(raw, pre_buffer=False, page_checksum_verification=True, **options) as file,
        ):
            yield file
    except (pa.ArrowException, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is damaged or not parquet"
        raise UsageError(f"{path}: cannot read {what}: {reason}") from error


def _check_schema(path: str | Path, found: pa.Schema, schema: TableSchema) -> None:
    name, version = name_of(found), _head(found, _VERSION_KEY)
    if name != schema.name:
        actual = f"the {name} table" if name else "a file of another program"
        raise UsageError(f"{path}: is {actual}, but it must be the {schema.name} table")
    columns = schema.columns
    if version != str(schema.version):
        if schema.oldest is None or version not in map(str, range(schema.oldest, schema.version)):
            must = f"it must be version {schema.version}"
            raise UsageError(f"{path}: is version {version} of the {name} table, but {must}")
        columns = columns[: len(found)]
    if not found.equals(pa.schema(columns)):
        raise UsageError(f"{path}: columns are {', '.join(found.names)}, which is not the {name} table's schema")


def name_of(found: pa.Schema) -> str:
    """Return the name of the table that a file holds; "" for a file of another program."""
    return _head(found, _NAME_KEY)


def about_of(found: pa.Schema, path: str | Path) -> dict[str, Any]:
    """Return the facts of a table as a whole from the head of its file.

    Raises UsageError if they are missing or damaged; the message names the file.
    """
    try:
        about = json.loads(_head(found, _ABOUT_KEY))
    except ValueError as error:
        name = name_of(found)
        raise UsageError(f"{path}: has no readable head that says what the {name} table was made of") from error
    if not isinstance(about, dict):
        raise UsageError(f"{path}: the head of the {name_of(found)} table is not a mapping")
    return about


def _head(found: pa.Schema, key: bytes) -> str:
    return (found.metadata or {}).get(key, b"").decode(errors="replace")


def read_rows(path: str | Path, schema: TableSchema) -> list[dict[str, Any]]:
    """Return the rows of a table as dicts, equal to those that were written. Raises as `read_table`."""
    return read_table(path, schema).to_pylist(maps_as_pydicts="strict")


def read_frame(path: str | Path, schema: TableSchema) -> "pandas.DataFrame":
    """Return a table as a pandas frame; maps become dicts. Raises as `read_table`."""
    return read_table(path, schema).to_pandas(maps_as_pydicts="strict")


def _checked(schema: TableSchema, index: int, row: Mapping[str, Any]) -> Mapping[str, Any]:
    schema.require_columns(row, f", row {index}")
    for each in schema.columns:
        value = row[each.name]
        if value is None and not each.nullable:
            raise RuntimeError(f"{schema.name} table, row {index}: {each.name} is empty")
        if isinstance(value, float) and not math.isfinite(value):
            raise RuntimeError(f"{schema.name} table, row {index}: {each.name} is {value}")
    return row
