"""Tables written and read in pieces, and the facts of a block profile."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from patchedserve.data.errors import RunError, UsageError
from patchedserve.data.parsing import parse
from patchedserve.data.tables.block_facts import BlockFacts
from patchedserve.data.tables.schemas import BLOCKS, STEPS, read_table, write_table
from patchedserve.data.tables.streams import TableWriter, count_rows, read_batches, read_facts

FACTS = BlockFacts("emoji-xl", "0a4d", "EulerDiscreteScheduler", 8, ("down0", "mid", "up0"))


def rows(num: int, **changes: Any) -> dict[str, Any]:
    given = dict.fromkeys(BLOCKS.names, 1) | {
        "scheduler": "EulerDiscreteScheduler",
        "block": "mid",
        "step_fraction": 0.1,
        "patch": np.arange(num),
        **{
            f"{side}_mse{kind}": np.linspace(0.1, 1, num)
            for side in ("input", "output")
            for kind in ("", "_normalised")
        },
    }
    return given | changes


def test_pieces_are_joined_into_one_table(tmp_path: Path) -> None:
    path = tmp_path / "new" / "blocks.parquet"
    with TableWriter(path, BLOCKS, FACTS.to_json(), group_rows=100) as writer:
        for i in range(40):
            writer.write(rows(7, request_id=i, block=f"block{i % 3}", lag=[1, 1, 2, 2, 3, 3, 4]))
        writer.write(rows(0))
        assert [file.suffix for file in path.parent.iterdir()] == [".parquet"]
        assert not path.exists(), "it appears when it is complete"
    assert [file.name for file in path.parent.iterdir()] == ["blocks.parquet"]
    assert writer.num_rows == count_rows(path, BLOCKS) == 280
    assert pq.read_metadata(path).num_row_groups > 1
    table = read_table(path, BLOCKS)
    assert table.column("request_id").to_pylist() == [i for i in range(40) for _ in range(7)]
    assert table.column("block").to_pylist() == [f"block{i % 3}" for i in range(40) for _ in range(7)]
    assert table.column("lag").to_pylist() == [1, 1, 2, 2, 3, 3, 4] * 40
    assert table.column("input_mse").to_pylist()[:7] == np.linspace(0.1, 1, 7).astype(np.float32).tolist()
    assert table.schema.field("width").metadata[b"unit"] == b"px"
    assert all(column.metadata[b"meaning"] for column in BLOCKS.columns)
    assert parse(BlockFacts, read_facts(path, BLOCKS)) == FACTS


def test_batches_equal_the_table(tmp_path: Path) -> None:
    path = tmp_path / "blocks.parquet"
    with TableWriter(path, BLOCKS, {}, group_rows=64) as writer:
        for i in range(50):
            writer.write(rows(5, step=i))
    batches = list(read_batches(path, BLOCKS, batch_rows=30))
    assert max(batch.num_rows for batch in batches) <= 30
    assert [x for batch in batches for x in batch.column("step").to_pylist()] == [
        i for i in range(50) for _ in range(5)
    ]
    some = list(read_batches(path, BLOCKS, ["lag", "block"]))
    assert some[0].schema.names == ["block", "lag"] or some[0].schema.names == ["lag", "block"]
    assert sum(batch.num_rows for batch in some) == 250


def test_buffers_may_be_reused(tmp_path: Path) -> None:
    path, buffer = tmp_path / "blocks.parquet", np.zeros(2)
    with TableWriter(path, BLOCKS, {}) as writer:
        for i in range(3):
            buffer[:] = i
            writer.write(rows(2, input_mse=buffer))
    assert read_table(path, BLOCKS).column("input_mse").to_pylist() == [0, 0, 1, 1, 2, 2]


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Arrow holds as much memory after many rows as after few."""
    held: list[int] = []
    with TableWriter(tmp_path / "blocks.parquet", BLOCKS, {}, group_rows=5_000) as writer:
        for i in range(60):
            writer.write(rows(1_000, request_id=i))
            if i in (9, 59):
                held.append(pa.total_allocated_bytes())
    assert held[1] < held[0] + 2_000_000
    whole = read_table(tmp_path / "blocks.parquet", BLOCKS).nbytes
    before = pa.total_allocated_bytes()
    for _ in read_batches(tmp_path / "blocks.parquet", BLOCKS, ["lag"], batch_rows=1_000):
        assert pa.total_allocated_bytes() - before < whole / 2


