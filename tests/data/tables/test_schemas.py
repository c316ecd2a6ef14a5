"""Tables: written data is read back, and files that are not the table are reported."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import MAX_SEED, Request
from patchedserve.data.resolution import Resolution
from patchedserve.data.tables.schemas import RECORDS, STEPS, about_of, read_frame, read_rows, read_table, write_table
from patchedserve.serving.core.request_state import RequestRecord

STEP = {
    "step": 0,
    "start_s": 0.5,
    "duration_s": 0.02,
    "active": 3,
    "waiting": 1,
    "resolutions": {"128x128": 2, "64x72": 1},
    "schedule_s": 0.0001,
    "computed": None,
}


def record_rows() -> list[dict[str, Any]]:
    done = RequestRecord.of(Request(0, "a 🌮", Resolution(128, 192), seed=MAX_SEED, arrival_s=1.0, slo_s=2.0))
    done.prepare_start_s, done.prepare_end_s, done.admitted_s, done.denoise_end_s = 1.1, 1.2, 1.5, 2.0
    done.image_path = "images/000.png"
    done.close("completed", 2.25)
    failed = RequestRecord.of(Request(1, "", Resolution(128, 128)))
    failed.close("failed", 0.5, "no prompt")
    return [done.to_row(), failed.to_row()]


def test_records_read_back_equal_with_types_and_units(tmp_path: Path) -> None:
    rows = record_rows()
    write_table(tmp_path / "new" / "records.parquet", RECORDS, rows)
    table = read_table(tmp_path / "new" / "records.parquet", RECORDS)
    assert table.to_pylist() == [{name: row[name] for name in RECORDS.names} for row in rows]
    assert RequestRecord.from_row(table.to_pylist()[0]).to_row() == rows[0]
    assert table.schema.field("latency_s").metadata[b"unit"] == b"s"
    assert table.schema.field("width").metadata[b"unit"] == b"px"
    assert table.schema.metadata[b"psctl.table"] == b"records"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["records.parquet"]
    row = rows[0]
    assert (row["queueing_s"], row["latency_s"], row["deadline_s"], row["slo_met"]) == (0.5, 1.25, 3.0, True)


@pytest.mark.parametrize(("version", "num_columns"), [(1, 21), (2, 24)])
def test_records_of_older_versions_are_read(version: int, num_columns: int, tmp_path: Path) -> None:
    older = replace(RECORDS, version=version, columns=RECORDS.columns[:num_columns], oldest=None)
    rows = [{name: row[name] for name in older.names} for row in record_rows()]
    write_table(tmp_path / "t.parquet", older, rows, about={"of": "old"})
    assert read_rows(tmp_path / "t.parquet", RECORDS) == [dict.fromkeys(RECORDS.names) | row for row in rows]
    some = read_table(tmp_path / "t.parquet", RECORDS, ["slo_met", "reused"])
    assert some.to_pydict() == {"slo_met": [True, None], "reused": [None, None]}
    assert about_of(read_table(tmp_path / "t.parquet", RECORDS).schema, "t") == {"of": "old"}
    write_table(tmp_path / "t.parquet", replace(older, columns=older.columns[1:]), [])
    with pytest.raises(UsageError, match="which is not the records table's schema"):
        read_table(tmp_path / "t.parquet", RECORDS)


def test_record_rows_have_the_columns_of_the_table() -> None:
    assert all(set(row) == set(RECORDS.names) for row in record_rows())


def test_steps_read_back_as_rows_and_as_a_frame(tmp_path: Path) -> None:
    path = tmp_path / "steps.parquet"
    rows = [STEP, STEP | {"start_s": 0.52, "resolutions": {}}]
    write_table(path, STEPS, rows)
    assert read_rows(path, STEPS) == rows
    frame = read_frame(path, STEPS)
    assert frame["resolutions"].tolist() == [row["resolutions"] for row in rows]
    assert list(frame.columns) == list(STEPS.names)


def test_empty_tables_keep_their_columns(tmp_path: Path) -> None:
    write_table(tmp_path / "t.parquet", RECORDS, [])
    assert read_rows(tmp_path / "t.parquet", RECORDS) == []
    assert tuple(read_frame(tmp_path / "t.parquet", RECORDS).columns) == RECORDS.names


def test_folders_named_like_partitions_add_no_columns(tmp_path: Path) -> None:
    write_table(tmp_path / "model=x" / "t.parquet", STEPS, [STEP])
    assert read_rows(tmp_path / "model=x" / "t.parquet", STEPS) == [STEP]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start_s": math.nan}, "steps table, row 1: start_s is nan"),
        ({"active": None}, "row 1: active is empty"),
        ({"active": "three"}, "wrong type"),
        ({"active": 2**70}, "wrong type"),
        ({"resolutions": 7}, "wrong type"),
        ({"extra": 1}, r"row 1: columns \['extra'\] are missing or unknown"),
    ],
)
def test_rows_violating_the_schema_are_internal_errors_and_leave_no_file(
    tmp_path: Path, change: dict, message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        write_table(tmp_path / "t.parquet", STEPS, [STEP, STEP | change])
    with pytest.raises(RuntimeError, match=r"columns \['waiting'\] are missing"):
        write_table(tmp_path / "t.parquet", STEPS, [{name: STEP[name] for name in STEP if name != "waiting"}])
    assert list(tmp_path.iterdir()) == []


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_table(path, STEPS, [STEP])
    with pytest.raises(RuntimeError):
        write_table(path, STEPS, [STEP | {"active": None}])
    assert read_rows(path, STEPS) == [STEP]


def test_truncated_and_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_table(path, RECORDS, record_rows())
    content = path.read_bytes()
    for length in (0, 1, 4, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(UsageError, match="cannot read the records table: it is damaged or not parquet") as caught:
            read_table(path, RECORDS)
        assert "\n" not in str(caught.value)


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    with pytest.raises(UsageError, match="cannot read the records table: No such file"):
        read_table(path, RECORDS)
    with pytest.raises(UsageError, match="cannot read the records table"):
        read_table(tmp_path, RECORDS)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="damaged or not parquet"):
        read_table(path, RECORDS)
    write_table(path, STEPS, [STEP])
    with pytest.raises(UsageError, match="is the steps table, but it must be the records table"):
        read_table(path, RECORDS)
    with pytest.raises(UsageError, match="is version 3 of the steps table, but it must be version 4"):
        read_table(path, replace(STEPS, version=4))
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(UsageError, match="is a file of another program, but it must be the records table"):
        read_table(path, RECORDS)
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata(STEPS.to_arrow().metadata), path)
    with pytest.raises(UsageError, match="columns are a, which is not the steps table's schema"):
        read_table(path, STEPS)


def test_reading_tables_starts_no_threads(tmp_path: Path) -> None:
    """Threads that start while a process ends with an error would abort it."""
    write_table(tmp_path / "records.parquet", RECORDS, record_rows())
    code = (
        "import os; from patchedserve.data.tables.schemas import RECORDS, read_table\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        f"read_table({str(tmp_path / 'records.parquet')!r}, RECORDS)\n"
        "raise SystemExit(len(os.listdir('/proc/self/task')) - before)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
