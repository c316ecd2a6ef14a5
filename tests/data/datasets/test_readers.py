"""Readers of captioned data sets: their specs, captions, caption files and the emoji world."""

import subprocess
import sys
from pathlib import Path

import pytest

from patchedserve.data.datasets.base import clean_caption, whole_number
from patchedserve.data.datasets.registry import OPENERS, open_dataset
from patchedserve.data.errors import UsageError

from ...support.caption_sets import (
    by_id,
    location_of,
    one_line,
    write_coco,
)


@pytest.mark.parametrize("spec", ["", "imagenet:/x", "COCO:/x", "/some/path", "hub"])
def test_unknown_specs_list_the_allowed_ones(spec: str):
    with pytest.raises(UsageError, match="must be one of: coco:PATH") as caught:
        open_dataset(spec)
    assert all(kind in one_line(caught) for kind in OPENERS)


@pytest.mark.parametrize("kind", [kind for kind in OPENERS if kind != "emoji"])
def test_paths_are_required_and_must_exist(kind: str, tmp_path: Path):
    with pytest.raises(UsageError, match=f"needs a path: {kind}:PATH"):
        open_dataset(f"{kind}:")
    with pytest.raises(UsageError, match=r"nothing: no such file or folder"):
        open_dataset(f"{kind}:{tmp_path}/nothing")


def test_options_of_another_data_set_are_refused(tmp_path: Path):
    with pytest.raises(
        UsageError, match="max_nsfw is not an option of the data set coco, whose options are: split, image_"
    ):
        open_dataset(f"coco:{write_coco(tmp_path)}", max_nsfw=0.5)


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_coco(tmp_path / "coco")
    assert len(by_id(open_dataset("coco:~/coco"))) == 6


def test_captions_are_joined_into_one_line():
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
def test_integers_are_parsed(value: object, number: int | None):
    assert whole_number(value) == number


@pytest.mark.parametrize("value", ["x", "1.5", 1.5, True, float("nan"), "inf", [1]])
def test_non_integers_are_refused(value: object):
    with pytest.raises(ValueError, match=r"."):
        whole_number(value)


def test_caption_files(tmp_path: Path):
    # The header of coco_10k.csv, COCO captions with image ids and seeds.
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
def test_unreadable_caption_files_are_refused(tmp_path: Path, name: str, text: str, message: str):
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        list(open_dataset(f"captions:{tmp_path / name}").entries())
    one_line(caught)


def test_emoji_data_set():
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


@pytest.mark.slow
def test_torch_is_not_imported():
    code = (
        "import sys; from patchedserve.data.datasets import folders, loading, registry, sampling; "
        "sys.exit(bool({'torch', 'pandas', 'datasets'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