def test_an_empty_table(tmp_path: Path) -> None:
    path = tmp_path / "blocks.parquet"
    with TableWriter(path, BLOCKS, {}):
        pass
    assert list(read_batches(path, BLOCKS)) == []
    assert count_rows(path, BLOCKS) == 0


@pytest.mark.parametrize("column", ["input_mse", "output_mse_normalised", "step_fraction"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_numbers_are_refused(tmp_path: Path, column: str, value: float) -> None:
    path = tmp_path / "blocks.parquet"

    def write() -> None:
        with TableWriter(path, BLOCKS, {}) as writer:
            writer.write(rows(3))
            writer.write(rows(3, **{column: np.array([0.1, value, 0.2])}))

    with pytest.raises(RunError, match=f"{path}: column {column} would hold NaN or infinity"):
        write()
    assert list(tmp_path.iterdir()) == []
    # Another program may have written such values.
    plain = {name: [1] * 4 for name in BLOCKS.names} | {"scheduler": ["a"] * 4, "block": ["b"] * 4}
    pq.write_table(pa.table(plain | {column: [0.5, 0.5, 0.5, value]}, schema=BLOCKS.to_arrow()), path)
    with pytest.raises(UsageError, match=f"{path}: column {column} holds {value} in row 3"):
        list(read_batches(path, BLOCKS, batch_rows=2))


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"extra": 1}, RuntimeError, r"columns \['extra'\] are missing or unknown"),
        ({"lag": [1, 2]}, RuntimeError, r"columns have \[2, 3\] rows"),
        ({"input_mse": "much"}, RuntimeError, "input_mse has the wrong type"),
        ({"input_mse": None}, RuntimeError, "input_mse has the wrong type"),
        ({"input_mse": 1e300}, RunError, "input_mse holds a number too large for float"),
        ({"width": 2**40}, RuntimeError, "width has the wrong type"),
        ({"width": "wide"}, RuntimeError, "width has the wrong type"),
        ({"block": None}, RuntimeError, "block is empty|block has the wrong type"),
        ({"lag": 1.5}, RuntimeError, "lag has the wrong type"),
    ],
)
def test_rows_that_violate_the_schema_leave_no_file(
    tmp_path: Path, changes: dict, kind: type[Exception], message: str
) -> None:
    def write() -> None:
        with TableWriter(tmp_path / "b.parquet", BLOCKS, {}) as writer:
            writer.write(rows(3))
            writer.write(rows(3, **changes))

    with pytest.raises(kind, match=message):
        write()
    assert list(tmp_path.iterdir()) == []


def test_tables_of_only_scalar_columns_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match=r"columns have \[\] rows"),
        TableWriter(tmp_path / "b.parquet", BLOCKS, {}) as writer,
    ):
        writer.write({name: value if isinstance(value, str) else 1 for name, value in rows(1).items()})


def test_an_error_or_interrupt_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "b.parquet"
    with TableWriter(path, BLOCKS, {}) as writer:
        writer.write(rows(4))

    def interrupted() -> None:
        with TableWriter(path, BLOCKS, {}, group_rows=2) as writer:
            writer.write(rows(9))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [file.name for file in tmp_path.iterdir()] == ["b.parquet"]
    assert count_rows(path, BLOCKS) == 4


