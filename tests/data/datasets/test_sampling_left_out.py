"""Sampling skips bad and unwanted entries, which are named, counted and replaced."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from patchedserve.data.datasets.base import BadEntries, CaptionDataset
from patchedserve.data.datasets.registry import open_dataset
from patchedserve.data.datasets.sampling import sample_pairs
from patchedserve.data.errors import UsageError

from ...support.caption_sets import coco_content, diffusiondb_rows, write_coco, write_diffusiondb
from ...support.sampled_sets import coco_path, twenty_of_coco


@pytest.fixture
def coco(tmp_path: Path) -> CaptionDataset:
    return twenty_of_coco(tmp_path / "coco")


Damage = Callable[[Path], object]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-300])


DAMAGES: dict[str, tuple[Damage, str]] = {
    "missing": (Path.unlink, "the image file is missing"),
    "empty": (lambda path: path.write_bytes(b""), "the image file is empty"),
    "truncated": (truncate, "damaged image"),
    "text": (lambda path: path.write_text("404"), "not an image"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_bad_images_are_reported_and_replaced(coco: CaptionDataset, damage: str):
    whole = sample_pairs(coco, 12, 0)
    spoil, message = DAMAGES[damage]
    for image_id in (whole.ids[2], whole.ids[5]):
        spoil(coco_path(coco, image_id))
    with pytest.raises(
        UsageError, match=rf"1 bad entry so far, but at most 0 allowed.*first: {whole.ids[2]}: "
    ) as caught:
        sample_pairs(coco, 10, 0)
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=rf"2 bad entries so far, but at most 1 allowed.*first: {whole.ids[2]}: "):
        sample_pairs(coco, 10, 0, max_bad=1)
    sample = sample_pairs(coco, 10, 0, max_bad=2)
    assert sample.ids == tuple(image_id for i, image_id in enumerate(whole.ids) if i not in (2, 5))
    assert len(sample.bad) == 2
    assert sample.bad[0].startswith(f"{whole.ids[2]}: ")
    assert message in sample.bad[0]
    # The bad entries are not among the first two.
    assert sample_pairs(coco, 2, 0).items == whole.items[:2]


def test_problems_of_entries_are_counted_like_bad_images(tmp_path: Path):
    content = coco_content(10)
    root = write_coco(tmp_path, content)
    dataset = open_dataset(f"coco:{root}")
    ids = sample_pairs(dataset, 10, 0).ids
    no_caption, empty, twice, no_image = ids[1], ids[3], ids[4], ids[6]
    for annotation in content["annotations"]:
        if str(annotation["image_id"]) == empty:
            annotation["caption"] = "\n"
    content["annotations"] = [a for a in content["annotations"] if str(a["image_id"]) != no_caption]
    content["images"].append(next(image for image in content["images"] if str(image["id"]) == twice))
    content["images"] = [image for image in content["images"] if str(image["id"]) != no_image]
    (root / "annotations" / "captions_val2017.json").write_text(json.dumps(content))
    sample = sample_pairs(dataset, 6, 0, max_bad=4)
    assert sample.ids == tuple(image_id for image_id in ids if image_id not in (no_caption, empty, twice, no_image))
    assert sample.bad == (
        f"{no_caption}: has no caption",
        f"{empty}: has an empty caption",
        f"{twice}: is the id of more than one entry of the data set, so it is ambiguous",
        f"{no_image}: has captions, but the annotations list no such image",
    )
    with pytest.raises(UsageError, match=r"4 bad entries so far, but at most 3 allowed \(--max-bad\); the first"):
        sample_pairs(dataset, 6, 0, max_bad=3)
    with pytest.raises(UsageError, match=r"7 text-image pairs were .* only 6 usable ones \(4 bad entries skipped\)"):
        sample_pairs(dataset, 7, 0, max_bad=4)


@pytest.mark.parametrize("copies", [2, 3, 40])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_duplicate_ids_are_found_across_page_boundaries(tmp_path: Path, copies: int, n: int):
    lines = [{"id": i, "caption": f"c{i}"} for i in range(8)]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, lines)))
    dataset = open_dataset(f"captions:{tmp_path / 'c.jsonl'}")
    ids = sample_pairs(dataset, None, 0).ids
    for place in range(3):
        again = [{"id": ids[place], "caption": f"again {k}"} for k in range(copies - 1)]
        (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, [*again, *lines])))
        if place >= n:
            assert sample_pairs(dataset, n, 0).ids == ids[:n]
            continue
        with pytest.raises(UsageError, match=f"first: {ids[place]}: is the id of more than one entry"):
            sample_pairs(dataset, n, 0)
        kept = [image_id for i, image_id in enumerate(ids) if i != place]
        assert list(sample_pairs(dataset, n, 0, max_bad=1).ids) == kept[:n]


def test_filtered_by_nsfw_scores(tmp_path: Path):
    dataset = open_dataset(f"diffusiondb:{write_diffusiondb(tmp_path)}", max_nsfw=0.15)
    sample = sample_pairs(dataset, 4, 0)
    assert set(sample.ids) == {row["image_name"] for part in (1, 2) for row in diffusiondb_rows(part)[:2]}
    assert {item.seed for item in sample.items} == {1000, 1001, 2000, 2001}
    with pytest.raises(UsageError, match=r"\(NSFW scores up to 0.15\): 5 text-image pairs .* only 4 usable ones"):
        sample_pairs(dataset, 5, 0)


def test_counting_bad_entries():
    bad = BadEntries("here", 2)
    bad.add("a", "x")
    bad.add("b", "y")
    bad.add("a", "again")
    assert (len(bad), bad.problems, bad.names) == (2, ("a: x", "b: y"), ("a", "b"))
    with pytest.raises(
        UsageError, match=r"^here: 3 bad entries so far, but at most 2 allowed \(--max-bad\); the first: a"
    ):
        bad.add("c", "z")
