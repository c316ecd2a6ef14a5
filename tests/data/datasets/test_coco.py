"""COCO captions, on small sets in the real format, and messages about bad entries."""

import json
import re
from pathlib import Path

import pytest

from patchedserve.data.datasets.registry import open_dataset
from patchedserve.data.errors import UsageError

from ...support.caption_sets import (
    assert_shows,
    by_id,
    coco_content,
    one_line,
    problems,
    write_coco,
)


@pytest.mark.parametrize("split", ["val2014", "train2014", "val2017"])
def test_coco_from_folder_and_from_file(tmp_path: Path, split: str):
    root = write_coco(tmp_path, split=split)
    for spec in (f"coco:{root}", f"coco:{root}/annotations", f"coco:{root}/annotations/captions_{split}.json"):
        dataset = open_dataset(spec)
        entries = by_id(dataset)
        assert list(entries) == [str(number) for number in range(100, 106)]
        assert entries["101"].captions == tuple(f"Caption {k} of image 101." for k in range(3))
        assert (entries["101"].width, entries["101"].height) == (32, 24)
        assert_shows(dataset, entries["103"], 3)


def test_coco_images_in_another_folder(tmp_path: Path):
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


def test_malformed_coco_entries_are_reported_as_problems(tmp_path: Path):
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
        "105": "not text",
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
    # An empty caption among good ones is skipped.
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
def test_unreadable_coco_files_are_refused(tmp_path: Path, content: bytes, message: str):
    (tmp_path / "captions_val2017.json").write_bytes(content)
    (tmp_path / "val2017").mkdir()
    dataset = open_dataset(f"coco:{tmp_path}")
    with pytest.raises(UsageError, match=rf"captions_val2017.json: .*{message}") as caught:
        list(dataset.entries())
    one_line(caught)
