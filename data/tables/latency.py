"""Tables of step latencies: the duration of one denoising step of a batch, by the composition of the batch.

`psctl profile latency` measures them. Tables of other programs, for example for GPUs that are not available, are read
from CSV or parquet files with the columns `combination` ("2*512x512 + 1024x1024", see `data.resolution.format_batch`)
and `ms`. This module imports no torch.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import UsageError
from ..parsing import parse
from ..records import read_records
from ..resolution import Resolution, format_batch, parse_batch
from ..resolution import parse as parse_resolution
from ..run_facts import RunFacts
from .schemas import TableSchema, about_of, column, name_of, parquet_file, read_table, write_table

_I, _F, _S = pa.int64(), pa.float64(), pa.string()

LATENCIES = TableSchema(
    "latencies",
    1,
    (
        column("resolutions", pa.map_(_S, _I), meaning="requests in the batch by resolution, as WIDTHxHEIGHT"),
        column("repeats", _I, meaning="number of timings"),
        column("median_ms", _F, "ms", meaning="of one denoising step while the batch stays the same"),
        column("p95_ms", _F, "ms"),
        column("min_ms", _F, "ms"),
        column("samples_ms", pa.list_(_F), "ms", meaning="the timings, in the order in which they were taken"),
        column("first_step_ms", pa.list_(_F), "ms", meaning="first steps of the batch, which also pack it anew"),
    ),
)
"""One row per combination."""

TABLE_PATTERN = "latency-*.parquet"
"""Names of measured tables in a workspace."""
FOREIGN_COLUMNS = ("combination", "ms")


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """One combination and its timings in milliseconds.

    Attributes:
        counts: number of requests of each resolution, without resolutions that have none.
        samples_ms: timings of a step, at least one, all positive.
        first_step_ms: timings of the first step after the batch has changed.
    """

    counts: Mapping[Resolution, int]
    samples_ms: tuple[float, ...]
    first_step_ms: tuple[float, ...] = ()

    @property
    def num_requests(self) -> int:
        return sum(self.counts.values())

    @property
    def visits_ms(self) -> tuple[float, ...]:
        """Median of the timings of each visit; all visits have equally many. Every visit has one first step; if none
        are known, every timing counts as a visit.
        """
        size = len(self.samples_ms) // (len(self.first_step_ms) or len(self.samples_ms))
        starts = range(0, len(self.samples_ms), max(1, size))
        return tuple(statistics.median(self.samples_ms[start : start + max(1, size)]) for start in starts)

    @property
    def median_ms(self) -> float:
        """Median of the visits."""
        return statistics.median(self.visits_ms)

    @property
    def disagreement(self) -> float | None:
        """Absolute logarithm of the ratio of the medians of even and odd visits; None for a single visit."""
        visits_ms = self.visits_ms
        if len(visits_ms) < 2:
            return None
        return abs(math.log(statistics.median(visits_ms[::2]) / statistics.median(visits_ms[1::2])))

    @property
    def first_step_median_ms(self) -> float | None:
        return statistics.median(self.first_step_ms) if self.first_step_ms else None

    @property
    def p95_ms(self) -> float:
        """95th percentile of the timings, interpolated between the two nearest."""
        return float(np.percentile(self.samples_ms, 95))

    @property
    def label(self) -> str:
        return format_batch(self.counts)


@dataclass(frozen=True, slots=True)
class LatencyTable:
    """Step latencies of different combinations.

    Attributes:
        rows: rows, no two of the same combination.
        circumstances: circumstances of the measurement; None for a table of another program.
        settings: settings of the profile (JSON), with its planned number of timings under `timings`; None for a table
            of another program.
    """

    rows: tuple[LatencyRow, ...]
    circumstances: RunFacts | None = None
    settings: Mapping[str, Any] | None = None

    @property
    def share_done(self) -> float:
        """Share of the profile's planned timings that were taken; 1 for a table of another program."""
        wanted = (self.settings or {}).get("timings")
        return 1.0 if wanted is None else sum(len(row.samples_ms) for row in self.rows) / wanted

    @property
    def resolutions(self) -> tuple[Resolution, ...]:
        """All resolutions in the table, from small to large."""
        found = {resolution for row in self.rows for resolution in row.counts}
        return tuple(sorted(found, key=lambda resolution: (resolution.pixels, resolution)))


def noise_floor(rows: Iterable[LatencyRow]) -> float | None:
    """Return the noise floor of a table: the mean relative error that a perfect predictor would appear to have.

    It is half of the mean disagreement between the two halves of a combination's visits. Each half has half of the
    visits and both have errors, so that their difference is twice as wide as the error of the whole. None if every
    combination was visited only once.
    """
    known = [each for row in rows if (each := row.disagreement) is not None]
    return statistics.fmean(known) / 2 if known else None


