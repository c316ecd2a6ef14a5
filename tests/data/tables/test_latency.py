"""Tables of step latencies, the notation of combinations, and tables of other programs."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.parsing import parse
from patchedserve.data.resolution import Resolution, format_batch, parse_batch
from patchedserve.data.run_facts import RunFacts
from patchedserve.data.tables.latency import (
    LATENCIES,
    LatencyRow,
    LatencyTable,
    read_latencies,
    write_latencies,
)
from patchedserve.data.tables.schemas import STEPS, read_rows, write_table
from patchedserve.profiling.steps.combinations import Combination

from ...support.latency_tables import CIRCUMSTANCES, law_rows

S, L = Resolution(512, 512), Resolution(1024, 1024)
WIDE = Resolution(128, 192)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("2*512x512 + 1024x1024", {S: 2, L: 1}),
        ("2x512x512+1x1024x1024", {S: 2, L: 1}),
        ("1024+2 * 512", {L: 1, S: 2}),
        ("128x192", {WIDE: 1}),
        (" 16x128x192 ", {WIDE: 16}),
    ],
)
def test_combinations_are_read_and_written(text: str, counts: dict[Resolution, int]) -> None:
    assert parse_batch(text) == counts
    assert parse_batch(format_batch(counts)) == counts


def test_written_form_equals_the_displayed_one() -> None:
    assert format_batch({L: 1, WIDE: 2, S: 0}) == "2*128x192 + 1024x1024"
    assert Combination((L, WIDE), (1, 2)).label == "2*128x192 + 1024x1024"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "combination is '', but it must be resolutions with the number of their requests"),
        ("512+", "combination is '512\\+'"),
        ("2*", "combination is '2\\*'"),
        ("a*512", "combination is 'a\\*512'"),
        ("-1*512", "combination is '-1\\*512'"),
        ("0*512", "512x512 is named with no requests"),
        ("512+2*512x512", "512x512 is named twice"),
        ("2x512", "width is 2 in resolution 2x512, but must be a positive multiple of 8"),
        ("3*513", "width is 513"),
    ],
)
def test_invalid_combinations_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_batch(text)
    assert "\n" not in str(caught.value)


def test_table_reads_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "latency.parquet"
    settings = {"resolutions": ["128x128"], "seed": 3, "timings": 90}
    table = LatencyTable(tuple(law_rows(12)), CIRCUMSTANCES, settings)
    write_latencies(path, table)
    again = read_latencies(path)
    assert again == table
    assert again.share_done == 12 * 3 / 90
    assert [str(size) for size in again.resolutions] == ["128x128", "192x192", "256x256"]
    row = read_rows(path, LATENCIES)[0]
    assert row["median_ms"] == table.rows[0].median_ms
    assert (row["repeats"], row["resolutions"]) == (3, {"128x128": 1})
    assert row["min_ms"] < row["median_ms"] < row["p95_ms"] < row["first_step_ms"][0]


def test_figures_of_a_row() -> None:
    row = LatencyRow({S: 2, L: 1}, (4.0, 1.0, 3.0, 2.0, 5.0))
    assert (row.median_ms, row.num_requests, row.label) == (3.0, 3, "2*512x512 + 1024x1024")
    assert row.p95_ms == pytest.approx(4.8)  # numpy.percentile([1, 2, 3, 4, 5], 95)
    assert LatencyRow({S: 1}, (7.0,)).p95_ms == 7.0
    assert row.first_step_median_ms is None


def test_csv_of_other_programs_is_read(tmp_path: Path) -> None:
    path = tmp_path / "h100.csv"
    path.write_text("ms,note,combination\n33.5,x,2x512x512+1x1024x1024\n10,,512\n14,second,1*512x512\n")
    table = read_latencies(path)
    assert table.rows == (LatencyRow({L: 1, S: 2}, (33.5,)), LatencyRow({S: 1}, (10.0, 14.0)))
    assert (table.circumstances, table.settings, table.share_done) == (None, None, 1.0)
    assert table.rows[1].median_ms == 12.0


def test_parquet_of_other_programs_is_read(tmp_path: Path) -> None:
    path = tmp_path / "h100.parquet"
    pq.write_table(pa.table({"combination": ["512", "2*512 + 1024"], "ms": [3, 9], "gpu": ["a", "b"]}), path)
    assert read_latencies(path).rows == (LatencyRow({S: 1}, (3.0,)), LatencyRow({S: 2, L: 1}, (9.0,)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("combination,ms\n512,nan\n", "row 1: a time is nan ms, but it must be positive and finite"),
        ("combination,ms\n512,1\n512,0\n", "row 2: a time is 0.0 ms"),
        ("combination,ms\n512,inf\n", "a time is inf ms"),
        ("combination,ms\n512,fast\n", "row 1: ms is 'fast', but it must be a number of milliseconds"),
        ("combination,ms\n512,\n", "row 1: ms is ''"),
        ("combination,ms\n512y,3\n", "row 1: combination is '512y'"),
        ("combination,ms\n,3\n", "row 1: combination is ''"),
        ("combination,ms\n", "the latencies table is empty"),
        ("combination,latency\n512,3\n", "has the columns combination, latency, but a table of latencies has"),
        ("", "the latencies table is empty"),
        ("combination,ms\n512\n", "row 1: ms is None, but it must be a number of milliseconds"),
    ],
)
def test_malformed_csv_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        read_latencies(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_malformed_parquet_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    with pytest.raises(UsageError, match="cannot read the latencies table: No such file"):
        read_latencies(path)
    with pytest.raises(UsageError, match="cannot read the latencies table: No such file"):
        read_latencies(tmp_path / "table.csv")
    with pytest.raises(UsageError, match="cannot read the latencies table"):
        read_latencies(tmp_path)
    write_latencies(path, LatencyTable(tuple(law_rows(9)), CIRCUMSTANCES, {}))
    content = path.read_bytes()
    for length in (0, 3, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(UsageError, match="damaged or not parquet"):
            read_latencies(path)
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(UsageError, match="has the columns a, but a table of latencies has combination"):
        read_latencies(path)
    pq.write_table(pa.table({"combination": ["512"], "ms": [math.nan]}), path)
    with pytest.raises(UsageError, match="row 1: a time is nan ms"):
        read_latencies(path)
    step = {
        "step": 0,
        "start_s": 0.5,
        "duration_s": 0.02,
        "active": 3,
        "waiting": 1,
        "resolutions": {},
        "schedule_s": 0.001,
        "computed": None,
    }
    write_table(path, STEPS, [step])
    with pytest.raises(UsageError, match="is the steps table, but it must be the latencies table"):
        read_latencies(path)


ROW: dict[str, Any] = {
    "resolutions": {"128x128": 1},
    "repeats": 1,
    "median_ms": 1.0,
    "p95_ms": 1.0,
    "min_ms": 1.0,
    "samples_ms": [1.0],
    "first_step_ms": [1.0],
}
ABOUT = {"circumstances": asdict(CIRCUMSTANCES), "settings": {}}


@pytest.mark.parametrize(
    ("rows", "about", "message"),
    [
        ([ROW | {"samples_ms": [math.nan]}], ABOUT, "row 1: a time is nan ms"),
        ([ROW, ROW | {"samples_ms": []}], ABOUT, "row 2: holds no timing"),
        ([ROW | {"first_step_ms": [-1.0]}], ABOUT, "row 1: a time is -1.0 ms"),
        ([ROW | {"resolutions": {}}], ABOUT, "row 1: holds no requests"),
        ([ROW | {"resolutions": {"128x128": 0}}], ABOUT, "row 1: holds no requests"),
        ([ROW | {"resolutions": {"128x129": 1}}], ABOUT, "row 1: height is 129"),
        ([ROW, ROW], ABOUT, "is damaged: 128x128 occurs twice"),
        ([ROW], None, "has no readable head"),
        ([ROW], {"circumstances": {"model": "a"}, "settings": {}}, "is damaged: 'fingerprint' is missing; delete it"),
    ],
)
def test_tables_of_psctl_are_validated(
    tmp_path: Path, rows: list[dict[str, Any]], about: dict[str, Any] | None, message: str
) -> None:
    path = tmp_path / "table.parquet"
    write_table(path, LATENCIES, rows, about=about)
    with pytest.raises(UsageError, match=message) as caught:
        read_latencies(path)
    assert str(caught.value).startswith(str(path))


def test_circumstances_report_differences() -> None:
    assert CIRCUMSTANCES.difference(CIRCUMSTANCES) is None
    assert parse(RunFacts, asdict(CIRCUMSTANCES)) == CIRCUMSTANCES
    for change, message in (
        ({"model": "emoji-3", "fingerprint": "def"}, "is for the model emoji-xl, but emoji-3 is served"),
        ({"fingerprint": "def"}, "is for other files of the model emoji-xl than those that are served now"),
        ({"device": "cuda:0", "device_name": "H200"}, "is for device a processor, but H200 is served"),
        ({"dtype": "bfloat16"}, "is for dtype float32, but bfloat16 is served"),
        ({"engine": "plain"}, "is for engine patched, but plain is served"),
        ({"patch_size": 4}, "is for patch size auto, but 4 is served"),
        ({"is_guided": False}, "is for guidance on, but off is served"),
        ({"threads": 2}, "is for threads 1, but 2 is served"),
    ):
        assert CIRCUMSTANCES.difference(replace(CIRCUMSTANCES, **change)) == message
    # Latencies depend little on these, or not at all on this device.
    for change in ({"torch": "2.14.0"}, {"guidance_scale": 7.0}):
        assert CIRCUMSTANCES.difference(replace(CIRCUMSTANCES, **change)) is None
    on_gpu = replace(CIRCUMSTANCES, device="cuda:0")
    assert on_gpu.difference(replace(on_gpu, threads=8)) is None
