"""Readers of captioned data sets, on small sets in the real formats, and what they say of bad entries."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from patchedserve.data.datasets.base import BadImageError, CaptionDataset, CaptionEntry, clean_caption, whole_number
from patchedserve.data.datasets.diffusiondb_metadata import Metadata
from patchedserve.data.datasets.registry import OPENERS, open_dataset
from patchedserve.data.errors import MissingExtraError, RunError, UsageError

from .caption_sets import (
    METADATA_SCHEMA,
    coco_content,
    diffusiondb_rows,
    encoded,
    part_content,
    scene_image,
    write_coco,
    write_diffusiondb,
)


def by_id(dataset: CaptionDataset) -> dict[str, CaptionEntry]:
    entries = list(dataset.entries())
    found = {entry.id: entry for entry in entries}
    assert len(found) == len(entries)
    return found


def problems(dataset: CaptionDataset) -> dict[str, str]:
    return {entry.id: entry.problem for entry in dataset.entries() if entry.problem is not None}


def location_of(entry: CaptionEntry) -> str:
    assert entry.location is not None
    return entry.location


def assert_shows(dataset: CaptionDataset, entry: CaptionEntry, scene: int) -> None:
    """The image of the entry is the scene, exactly or as a JPEG."""
    location = location_of(entry)
    image = dataset.open_image(location)
    assert image.mode == "RGB"
    assert image.size == (32, 24)
    difference = np.abs(np.asarray(image).astype(int) - np.asarray(scene_image(scene)).astype(int)).mean()
    assert difference < (8 if dataset.content(location).startswith(b"\xff\xd8") else 0.001)


def one_line(error: pytest.ExceptionInfo[Any]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


# --- spec


@pytest.mark.parametrize("spec", ["", "imagenet:/x", "COCO:/x", "/some/path", "hub"])
def test_unknown_specs_list_what_is_allowed(spec: str):
    with pytest.raises(UsageError, match="must be one of: coco:PATH") as caught:
        open_dataset(spec)
    assert all(kind in one_line(caught) for kind in OPENERS)


@pytest.mark.parametrize("kind", [kind for kind in OPENERS if kind != "emoji"])
def test_paths_are_needed_and_must_exist(kind: str, tmp_path: Path):
    with pytest.raises(UsageError, match=f"needs a path: {kind}:PATH"):
        open_dataset(f"{kind}:")
    with pytest.raises(UsageError, match=r"nothing: no such file or folder"):
        open_dataset(f"{kind}:{tmp_path}/nothing")


def test_options_of_another_kind_are_refused(tmp_path: Path):
    with pytest.raises(
        UsageError, match="max_nsfw is no option of the data set coco, whose options are: split, image_"
    ):
        open_dataset(f"coco:{write_coco(tmp_path)}", max_nsfw=0.5)


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_coco(tmp_path / "coco")
    assert len(by_id(open_dataset("coco:~/coco"))) == 6


# --- captions


def test_captions_are_put_on_one_line():
    assert clean_caption("  a taco\r\n\n on\ta\u00a0green  background \u2028") == "a taco on a green background"
    assert clean_caption("\n \t") == ""
    assert clean_caption("Ünïcode — “quotes” 🌮") == "Ünïcode — “quotes” 🌮"


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (None, None),
        ("", None),
        (" ", None),
        (7, 7),
        ("7", 7),
        (512.0, 512),
        ("512.0", 512),
        (2**63 - 1, 2**63 - 1),
        (str(2**63 - 1), 2**63 - 1),
    ],
)
def test_whole_numbers(value: object, number: int | None):
    assert whole_number(value) == number


@pytest.mark.parametrize("value", ["x", "1.5", 1.5, True, float("nan"), "inf", [1]])
def test_no_whole_numbers(value: object):
    with pytest.raises(ValueError, match=r"."):
        whole_number(value)


# --- COCO


@pytest.mark.parametrize("split", ["val2014", "train2014", "val2017"])
def test_coco_from_its_folder_and_from_its_file(tmp_path: Path, split: str):
    root = write_coco(tmp_path, split=split)
    for spec in (f"coco:{root}", f"coco:{root}/annotations", f"coco:{root}/annotations/captions_{split}.json"):
        dataset = open_dataset(spec)
        entries = by_id(dataset)
        assert list(entries) == [str(number) for number in range(100, 106)]
        assert entries["101"].captions == tuple(f"Caption {k} of image 101." for k in range(3))
        assert (entries["101"].width, entries["101"].height) == (32, 24)
        assert_shows(dataset, entries["103"], 3)


def test_coco_images_elsewhere(tmp_path: Path):
    root = write_coco(tmp_path / "coco")
    moved = (root / "val2017").rename(tmp_path / "pictures")
    with pytest.raises(UsageError, match=r"its images are not in .*val2017 and .*images/val2017; give their folder"):
        open_dataset(f"coco:{root}")
    with pytest.raises(UsageError, match=r"no such file or folder, but the folder of the images"):
        open_dataset(f"coco:{root}", image_dir=tmp_path / "none")
    with pytest.raises(UsageError, match=r"is a file, but it must be the folder of the images"):
        open_dataset(f"coco:{root}", image_dir=root / "annotations" / "captions_val2017.json")
    dataset = open_dataset(f"coco:{root}", image_dir=moved)
    assert_shows(dataset, by_id(dataset)["100"], 0)
    (root / "images").mkdir()
    moved.rename(root / "images" / "val2017")
    dataset = open_dataset(f"coco:{root}")
    assert_shows(dataset, by_id(dataset)["100"], 0)


def test_coco_with_several_splits(tmp_path: Path):
    write_coco(tmp_path, split="train2017")
    write_coco(tmp_path, coco_content(2), split="val2017")
    with pytest.raises(UsageError, match=r"holds the splits train2017, val2017; choose one: \?split=NAME after"):
        open_dataset(f"coco:{tmp_path}")
    with pytest.raises(UsageError, match=r"has no split 'val2014'; it holds train2017, val2017"):
        open_dataset(f"coco:{tmp_path}", split="val2014")
    assert len(by_id(open_dataset(f"coco:{tmp_path}", split="val2017"))) == 2
    with pytest.raises(UsageError, match="one annotation file is one split"):
        open_dataset(f"coco:{tmp_path}/annotations/captions_val2017.json", split="val2017")
    with pytest.raises(UsageError, match=r"holds no annotations/captions_\*.json"):
        open_dataset(f"coco:{tmp_path / 'annotations' / '..' / 'val2017'}")


def test_coco_oddities_become_problems(tmp_path: Path):
    content = coco_content(9, captions_each=2)
    images, annotations = content["images"], content["annotations"]
    images[0]["file_name"] = "../outside.jpg"
    images[1]["file_name"] = None
    del images[2]["id"]
    for annotation in annotations:
        if annotation["image_id"] == 103:
            annotation["caption"] = " \n"
        if annotation["image_id"] == 104:
            annotation["caption"] = ["a", "list"]
        if annotation["image_id"] == 105:
            annotation["caption"] = "half a pair: \ud83c"
        if annotation["image_id"] == 106:
            annotation["caption"] = f"\n  two\r\nlines {annotation['id']} "
    content["annotations"] = [
        *(record for record in annotations if record["image_id"] != 107),
        {"id": 1, "caption": "whose?"},
        {"id": 2, "image_id": 108, "caption": ""},
        {"id": 3, "image_id": 999, "caption": "no such image"},
        "text",
    ]
    (tmp_path / "annotations").mkdir()
    (tmp_path / "val2017").mkdir()
    (tmp_path / "annotations" / "captions_val2017.json").write_text(json.dumps(content))
    dataset = open_dataset(f"coco:{tmp_path}")
    found = problems(dataset)
    expected = {
        "100": "leads out of its folder: '../outside.jpg'",
        "101": "None where a file name should be",
        "images[2]": "has no id",
        "102": "the annotations list no such image",
        "103": "empty caption",
        "104": r"has \['a', 'list'\] where a caption should be",
        "105": "not valid Unicode",
        "107": "has no caption",
        "999": "the annotations list no such image",
        "annotations[16]": "has no image_id",
        "annotations[19]": "has no image_id: 'text'",
    }
    assert found.keys() == expected.keys()
    for key, message in expected.items():
        assert re.search(message, found[key]), (key, found[key])
    entries = by_id(dataset)
    assert all(caption.startswith("two lines 20") for caption in entries["106"].captions)
    # An empty caption beside good ones is passed over.
    assert len(entries["108"].captions) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty, but it must hold COCO captions"),
        (b" \n", "the file is empty"),
        (b'{"images": [{"id": 1, "file_n', "not valid JSON, perhaps half-written"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "holds a list, but COCO captions must be an object"),
        (b"7", "holds a number, but"),
        (b"null", "holds null, but"),
        (b"\xff\xfe{}", "not UTF-8 text"),
        (b"{}", "has no 'images', so it holds no COCO captions"),
        (b'{"images": []}', "has no 'annotations'.*captions_"),
        (b'{"images": {}, "annotations": []}', "'images' is an object, but it must be a list"),
        (b'{"images": [], "annotations": "x"}', "'annotations' is a text, but it must be a list"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_coco_files_that_cannot_be_read(tmp_path: Path, content: bytes, message: str):
    (tmp_path / "captions_val2017.json").write_bytes(content)
    (tmp_path / "val2017").mkdir()
    dataset = open_dataset(f"coco:{tmp_path}")
    with pytest.raises(UsageError, match=rf"captions_val2017.json: .*{message}") as caught:
        list(dataset.entries())
    one_line(caught)


# --- DiffusionDB


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
    # Without metadata nothing but the image tells its size.
    assert entries["1.webp"].width is None


def test_nsfw_scores_are_limited_from_the_metadata(tmp_path: Path):
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


def test_prompts_with_high_scores_are_left_out_too(tmp_path: Path):
    root = write_diffusiondb(tmp_path, parts=(1,))
    rows = diffusiondb_rows(1)
    rows[0]["prompt_nsfw"] = 0.9
    pq.write_table(pa.Table.from_pylist(rows, METADATA_SCHEMA), root / "metadata.parquet")
    found = by_id(open_dataset(f"diffusiondb:{root}", max_nsfw=0.5))
    assert set(found) == {rows[1]["image_name"], rows[2]["image_name"]}


def test_scores_that_are_missing_are_a_problem(tmp_path: Path):
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
    assert len(facts.keys) == 2000
    found = facts.of([names[1999], names[3000], names[0], "other.png"])
    assert set(found) == {names[1999], names[3000]}
    assert found[names[1999]].width == 1999
    assert found[names[3000]].image_nsfw == pytest.approx(0.6)
    assert Metadata(path).facts({99}).of(names) == {}


def test_diffusiondb_oddities_become_problems(tmp_path: Path):
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
        "twice.png": "stands twice in part-000001.json",
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
def test_diffusiondb_parts_that_cannot_be_read(tmp_path: Path, content: bytes | None, message: str):
    root = write_diffusiondb(tmp_path)
    path = root / "images" / "part-000002" / "part-000002.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=f"part-000002.json: {message}"):
        list(open_dataset(f"diffusiondb:{root}").entries())


def test_the_metadata_table_alone_gives_prompts(tmp_path: Path):
    root = write_diffusiondb(tmp_path)
    dataset = open_dataset(f"diffusiondb:{root / 'metadata.parquet'}", max_nsfw=0.15)
    assert dataset.image_kind == "none"
    entries = by_id(dataset)
    assert len(entries) == 6
    entry = entries[diffusiondb_rows(3)[1]["image_name"]]
    assert (entry.seed, entry.width, entry.location) == (3001, 32, None)
    with pytest.raises(UsageError, match="holds captions only, no images"):
        dataset.open_image("metadata.parquet#000000000")


def test_folders_that_are_no_diffusiondb(tmp_path: Path):
    with pytest.raises(UsageError, match=r"holds no DiffusionDB: neither part-000001/part-000001.json"):
        open_dataset(f"diffusiondb:{tmp_path}")
    root = write_diffusiondb(tmp_path)
    with pytest.raises(UsageError, match="config and revision are for diffusiondb:hub"):
        open_dataset(f"diffusiondb:{root}", config="2m_first_5k")
    with pytest.raises(UsageError, match="the parts of DiffusionDB have no splits"):
        open_dataset(f"diffusiondb:{root}", split="train")


def hub_rows() -> dict[str, list[Any]]:
    """Return what the hub's form of the data set holds: images as bytes and path, and the metadata."""
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