def write_latencies(path: str | Path, table: LatencyTable) -> None:
    """Write a measured table as parquet, atomically. Raises OSError."""
    rows = [
        {
            "resolutions": {str(resolution): count for resolution, count in row.counts.items()},
            "repeats": len(row.samples_ms),
            "median_ms": row.median_ms,
            "p95_ms": row.p95_ms,
            "min_ms": min(row.samples_ms),
            "samples_ms": list(row.samples_ms),
            "first_step_ms": list(row.first_step_ms),
        }
        for row in table.rows
    ]
    circumstances = None if table.circumstances is None else table.circumstances.to_json()
    write_table(path, LATENCIES, rows, about={"circumstances": circumstances, "settings": dict(table.settings or {})})


def read_latencies(path: str | Path) -> LatencyTable:
    """Read a table that `psctl profile latency` wrote, or one of another program (CSV, parquet).

    Other columns of a foreign table are ignored. Several rows of one combination are its timings.

    Raises:
        UsageError: the file cannot be read or is damaged, or a row is not a combination with a positive, finite time;
            the message names the file and the row.
    """
    path = Path(path)
    if path.suffix.lower() == ".csv":
        return _read_foreign(path, (record for _, record in read_records(path, f"the {LATENCIES.name} table")))
    with parquet_file(path, f"the {LATENCIES.name} table") as file:
        if not name_of(file.schema_arrow):
            return _read_foreign(path, file.read(use_threads=False).to_pylist())
    return _read_own(path)


def _read_own(path: Path) -> LatencyTable:
    table = read_table(path, LATENCIES)
    about = about_of(table.schema, path)
    where, remedy = f"{path}: the latencies table is damaged", "delete it to measure again"
    settings, circumstances = parse(dict[str, Any], about.get("settings"), where, remedy), about.get("circumstances")
    known = None if circumstances is None else parse(RunFacts, circumstances, where, remedy)
    rows = []
    for number, row in enumerate(table.to_pylist(maps_as_pydicts="strict"), start=1):
        where = f"{path}, row {number}"
        try:
            counts = {parse_resolution(name): count for name, count in row["resolutions"].items()}
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from error
        rows.append(_checked_row(where, counts, row["samples_ms"], row["first_step_ms"]))
    return LatencyTable(_unique(path, rows), known, settings)


def _read_foreign(path: Path, rows: Iterable[Mapping[str, Any]]) -> LatencyTable:
    samples: dict[frozenset[tuple[Resolution, int]], list[float]] = {}
    for number, row in enumerate(rows, start=1):
        where = f"{path}, row {number}"
        if not set(FOREIGN_COLUMNS) <= set(row):
            raise UsageError(
                f"{path}: has the columns {', '.join(row)}, but a table of latencies has combination "
                "(as 2*512x512 + 1024x1024) and ms"
            )
        try:
            counts = parse_batch(str(row["combination"] or ""))
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from error
        try:
            ms = float(row["ms"])
        except (TypeError, ValueError) as error:
            raise UsageError(f"{where}: ms is {row['ms']!r}, but it must be a number of milliseconds") from error
        checked = _checked_row(where, counts, [ms], [])
        samples.setdefault(frozenset(counts.items()), []).extend(checked.samples_ms)
    if not samples:
        raise UsageError(f"{path}: the latencies table is empty")
    return LatencyTable(tuple(LatencyRow(dict(counts), tuple(times)) for counts, times in samples.items()))


def _checked_row(
    where: str, counts: dict[Resolution, int], samples_ms: Sequence[float], first_step_ms: Sequence[float]
) -> LatencyRow:
    if not counts or min(counts.values()) < 1:
        raise UsageError(f"{where}: holds no requests of a resolution that it names")
    if not samples_ms:
        raise UsageError(f"{where}: holds no timing")
    for ms in (*samples_ms, *first_step_ms):
        if not 0 < ms < math.inf:
            raise UsageError(f"{where}: a time is {ms} ms, but it must be positive and finite")
    return LatencyRow(counts, tuple(samples_ms), tuple(first_step_ms))


def _unique(path: Path, rows: Iterable[LatencyRow]) -> tuple[LatencyRow, ...]:
    found: dict[frozenset[tuple[Resolution, int]], LatencyRow] = {}
    for row in rows:
        if found.setdefault(frozenset(row.counts.items()), row) is not row:
            raise UsageError(f"{path}: the latencies table is damaged: {row.label} occurs twice")
    return tuple(found.values())
