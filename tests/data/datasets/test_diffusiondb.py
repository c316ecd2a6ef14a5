"""DiffusionDB in all its formats, on small sets, and messages about bad entries."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from patchedserve.data.datasets.diffusiondb_metadata import Metadata
from patchedserve.data.datasets.registry import open_dataset
from patchedserve.data.errors import MissingExtraError, RunError, UsageError

from ...support.caption_sets import (
    METADATA_SCHEMA,
    assert_shows,
    by_id,
    diffusiondb_rows,
    encoded,
    one_line,
    part_content,
    problems,
    scene_image,
    write_diffusiondb,
)


@pytest.mark.parametrize("below", ["images", "", "diffusiondb-large-part-1"])
def test_diffusiondb_parts(tmp_path: Path, below: str):
    root = write_diffusiondb(tmp_path / "db", below=below)
    dataset = open_dataset(f"diffusiondb:{root}")
    entries = by_id(dataset)
    assert len(entries) == 8
    row = diffusiondb_rows(2)[1]
    entry = entries[row["image_name"]]
    assert entry.captions == ("geodesic landscape 1, part 2, tadao ando, 4 k,",)
    assert (entry.seed, entry.width, entry.height, entry.problem) == (2001, 32, 24, None)
    assert_shows(dataset, entry, 1)
    one_part = open_dataset(f"diffusiondb:{root / below / 'part-000002'}", max_nsfw=1.0)
    assert set(by_id(one_part)) == {row["image_name"] for row in diffusiondb_rows(2)[:3]}


def test_diffusiondb_large_has_webp_in_two_folders(tmp_path: Path):
    for below, part in (("diffusiondb-large-part-1", 1), ("diffusiondb-large-part-2", 10001)):
        folder = tmp_path / below / f"part-{part:06d}"
        folder.mkdir(parents=True)
        scene_image(part % 7).save(folder / f"{part}.webp", lossless=True)
        (folder / f"part-{part:06d}.json").write_text(json.dumps({f"{part}.webp": {"p": "x", "se": 1}}))
    dataset = open_dataset(f"diffusiondb:{tmp_path}")
    entries = by_id(dataset)
    assert set(entries) == {"1.webp", "10001.webp"}
    assert_shows(dataset, entries["10001.webp"], 10001 % 7)
    # Without metadata, only the image file contains its size.
    assert entries["1.webp"].width is None


def test_nsfw_limit_uses_scores_of_the_metadata(tmp_path: Path):
    root = write_diffusiondb(tmp_path)
    kept = {limit: len(by_id(open_dataset(f"diffusiondb:{root}", max_nsfw=limit))) for limit in (0.0, 0.1, 0.15, 1, 2)}
    # Scores are 0, 0.1, 0.2 and 2 (blurred); prompts have 0.01.
    assert kept == {0.0: 0, 0.1: 4, 0.15: 4, 1: 6, 2: 8}
    dataset = open_dataset(f"diffusiondb:{root}", max_nsfw=0.1)
    assert dataset.name.endswith("(NSFW scores up to 0.1)")
    with pytest.raises(UsageError, match="largest NSFW score allowed is -1"):
        open_dataset(f"diffusiondb:{root}", max_nsfw=-1.0)
    with pytest.raises(UsageError, match="largest NSFW score allowed is nan"):
        open_dataset(f"diffusiondb:{root}", max_nsfw=float("nan"))


def test_prompts_above_the_nsfw_limit_are_excluded(tmp_path: Path):
    root = write_diffusiondb(tmp_path, parts=(1,))
    rows = diffusiondb_rows(1)
    rows[0]["prompt_nsfw"] = 0.9
    pq.write_table(pa.Table.from_pylist(rows, METADATA_SCHEMA), root / "metadata.parquet")
    found = by_id(open_dataset(f"diffusiondb:{root}", max_nsfw=0.5))
    assert set(found) == {rows[1]["image_name"], rows[2]["image_name"]}


def test_missing_nsfw_scores_are_reported_as_problems(tmp_path: Path):
    root = write_diffusiondb(tmp_path, parts=(1,))
    rows = diffusiondb_rows(1)
    rows[0]["image_nsfw"] = None
    pq.write_table(pa.Table.from_pylist(rows[:2], METADATA_SCHEMA), root / "metadata.parquet")
    dataset = open_dataset(f"diffusiondb:{root}", max_nsfw=0.5)
    assert problems(dataset) == dict.fromkeys(
        [rows[i]["image_name"] for i in (0, 2, 3)], "has no NSFW score, but a limit is given"
    )
    assert problems(open_dataset(f"diffusiondb:{root}")) == {}
    (root / "metadata.parquet").unlink()
    with pytest.raises(UsageError, match=r"NSFW scores are limited, but there is no metadata.parquet"):
        open_dataset(f"diffusiondb:{root}", max_nsfw=0.5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot read the metadata: it is damaged or not parquet"),
        (b"PAR1 no", "cannot read the metadata: it is damaged or not parquet"),
        (None, "has no column part_id, width"),
    ],
)
def test_damaged_metadata(tmp_path: Path, content: bytes | None, message: str):
    root = write_diffusiondb(tmp_path)
    if content is None:
        pq.write_table(pa.table({"image_name": ["a.png"], "prompt": ["x"]}), root / "metadata.parquet")
    else:
        (root / "metadata.parquet").write_bytes(content)
    with pytest.raises(UsageError, match=rf"metadata.parquet: .*{message}"):
        list(open_dataset(f"diffusiondb:{root}").entries())


def test_metadata_of_many_images(tmp_path: Path):
    names = [f"{i:08x}.png" for i in range(5000)]
    columns: dict[str, Any] = {
        "image_name": names,
        "part_id": pa.array([1 + i // 1000 for i in range(5000)], pa.uint16()),
        "width": pa.array(range(5000), pa.uint16()),
        "height": pa.array([7] * 5000, pa.uint16()),
        "image_nsfw": pa.array([i / 5000 for i in range(5000)], pa.float32()),
        "prompt_nsfw": pa.array([0.5] * 5000, pa.float32()),
    }
    path = tmp_path / "metadata.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=700)
    facts = Metadata(path).facts({2, 4})
    assert len(facts) == 2000
    found = facts.of([names[1999], names[3000], names[0], "other.png"])
    assert set(found) == {names[1999], names[3000]}
    assert found[names[1999]].width == 1999
    assert found[names[3000]].scores == pytest.approx((0.6, 0.5))
    assert Metadata(path).facts({99}).of(names) == {}


def test_malformed_diffusiondb_entries_are_reported_as_problems(tmp_path: Path):
    root = write_diffusiondb(tmp_path, parts=(1,))
    folder = root / "images" / "part-000001"
    rows = diffusiondb_rows(1)
    content = part_content(rows)
    names = list(content)
    content[names[0]]["p"] = "two\nlines,  and\r\nmore \n"
    content[names[1]]["p"] = "  "
    content[names[2]] = "text"
    content[names[3]]["se"] = -5
    content["sub/x.png"] = {"p": "x"}
    scene_image(5).save(folder / "extra.png")
    text = json.dumps(content)[:-1] + ', "twice.png": {"p": "a"}, "twice.png": {"p": "b"}}'
    (folder / "part-000001.json").write_text(text)
    dataset = open_dataset(f"diffusiondb:{root}")
    assert by_id(dataset)[names[0]].captions == ("two lines, and more",)
    assert problems(dataset) == {
        names[1]: "has an empty caption",
        names[2]: "is a text, but it must be an object",
        names[3]: "has the seed -5, but it must be a whole number from 0",
        "sub/x.png": "has a name with a folder in it: 'sub/x.png'",
        "extra.png": "has no prompt in part-000001.json",
        "twice.png": "occurs twice in part-000001.json",
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b'{"a.png": {"p": "x", ', "not valid JSON, perhaps half-written"),
        (b"[]", "holds a list, but names and prompts of images must be an object"),
        (None, "cannot read names and prompts of images: No such file"),
    ],
)
def test_unreadable_diffusiondb_parts_are_refused(tmp_path: Path, content: bytes | None, message: str):
    root = write_diffusiondb(tmp_path)
    path = root / "images" / "part-000002" / "part-000002.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=f"part-000002.json: {message}"):
        list(open_dataset(f"diffusiondb:{root}").entries())


def test_metadata_table_alone_provides_prompts(tmp_path: Path):
    root = write_diffusiondb(tmp_path)
    dataset = open_dataset(f"diffusiondb:{root / 'metadata.parquet'}", max_nsfw=0.15)
    assert dataset.image_kind == "none"
    entries = by_id(dataset)
    assert len(entries) == 6
    entry = entries[diffusiondb_rows(3)[1]["image_name"]]
    assert (entry.seed, entry.width, entry.location) == (3001, 32, None)
    with pytest.raises(UsageError, match="holds captions only, no images"):
        dataset.open_image("metadata.parquet#000000000")


def test_folders_without_diffusiondb_are_refused(tmp_path: Path):
    with pytest.raises(UsageError, match=r"holds no DiffusionDB: neither part-000001/part-000001.json"):
        open_dataset(f"diffusiondb:{tmp_path}")
    root = write_diffusiondb(tmp_path)
    with pytest.raises(UsageError, match="config and revision are for diffusiondb:hub"):
        open_dataset(f"diffusiondb:{root}", config="2m_first_5k")
    with pytest.raises(UsageError, match="the parts of DiffusionDB have no splits"):
        open_dataset(f"diffusiondb:{root}", split="train")


def hub_rows() -> dict[str, list[Any]]:
    """Return the contents of the hub's format of the data set: images as bytes and path, and the metadata."""
    rows = diffusiondb_rows(1)
    columns = {name: [row[name] for row in rows] for name in ("prompt", "seed", "width", "height")}
    columns |= {name: [row[name] for row in rows] for name in ("image_nsfw", "prompt_nsfw")}
    columns["image"] = [{"bytes": encoded(scene_image(i)), "path": row["image_name"]} for i, row in enumerate(rows)]
    return columns