def test_a_selection_that_was_saved_keeps_its_rows(tmp_path: Path, hub_form: Any):
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


def test_the_hub_without_a_connection_is_one_clear_line():
    pytest.importorskip("datasets")
    # conftest sets HF_HUB_OFFLINE, so this asks nobody.
    with pytest.raises(RunError, match=r"cannot load the data set poloclub/diffusiondb \(2m_random_1k\)") as caught:
        open_dataset("diffusiondb:hub")
    assert "give the path of a local copy" in one_line(caught)


def test_without_datasets_the_extra_is_named(tmp_path: Path, hub_form: Any, monkeypatch: pytest.MonkeyPatch):
    hub_form.save_to_disk(str(tmp_path / "saved"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    for spec in ("diffusiondb:hub", f"diffusiondb:{tmp_path / 'saved'}"):
        with pytest.raises(MissingExtraError, match=r"datasets is not installed.*pip install 'psctl\[eval\]'"):
            open_dataset(spec)


# --- image folders


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


def test_the_datasets_package_reads_the_same(tmp_path: Path):
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


def test_image_folder_oddities_become_problems(tmp_path: Path):
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


def test_folders_with_metadata_of_their_own(tmp_path: Path):
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
        ({"metadata.csv": "file_name,text,text\n"}, r"metadata.csv:1: column 'text' stands twice"),
        ({"metadata.csv": 'file_name,text\n"a" b,x\n'}, r"metadata.csv:2: malformed table"),
        ({"metadata.csv": "file_name,text\na.png,x,y\n"}, r"metadata.csv:2: has 3 cells, but the header has 2"),
        ({"metadata.jsonl": '{"file_name": "a.png", "te'}, r"metadata.jsonl:1: not valid JSON"),
        ({"metadata.jsonl": "[1]\n"}, r"metadata.jsonl:1: holds a list, but every line must be an object"),
    ],
)
def test_image_folders_that_cannot_be_read(tmp_path: Path, files: dict[str, str], message: str):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        list(open_dataset(f"imagefolder:{tmp_path}").entries())
    one_line(caught)