def test_parts_are_joined(tmp_path: Path) -> None:
    for name, facts in (("one", FACTS), ("two", FACTS), ("other", replace(FACTS, patch_size=4))):
        with TableWriter(tmp_path / name, BLOCKS, facts.to_json()) as writer:
            writer.write(rows(5, block=name))
    with TableWriter(tmp_path / "all", BLOCKS, FACTS.to_json()) as writer:
        writer.append_from(tmp_path / "one")
        writer.write(rows(2, block="new"))
        writer.append_from(tmp_path / "two")
        with pytest.raises(UsageError, match=r"other: was made under other circumstances than .*all"):
            writer.append_from(tmp_path / "other")
    assert writer.num_rows == 12
    assert read_table(tmp_path / "all", BLOCKS).column("block").to_pylist() == ["one"] * 5 + ["new"] * 2 + ["two"] * 5


@pytest.mark.parametrize("read", [lambda path: list(read_batches(path, BLOCKS)), lambda path: read_facts(path, BLOCKS)])
def test_files_of_other_kinds_are_refused(tmp_path: Path, read: Callable[[Path], object]) -> None:
    path = tmp_path / "b.parquet"
    with pytest.raises(UsageError, match="cannot read the blocks table: No such file"):
        read(path)
    write_table(path, STEPS, [])
    with pytest.raises(UsageError, match="is the steps table, but it must be the blocks table"):
        read(path)
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata(BLOCKS.to_arrow().metadata), path)
    with pytest.raises(UsageError, match="columns are a, which is not the blocks table's schema"):
        read(path)
    with TableWriter(path, BLOCKS, {}) as writer:
        writer.write(rows(1000))
    content = path.read_bytes()
    for length in (0, 10, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(UsageError, match="damaged or not parquet"):
            read(path)


def test_flipped_bit_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "b.parquet"
    with TableWriter(path, BLOCKS, {}) as writer:
        writer.write(rows(20_000, input_mse=np.random.default_rng(0).random(20_000)))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(UsageError, match="cannot read the blocks table: it is damaged"):
        list(read_batches(path, BLOCKS))


def test_tables_without_facts(tmp_path: Path) -> None:
    write_table(tmp_path / "b.parquet", BLOCKS, [])
    with pytest.raises(UsageError, match="has no readable head"):
        read_facts(tmp_path / "b.parquet", BLOCKS)


def test_facts_are_read_back_or_refused() -> None:
    content = FACTS.to_json()
    assert parse(BlockFacts, content | {"more": 1}) == FACTS
    for change in (
        {"model": 7},
        {"patch_size": "8"},
        {"patch_size": True},
        {"patch_size": 0},
        {"blocks": []},
        {"blocks": [1]},
        {"blocks": ["a", "a"]},
        {"scheduler": None},
    ):
        with pytest.raises(UsageError, match=rf"it: {next(iter(change))}(\.0)? is "):
            parse(BlockFacts, content | change, "it")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"fingerprint": "ffff"},
            "it is for other files of the model emoji-xl than .* now; run psctl profile blocks --model",
        ),
        ({"fingerprint": "ffff", "model": "emoji-3"}, "it is for the model emoji-xl, but emoji-3 is served"),
        ({"fingerprint": "", "model": "emoji-3"}, "it is for the model emoji-xl, but emoji-3 is served"),
        (
            {"scheduler": "DDIMScheduler"},
            "for scheduler EulerDiscreteScheduler, but DDIMScheduler is served; run psctl",
        ),
        ({"patch_size": 4}, "it is for patch size 8, but 4 is served; give --cache-patch-size 8, or run psctl"),
        ({"blocks": ("down0", "mid")}, "it is for blocks down0, mid, up0, but down0, mid is served; run psctl"),
    ],
)
def test_facts_that_do_not_match_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        FACTS.check_fits(replace(FACTS, **change), source="it")
    assert "\n" not in str(caught.value)


def test_same_files_under_another_name_match() -> None:
    FACTS.check_fits(FACTS, source="it")
    FACTS.check_fits(replace(FACTS, model="/models/emoji-xl"), source="it")
    FACTS.check_fits(replace(FACTS, fingerprint=""), source="it")