@pytest.fixture
def hub_form(tmp_path: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "prompt": datasets.Value("string"),
            "seed": datasets.Value("uint32"),
            "width": datasets.Value("uint16"),
            "height": datasets.Value("uint16"),
            "image_nsfw": datasets.Value("float32"),
            "prompt_nsfw": datasets.Value("float32"),
            "image": datasets.Image(),
        }
    )
    return datasets.Dataset.from_dict(hub_rows(), features=features)


def check_hub_form(spec: str, **options: Any) -> None:
    dataset = open_dataset(spec, **options)
    entries = by_id(dataset)
    row = diffusiondb_rows(1)[2]
    assert set(entries) == {row["image_name"] for row in diffusiondb_rows(1)}
    entry = entries[row["image_name"]]
    assert (entry.seed, entry.width, entry.height) == (1002, 32, 24)
    assert entry.captions == ("geodesic landscape 2, part 1, tadao ando, 4 k,",)
    assert_shows(dataset, entry, 2)
    assert len(by_id(open_dataset(spec, max_nsfw=0.1, **options))) == 2


def test_diffusiondb_saved_to_disk(tmp_path: Path, hub_form: Any):
    import datasets

    hub_form.save_to_disk(str(tmp_path / "saved"))
    check_hub_form(f"diffusiondb:{tmp_path / 'saved'}")
    both = datasets.DatasetDict({"train": hub_form, "test": hub_form.select([0])})
    both.save_to_disk(str(tmp_path / "both"))
    check_hub_form(f"diffusiondb:{tmp_path / 'both'}", split="train")
    with pytest.raises(UsageError, match="holds the splits test, train; choose one"):
        open_dataset(f"diffusiondb:{tmp_path / 'both'}")
    with pytest.raises(UsageError, match="has no split 'val'; it holds test, train"):
        open_dataset(f"diffusiondb:{tmp_path / 'both'}", split="val")
    with pytest.raises(UsageError, match="the saved data set has no splits"):
        open_dataset(f"diffusiondb:{tmp_path / 'saved'}", split="train")
    (tmp_path / "saved" / "state.json").write_text("{")
    with pytest.raises(UsageError, match="cannot open the saved data set") as caught:
        open_dataset(f"diffusiondb:{tmp_path / 'saved'}")
    one_line(caught)