# --- parquet


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
    # Forward, backward, and to the same one again.
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
    # Back by one batch of 16 costs nothing, further back the row group begins again.
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
    # Without an id the number of the row stands for it.
    assert [(entry.id, entry.captions) for entry in entries.values()] == [("1", ("a",)), ("2", ("b",)), ("3", ("c",))]
    assert_shows(dataset, entries["1"], 0)
    with pytest.raises(BadImageError, match=r"x.parquet.*#000000001: the image is missing"):
        dataset.open_image(location_of(entries["2"]))
    with pytest.raises(BadImageError, match=r"x.parquet.*#000000002: not an image"):
        dataset.open_image(location_of(entries["3"]))
    named = open_dataset(f"parquet:{tmp_path}", image_column="pixels", id_column="text")
    assert list(by_id(named)) == ["x", "y", "z"]


def test_images_given_by_path_alone(tmp_path: Path):
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


def test_parquet_that_cannot_be_read(tmp_path: Path):
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


def test_damage_inside_a_parquet_file_is_one_line(tmp_path: Path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table(parquet_columns(0, 30)), path, compression="snappy", use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[4:3000] = bytes(2996)
    path.write_bytes(content)
    dataset = open_dataset(f"parquet:{path}")
    with pytest.raises(UsageError, match=r"x.parquet: the file is damaged") as caught:
        [dataset.content(location_of(entry)) for entry in dataset.entries()]
    one_line(caught)


# --- caption files and the emoji world


def test_caption_files(tmp_path: Path):
    # The header of the COCO captions of FACTS.md.
    csv = 'case_number,prompt,evaluation_seed,coco_id\n0,A taco,2219,391895\n1,"two\nlines",7,60623\n'
    for name, text in [
        ("c.csv", csv),
        ("c.tsv", csv.replace(",", "\t")),
        (
            "c.jsonl",
            '{"Prompt": "A taco", "seed": 2219, "id": 391895}\n{"caption": "two\\nlines", "seed": 7, "id": "60623"}',
        ),
    ]:
        (tmp_path / name).write_text(text)
        dataset = open_dataset(f"captions:{tmp_path / name}")
        assert dataset.image_kind == "none"
        assert [(entry.id, entry.captions, entry.seed) for entry in dataset.entries()] == [
            ("391895", ("A taco",), 2219),
            ("60623", ("two lines",), 7),
        ]


def test_caption_files_with_sizes_and_without_ids(tmp_path: Path):
    path = tmp_path / "c.csv"
    path.write_text("caption,width,height,seed\na,512,256.0,\nb,,,9\n,1,1,1\nc,0,8,1\nd\n")
    entries = list(open_dataset(f"captions:{path}").entries())
    assert [(e.id, e.width, e.height, e.seed, e.problem) for e in entries] == [
        ("1", 512, 256, None, None),
        ("2", None, None, 9, None),
        ("3", 1, 1, 1, "has an empty caption"),
        ("4", None, 8, 1, "has width '0', but it must be a whole number from 1"),
        ("5", None, None, None, None),
    ]
    named = open_dataset(f"captions:{path}", id_column="Caption", caption_column="WIDTH")
    assert next(iter(named.entries())).captions == ("512",)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.txt", "a", r"must come from a file that ends in .csv, .tsv, .jsonl"),
        ("c.csv", "id,words\n1,a\n", r"c.csv:2: has the columns id, words, but one must be called prompt"),
        ("c.jsonl", "7\n", r"c.jsonl:1: holds a number"),
        ("c.jsonl", '{"caption": "a"', r"c.jsonl:1: not valid JSON"),
    ],
)
def test_caption_files_that_cannot_be_read(tmp_path: Path, name: str, text: str, message: str):
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        list(open_dataset(f"captions:{tmp_path / name}").entries())
    one_line(caught)


def test_the_emoji_world():
    dataset = open_dataset("emoji", resolution="64x32", num_images=5)
    entries = by_id(dataset)
    assert list(entries)[:2] == ["emoji-heldout-0-64x32-000000", "emoji-heldout-0-64x32-000001"]
    for entry in entries.values():
        image = dataset.open_image(location_of(entry))
        assert image.size == (entry.width, entry.height) == (64, 32)
        assert dataset.content(location_of(entry)) == image.tobytes()
        assert entry.captions[0]
    more = by_id(open_dataset("emoji", resolution="64x32", num_images=7))
    assert all(more[key] == entry for key, entry in entries.items())
    with pytest.raises(UsageError, match="takes no path"):
        open_dataset("emoji:x")
    with pytest.raises(UsageError, match="num_images is 0"):
        open_dataset("emoji", num_images=0)
    with pytest.raises(UsageError, match="resolution is 'big'"):
        open_dataset("emoji", resolution="big")


def test_no_torch_is_imported():
    code = (
        "import sys; from patchedserve.data.datasets import folders, loading, registry, sampling; "
        "sys.exit(bool({'torch', 'pandas', 'datasets'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
