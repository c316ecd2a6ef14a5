"""Sampling: the same pairs everywhere, each as likely as the others."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from patchedserve.data.datasets.base import CaptionDataset
from patchedserve.data.datasets.registry import open_dataset
from patchedserve.data.datasets.sampling import sample_pairs
from patchedserve.data.errors import UsageError

from ...support.caption_sets import coco_content, encoded, scene_image, write_coco
from ...support.sampled_sets import captions_file, twenty_of_coco


@pytest.fixture
def coco(tmp_path: Path) -> CaptionDataset:
    return twenty_of_coco(tmp_path / "coco")


def test_sample_is_the_same_on_every_machine(tmp_path: Path):
    sample = sample_pairs(captions_file(tmp_path / "c.jsonl"), 6, seed=1)
    # From `printf "1|$id" | sha256sum`, sorted. A change here would change every published figure.
    assert sample.ids == ("11", "14", "4", "15", "12", "2")
    assert sample.captions[0] == "caption 11"


def test_caption_choice_is_the_same_on_every_machine(coco: CaptionDataset):
    sample = sample_pairs(coco, 5, seed=3)
    # From `printf "3|$id|Caption $k of image $id." | sha256sum`.
    assert [(item.id, item.caption[8:9]) for item in sample.items] == [
        ("111", "2"),
        ("103", "2"),
        ("114", "0"),
        ("104", "0"),
        ("119", "1"),
    ]


@pytest.mark.slow
def test_sample_does_not_depend_on_the_hash_seed(coco: CaptionDataset, tmp_path: Path):
    code = (
        "import sys; from patchedserve.data.datasets.registry import open_dataset; "
        "from patchedserve.data.datasets.sampling import sample_pairs; "
        "print(sample_pairs(open_dataset('coco:' + sys.argv[1]), 8, 5).items)"
    )
    for hash_seed in ("1", "77"):
        run = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "coco")],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.strip() == str(sample_pairs(coco, 8, 5).items)


def test_seeds_differ_and_small_samples_are_prefixes_of_large_ones(coco: CaptionDataset):
    first, other = sample_pairs(coco, 12, 0), sample_pairs(coco, 12, 1)
    assert first.ids != other.ids
    assert len(set(first.ids)) == 12
    for n in (1, 2, 7):
        assert sample_pairs(coco, n, 0).items == first.items[:n]
    everything = sample_pairs(coco, None, 0)
    assert everything.items[:12] == first.items
    assert sorted(everything.ids) == [str(number) for number in range(100, 120)]
    # The chosen caption depends on the seed, too.
    again = {item.id: item.caption for item in sample_pairs(coco, None, 1).items}
    assert any(again[item.id] != item.caption for item in everything.items)


def test_images_and_captions_are_sampled_uniformly(tmp_path: Path):
    dataset = captions_file(tmp_path / "c.jsonl", 20)
    counts = dict.fromkeys(map(str, range(20)), 0)
    for seed in range(200):
        for image_id in sample_pairs(dataset, 5, seed).ids:
            counts[image_id] += 1
    # 200 draws of a quarter: the expected count is 50, with a standard deviation of 6.
    assert min(counts.values()) > 25
    assert max(counts.values()) < 75


def shuffled_coco(root: Path) -> None:
    path = root / "annotations" / "captions_val2017.json"
    content = json.loads(path.read_text())
    random.Random(3).shuffle(content["images"])
    random.Random(4).shuffle(content["annotations"])
    path.write_text(json.dumps(dict(reversed(content.items()))))


def test_sample_does_not_depend_on_entry_order(tmp_path: Path):
    root = write_coco(tmp_path, coco_content(20))
    before = sample_pairs(open_dataset(f"coco:{root}"), 10, 2)
    shuffled_coco(root)
    assert sample_pairs(open_dataset(f"coco:{root}"), 10, 2).items == before.items


def test_sample_does_not_depend_on_row_and_file_order(tmp_path: Path):
    rows = [{"id": f"i{n}", "text": f"t{n}", "image": encoded(scene_image(n))} for n in range(12)]
    drawn = []
    for number, order in enumerate((range(12), reversed(range(12)), (5, 1, 0, 11, 2, 3, 4, 10, 9, 8, 7, 6))):
        folder = tmp_path / str(number)
        folder.mkdir()
        ordered = [rows[i] for i in order]
        for part in range(2):
            pq.write_table(pa.Table.from_pylist(ordered[6 * part : 6 * part + 6]), folder / f"{part}.parquet")
        sample = sample_pairs(open_dataset(f"parquet:{folder}"), 7, 0)
        drawn.append([(item.id, item.caption, sample.content(item.id)) for item in sample.items])
    assert drawn[0] == drawn[1] == drawn[2]


@pytest.mark.parametrize("n", [21, 5000])
def test_sample_larger_than_the_data_set_is_refused(coco: CaptionDataset, n: int):
    message = f"{n} text-image pairs were asked for, but there are only 20 usable ones$"
    with pytest.raises(UsageError, match=message) as caught:
        sample_pairs(coco, n)
    assert "\n" not in str(caught.value)


def test_empty_sets_and_invalid_counts_are_refused(coco: CaptionDataset, tmp_path: Path):
    (tmp_path / "c.csv").write_text("caption\n")
    with pytest.raises(UsageError, match=r"c.csv: at least 1 text-image pairs were asked for, but there are only 0 us"):
        sample_pairs(open_dataset(f"captions:{tmp_path / 'c.csv'}"), None)
    for bad in ({"n": 0}, {"n": -1}, {"n": 1, "workers": 0}):
        with pytest.raises(UsageError, match="must be at least 1"):
            sample_pairs(coco, **bad)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="but it must be 0 or more"):
        sample_pairs(coco, 1, max_bad=-1)


def test_bundled_emoji_data_set_is_sampled_offline():
    sample = sample_pairs(open_dataset("emoji", resolution="64", num_images=50), 5, 0)
    assert sample.has_images
    for item in sample.items:
        image = sample.open_image(item.id)
        assert image.size == (item.width, item.height) == (64, 64)
