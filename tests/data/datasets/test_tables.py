"""Image folders with captions and parquet files in Hugging Face's formats, and messages about bad entries."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from patchedserve.data.datasets.base import BadImageError
from patchedserve.data.datasets.registry import open_dataset
from patchedserve.data.errors import UsageError

from ...support.caption_sets import (
    assert_shows,
    by_id,
    encoded,
    location_of,
    one_line,
    problems,
    scene_image,
)


@pytest.mark.parametrize("column", ["caption", "text", "Prompt"])
@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_image_folders(tmp_path: Path, form: str, column: str):
    names = ["0.png", "sub/1.jpg", "./2.webp"]
    for number, name in enumerate(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        scene_image(number).save(tmp_path / name)
    captions = ["a, b", 'say "c"\nd', "e"]
    if form == "csv":
        lines = [f"file_name,{column}", f'{names[0]},"a, b"', f'{names[1]},"say ""c""\nd"', f"{names[2]},e"]
    else:
        lines = [json.dumps({"file_name": n, column: c}) for n, c in zip(names, captions, strict=True)]
    (tmp_path / f"metadata.{form}").write_text("\n".join(lines))
    dataset = open_dataset(f"imagefolder:{tmp_path}")
    entries = by_id(dataset)
    assert {key: entry.captions for key, entry in entries.items()} == {
        "0.png": ("a, b",),
        "sub/1.jpg": ('say "c" d',),
        "2.webp": ("e",),
    }
    assert_shows(dataset, entries["sub/1.jpg"], 1)


def test_image_folders_equal_those_of_the_datasets_package(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    (tmp_path / "train").mkdir()
    lines = ["file_name,caption"]
    for number in range(3):
        scene_image(number).save(tmp_path / "train" / f"{number}.png")
        lines.append(f"{number}.png,scene {number}")
    (tmp_path / "train" / "metadata.csv").write_text("\n".join(lines))
    theirs = datasets.load_dataset(
        "imagefolder", data_dir=str(tmp_path), split="train", cache_dir=str(tmp_path / "cache")
    )
    ours = open_dataset(f"imagefolder:{tmp_path}", split="train")
    found = {entry.captions[0]: np.asarray(ours.open_image(location_of(entry))) for entry in by_id(ours).values()}
    assert len(theirs) == len(found)
    for row in theirs:
        assert np.array_equal(np.asarray(row["image"]), found[row["caption"]])


def test_malformed_image_folder_entries_are_reported_as_problems(tmp_path: Path):
    for name in ("a.png", "b.png", "c.png", "unlisted.png", ".hidden.png", "notes.txt"):
        (tmp_path / name).write_bytes(encoded(scene_image(0)))
    records = [
        {"file_name": "a.png", "caption": ["one", "", "two\n"]},
        {"file_name": "b.png", "caption": None},
        {"file_name": "c.png", "caption": "c", "width": "wide"},
        {"file_name": "/etc/x.png", "caption": "x"},
        {"file_name": "", "caption": "x"},
    ]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, records)))
    dataset = open_dataset(f"imagefolder:{tmp_path}")
    assert by_id(dataset)["a.png"].captions == ("one", "two")
    assert problems(dataset) == {
        "b.png": "has no caption",
        "c.png": "has width 'wide', but it must be a whole number from 1",
        "metadata.jsonl line 4": "has a file name that leads out of its folder: '/etc/x.png'",
        "metadata.jsonl line 5": "has '' where a file name should be",
        "unlisted.png": "has no line in metadata.jsonl",
    }


def test_subfolders_with_their_own_metadata(tmp_path: Path):
    for split, number in (("train", 0), ("test", 1)):
        (tmp_path / split).mkdir()
        scene_image(number).save(tmp_path / split / "x.png")
        (tmp_path / split / "metadata.csv").write_text(f"file_name,text\nx.png,{split}\n")
    assert set(by_id(open_dataset(f"imagefolder:{tmp_path}"))) == {"train/x.png", "test/x.png"}
    assert set(by_id(open_dataset(f"imagefolder:{tmp_path}", split="test"))) == {"x.png"}
    with pytest.raises(UsageError, match="the folder of the split 'val' is needed"):
        open_dataset(f"imagefolder:{tmp_path}", split="val")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no metadata.csv or metadata.jsonl"),
        ({"metadata.csv": "file_name,text\n", "metadata.jsonl": ""}, "holds both metadata.csv and metadata.jsonl"),
        (
            {"metadata.csv": "name,text\na.png,x\n"},
            r"metadata.csv:2: has name, text, but one column must be called file",
        ),
        ({"metadata.csv": "file_name,words\na.png,x\n"}, r"metadata.csv:2: has the columns file_name, words, but one"),
        ({"metadata.csv": "file_name,text,text\n"}, r"metadata.csv:1: column 'text' occurs twice"),
        ({"metadata.csv": 'file_name,text\n"a" b,x\n'}, r"metadata.csv:2: malformed table"),
        ({"metadata.csv": "file_name,text\na.png,x,y\n"}, r"metadata.csv:2: has 3 cells, but the header has 2"),
        ({"metadata.jsonl": '{"file_name": "a.png", "te'}, r"metadata.jsonl:1: not valid JSON"),
        ({"metadata.jsonl": "[1]\n"}, r"metadata.jsonl:1: holds a list, but every line must be an object"),
    ],
)
def test_unreadable_image_folders_are_refused(tmp_path: Path, files: dict[str, str], message: str):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        list(open_dataset(f"imagefolder:{tmp_path}").entries())
    one_line(caught)


def parquet_columns(first: int, count: int) -> dict[str, Any]:
    numbers = range(first, first + count)
    return {
        "image_id": [f"id-{n}" for n in numbers],
        "caption": [[f"one {n}", f"two {n}"] for n in numbers],
        "image": [{"bytes": encoded(scene_image(n)), "path": None} for n in numbers],
    }


def test_parquet_files_with_row_groups(tmp_path: Path):
    (tmp_path / "data").mkdir()
    for shard in range(2):
        table = pa.table(parquet_columns(20 * shard, 20))
        pq.write_table(table, tmp_path / "data" / f"train-{shard:05d}-of-00002.parquet", row_group_size=7)
    dataset = open_dataset(f"parquet:{tmp_path}")
    entries = by_id(dataset)
    assert len(entries) == 40
    assert entries["id-23"].captions == ("one 23", "two 23")
    # Forward, backward, and the same image twice.
    for number in (0, 1, 6, 7, 19, 20, 39, 38, 2, 2, 33):
        assert_shows(dataset, entries[f"id-{number}"], number)


def test_images_are_read_forward_in_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pq.write_table(pa.table(parquet_columns(0, 40)), tmp_path / "x.parquet", row_group_size=20)
    dataset = open_dataset(f"parquet:{tmp_path}")
    locations = sorted(location_of(entry) for entry in dataset.entries())
    started: list[list[int]] = []
    original = pq.ParquetFile.iter_batches

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        started.append(kwargs["row_groups"])
        return original(self, *args, **kwargs)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counting)
    for location in locations:
        dataset.content(location)
    assert started == [[0], [1]]
    # Going back by one batch of 16 costs nothing; going back further starts the row group again.
    dataset.content(locations[20])
    dataset.content(locations[39])
    assert started == [[0], [1]]
    dataset.content(locations[0])
    assert started == [[0], [1], [0]]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_images_as_plain_bytes_and_columns_by_name(tmp_path: Path, kind: pa.DataType):
    pictures = pa.array([encoded(scene_image(0)), None, b"no image"], kind)
    pq.write_table(
        pa.table({"pixels": pictures, "alt": ["a", "b", "c"], "text": ["x", "y", "z"]}), tmp_path / "x.parquet"
    )
    dataset = open_dataset(f"parquet:{tmp_path}/x.parquet", caption_column="alt")
    entries = by_id(dataset)
    # Without an id, the number of the row is the id.
    assert [(entry.id, entry.captions) for entry in entries.values()] == [("1", ("a",)), ("2", ("b",)), ("3", ("c",))]
    assert_shows(dataset, entries["1"], 0)
    with pytest.raises(BadImageError, match=r"x.parquet.*#000000001: the image is missing"):
        dataset.open_image(location_of(entries["2"]))
    with pytest.raises(BadImageError, match=r"x.parquet.*#000000002: not an image"):
        dataset.open_image(location_of(entries["3"]))
    named = open_dataset(f"parquet:{tmp_path}", image_column="pixels", id_column="text")
    assert list(by_id(named)) == ["x", "y", "z"]


def test_images_given_only_by_path(tmp_path: Path):
    scene_image(3).save(tmp_path / "x.png")
    column = [{"bytes": None, "path": str(tmp_path / "x.png")}, {"bytes": None, "path": str(tmp_path / "y.png")}]
    image = pa.array(column, pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    pq.write_table(pa.table({"image": image, "text": ["a", "b"]}), tmp_path / "x.parquet")
    dataset = open_dataset(f"parquet:{tmp_path}")
    one, other = by_id(dataset).values()
    assert_shows(dataset, one, 3)
    with pytest.raises(BadImageError, match="the image file is missing"):
        dataset.open_image(location_of(other))


def test_parquet_with_several_splits(tmp_path: Path):
    for name, first in (("train-00000.parquet", 0), ("test-00000.parquet", 5)):
        pq.write_table(pa.table(parquet_columns(first, 2)), tmp_path / name)
    with pytest.raises(UsageError, match="holds the splits test, train; choose one"):
        open_dataset(f"parquet:{tmp_path}")
    assert set(by_id(open_dataset(f"parquet:{tmp_path}", split="test"))) == {"id-5", "id-6"}
    with pytest.raises(UsageError, match="has no split 'dev'; it holds test, train"):
        open_dataset(f"parquet:{tmp_path}", split="dev")
    with pytest.raises(UsageError, match="it is one file, and splits are for folders"):
        open_dataset(f"parquet:{next(tmp_path.rglob('*.parquet'))}", split="train")


def test_unreadable_parquet_is_refused(tmp_path: Path):
    def error(content: bytes | dict[str, Any], **options: Any) -> str:
        path = tmp_path / "x.parquet"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            pq.write_table(pa.table(content), path)
        with pytest.raises(UsageError) as caught:
            list(open_dataset(f"parquet:{tmp_path}", **options).entries())
        return one_line(caught).removeprefix(f"{path}: ")

    with pytest.raises(UsageError, match="holds no parquet files"):
        open_dataset(f"parquet:{tmp_path}")
    assert error(b"") == "the file is empty, but it must be parquet"
    assert error(b"PAR1 nothing else") == "cannot read the file: it is damaged or not parquet"
    assert error({"image": [b"x"], "words": ["a"]}).startswith("has the columns image, words, but one must be called")
    assert error({"caption": ["a"], "n": [1]}) == "has the columns caption, n, but none of them holds images"
    wrong_type = error({"caption": ["a"], "n": [1]}, image_column="n")
    assert wrong_type == "column 'n' is int64, but images must be bytes or a struct with bytes"
    assert "but the captions should be in 'alt'" in error({"caption": ["a"], "image": [b"x"]}, caption_column="alt")
    assert "but the ids should be in 'key'" in error({"caption": ["a"], "image": [b"x"]}, id_column="key")
    pq.write_table(pa.table({"caption": ["a"], "image": [b"x"]}), tmp_path / "w.parquet")
    assert "but the files before it have caption, image" in error({"caption": ["a"], "picture": [b"x"]})


def test_damaged_parquet_data_gives_a_one_line_error(tmp_path: Path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table(parquet_columns(0, 30)), path, compression="snappy", use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[4:3000] = bytes(2996)
    path.write_bytes(content)
    dataset = open_dataset(f"parquet:{path}")
    with pytest.raises(UsageError, match=r"x.parquet: cannot read the file: it is damaged") as caught:
        [dataset.content(location_of(entry)) for entry in dataset.entries()]
    one_line(caught)