def test_saved_selection_keeps_its_rows(tmp_path: Path, hub_form: Any):
    hub_form.select([3, 1]).save_to_disk(str(tmp_path / "saved"))
    dataset = open_dataset(f"diffusiondb:{tmp_path / 'saved'}")
    rows = diffusiondb_rows(1)
    entries = by_id(dataset)
    assert set(entries) == {rows[1]["image_name"], rows[3]["image_name"]}
    assert_shows(dataset, entries[rows[3]["image_name"]], 3)


def test_diffusiondb_as_parquet_of_datasets(tmp_path: Path, hub_form: Any):
    (tmp_path / "2m_first_5k").mkdir()
    hub_form.to_parquet(str(tmp_path / "2m_first_5k" / "train-00000-of-00001.parquet"))
    check_hub_form(f"diffusiondb:{tmp_path}")
    check_hub_form(f"diffusiondb:{tmp_path}/2m_first_5k/train-00000-of-00001.parquet")


def test_hub_without_connection_gives_a_one_line_error():
    pytest.importorskip("datasets")
    # conftest sets HF_HUB_OFFLINE, so that no request is sent.
    with pytest.raises(RunError, match=r"cannot load the data set poloclub/diffusiondb \(2m_random_1k\)") as caught:
        open_dataset("diffusiondb:hub")
    assert "give the path of a local copy" in one_line(caught)


def test_missing_datasets_package_names_the_extra(tmp_path: Path, hub_form: Any, monkeypatch: pytest.MonkeyPatch):
    hub_form.save_to_disk(str(tmp_path / "saved"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    for spec in ("diffusiondb:hub", f"diffusiondb:{tmp_path / 'saved'}"):
        with pytest.raises(MissingExtraError, match=r"datasets is not installed.*pip install 'psctl\[eval\]'"):
            open_dataset(spec)
