"""The cache of samples: samples are found again, and drawn again if the cache is damaged."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from patchedserve.data.datasets.base import CaptionDataset
from patchedserve.data.datasets.registry import open_dataset
from patchedserve.data.datasets.sampling import sample_pairs
from patchedserve.data.errors import UsageError

from ...support.sampled_sets import coco_path, twenty_of_coco


@pytest.fixture
def coco(tmp_path: Path) -> CaptionDataset:
    return twenty_of_coco(tmp_path / "coco")


def cached_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_sample_is_cached_and_found_again(coco: CaptionDataset, tmp_path: Path):
    cache = tmp_path / "cache"
    drawn = sample_pairs(coco, 8, 0, cache_dir=cache)
    path = cached_file(cache)
    assert path.stat().st_size < 5000
    # A cached sample is not drawn again: it needs none of the deleted images.
    for image_id in drawn.ids:
        coco_path(coco, image_id).unlink()
    again = sample_pairs(coco, 8, 0, cache_dir=cache)
    assert again == drawn
    with pytest.raises(UsageError, match="the image file is missing"):
        sample_pairs(coco, 8, 0)


def test_cache_key_depends_on_all_inputs_of_the_sample(coco: CaptionDataset, tmp_path: Path):
    cache = tmp_path / "cache"
    sample_pairs(coco, 8, 0, cache_dir=cache)
    sample_pairs(coco, 7, 0, cache_dir=cache)
    sample_pairs(coco, 8, 1, cache_dir=cache)
    assert len(list(cache.iterdir())) == 3
    path = tmp_path / "coco" / "annotations" / "captions_val2017.json"
    path.write_text(path.read_text().replace("Caption 0", "Legend 0"))
    os.utime(path, (0, 0))
    sample = sample_pairs(coco, 8, 0, cache_dir=cache)
    assert any(caption.startswith("Legend") for caption in sample.captions)
    assert len(list(cache.iterdir())) == 4


def test_samples_of_generated_scenes_are_bound_to_a_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scenes = open_dataset("emoji", resolution="64", num_images=6)
    for _ in range(2):
        sample_pairs(scenes, 3, 0, cache_dir=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    # Another version of psctl may draw other captions.
    monkeypatch.setattr("patchedserve.data.datasets.emoji.__version__", "9.9")
    sample_pairs(scenes, 3, 0, cache_dir=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace("Caption 1", "Caption 9"),
        lambda text: text.replace('"width": 32', '"width": "32"'),
        lambda text: json.dumps({**json.loads(text), "items": []}),
        lambda text: json.dumps({**json.loads(text), "items": 7}),
    ],
)
def test_damaged_cache_is_rebuilt(coco: CaptionDataset, tmp_path: Path, damage: Callable[[str], str]):
    cache = tmp_path / "cache"
    drawn = sample_pairs(coco, 8, 0, cache_dir=cache)
    path = cached_file(cache)
    whole = path.read_text()
    assert damage(whole) != whole
    path.write_text(damage(whole))
    assert sample_pairs(coco, 8, 0, cache_dir=cache) == drawn
    assert path.read_text() == whole


def test_sample_with_bad_entries_is_not_cached(coco: CaptionDataset, tmp_path: Path):
    cache = tmp_path / "cache"
    whole = sample_pairs(coco, 8, 0)
    path = coco_path(coco, whole.ids[0])
    content = path.read_bytes()
    path.unlink()
    assert len(sample_pairs(coco, 8, 0, max_bad=1, cache_dir=cache).bad) == 1
    assert not cache.exists()
    path.write_bytes(content)
    assert sample_pairs(coco, 8, 0, max_bad=1, cache_dir=cache).items == whole.items


def test_unwritable_cache_is_an_error(coco: CaptionDataset, tmp_path: Path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(OSError, match="cache"):
        sample_pairs(coco, 2, 0, cache_dir=tmp_path / "cache")
    assert (tmp_path / "cache").read_text() == "a file"
