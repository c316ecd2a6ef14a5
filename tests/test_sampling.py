"""Sampling: the same pairs everywhere, bad entries named and counted, a cache that heals, memory that stays flat."""

import json
import os
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from patchedserve.data.datasets.base import BadEntries, CaptionDataset
from patchedserve.data.datasets.registry import open_dataset
from patchedserve.data.datasets.sampling import sample_pairs
from patchedserve.data.errors import UsageError

from .caption_sets import coco_content, diffusiondb_rows, encoded, scene_image, write_coco, write_diffusiondb


@pytest.fixture
def coco(tmp_path: Path) -> CaptionDataset:
    return open_dataset(f"coco:{write_coco(tmp_path / 'coco', coco_content(20))}")


def captions_file(path: Path, count: int = 30) -> CaptionDataset:
    path.write_text("".join(json.dumps({"id": i, "caption": f"caption {i}"}) + "\n" for i in range(count)))
    return open_dataset(f"captions:{path}")


def test_the_sample_is_this_one_on_every_machine(tmp_path: Path):
    sample = sample_pairs(captions_file(tmp_path / "c.jsonl"), 6, seed=1)
    # From `printf "1|$id" | sha256sum`, sorted. A change here would change every figure that was ever published.
    assert sample.ids == ("11", "14", "4", "15", "12", "2")
    assert sample.captions[0] == "caption 11"


def test_the_choice_of_captions_is_this_one_on_every_machine(coco: CaptionDataset):
    sample = sample_pairs(coco, 5, seed=3)
    # From `printf "3|$id|Caption $k of image $id." | sha256sum`.
    assert [(item.id, item.caption[8:9]) for item in sample.items] == [
        ("111", "2"),
        ("103", "2"),
        ("114", "0"),
        ("104", "0"),
        ("119", "1"),
    ]


def test_another_process_with_another_hash_seed_draws_the_same(coco: CaptionDataset, tmp_path: Path):
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


def test_seeds_draw_different_pairs_and_small_samples_begin_large_ones(coco: CaptionDataset):
    first, other = sample_pairs(coco, 12, 0), sample_pairs(coco, 12, 1)
    assert first.ids != other.ids
    assert len(set(first.ids)) == 12
    for n in (1, 2, 7):
        assert sample_pairs(coco, n, 0).items == first.items[:n]
    everything = sample_pairs(coco, None, 0)
    assert everything.items[:12] == first.items
    assert sorted(everything.ids) == [str(number) for number in range(100, 120)]
    # The caption chosen follows the seed too.
    again = {item.id: item.caption for item in sample_pairs(coco, None, 1).items}
    assert any(again[item.id] != item.caption for item in everything.items)


def test_every_image_and_every_caption_is_about_as_likely(tmp_path: Path):
    dataset = captions_file(tmp_path / "c.jsonl", 20)
    counts = dict.fromkeys(map(str, range(20)), 0)
    for seed in range(200):
        for image_id in sample_pairs(dataset, 5, seed).ids:
            counts[image_id] += 1
    # 200 draws of a quarter: 50 expected, with a standard deviation of 6.
    assert min(counts.values()) > 25
    assert max(counts.values()) < 75


def shuffled_coco(root: Path) -> None:
    path = root / "annotations" / "captions_val2017.json"
    content = json.loads(path.read_text())
    random.Random(3).shuffle(content["images"])
    random.Random(4).shuffle(content["annotations"])
    path.write_text(json.dumps(dict(reversed(content.items()))))


def test_the_order_of_the_entries_does_not_matter(tmp_path: Path):
    root = write_coco(tmp_path, coco_content(20))
    before = sample_pairs(open_dataset(f"coco:{root}"), 10, 2)
    shuffled_coco(root)
    assert sample_pairs(open_dataset(f"coco:{root}"), 10, 2).items == before.items


def test_the_order_of_rows_and_files_does_not_matter(tmp_path: Path):
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
def test_more_than_there_are(coco: CaptionDataset, n: int):
    message = f"{n} text-image pairs were asked for, but there are only 20 usable ones$"
    with pytest.raises(UsageError, match=message) as caught:
        sample_pairs(coco, n)
    assert "\n" not in str(caught.value)


def test_empty_sets_and_bad_numbers(coco: CaptionDataset, tmp_path: Path):
    (tmp_path / "c.csv").write_text("caption\n")
    with pytest.raises(UsageError, match=r"c.csv: at least 1 text-image pairs were asked for, but there are only 0 us"):
        sample_pairs(open_dataset(f"captions:{tmp_path / 'c.csv'}"), None)
    for bad in ({"n": 0}, {"n": -1}, {"n": 1, "min_side": 0}, {"n": 1, "workers": 0}):
        with pytest.raises(UsageError, match="must be at least 1"):
            sample_pairs(coco, **bad)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="but it must be 0 or more"):
        sample_pairs(coco, 1, max_bad=-1)
    with pytest.raises(UsageError, match="holds captions only, no images"):
        sample_pairs(captions_file(tmp_path / "c.jsonl"), 1, min_side=8)


def coco_path(dataset: Any, image_id: str) -> Path:
    return dataset.files.root / f"{int(image_id):012d}.jpg"


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
def test_bad_images_are_named_counted_and_replaced(coco: CaptionDataset, damage: str):
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
    # The bad ones are not among the first two, so they are not met.
    assert sample_pairs(coco, 2, 0).items == whole.items[:2]


def test_headers_alone_do_not_show_truncation(coco: CaptionDataset):
    whole = sample_pairs(coco, 5, 0)
    truncate(coco_path(coco, whole.ids[0]))
    assert sample_pairs(coco, 5, 0, check="header").items == whole.items
    with pytest.raises(UsageError, match="damaged image"):
        sample_pairs(coco, 5, 0, check="decode")


def test_problems_of_entries_count_like_bad_images(tmp_path: Path):
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
        f"{twice}: stands for more than one entry of the data set, so it is not clear which is meant",
        f"{no_image}: has captions, but the annotations list no such image",
    )
    with pytest.raises(UsageError, match=r"4 bad entries so far, but at most 3 allowed \(--max-bad\); the first"):
        sample_pairs(dataset, 6, 0, max_bad=3)
    with pytest.raises(UsageError, match=r"7 text-image pairs were .* only 6 usable ones \(4 bad entries skipped\)"):
        sample_pairs(dataset, 7, 0, max_bad=4)


@pytest.mark.parametrize("copies", [2, 3, 40])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_ids_that_stand_twice_are_found_wherever_a_page_ends(tmp_path: Path, copies: int, n: int):
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
        with pytest.raises(UsageError, match=f"first: {ids[place]}: stands for more than one entry"):
            sample_pairs(dataset, n, 0)
        kept = [image_id for i, image_id in enumerate(ids) if i != place]
        assert list(sample_pairs(dataset, n, 0, max_bad=1).ids) == kept[:n]


def test_small_images_are_passed_over_by_metadata(tmp_path: Path):
    content = coco_content(12)
    for number, image in enumerate(content["images"]):
        image["width"], image["height"] = (600, 500 + 10 * number)
    root = write_coco(tmp_path, content)
    for number, image in enumerate(content["images"]):
        scene_image(number, 60 * 8, (50 + number) * 8).save(root / "val2017" / image["file_name"])
    # The header has the last word on the size: 480 pixels wide, whatever the annotations say.
    dataset = open_dataset(f"coco:{root}")
    with pytest.raises(UsageError, match="with sides of at least 490 px were asked for, but there are only 0 usable"):
        sample_pairs(dataset, 1, 0, min_side=490)
    sample = sample_pairs(dataset, 3, 0, min_side=440)
    assert all(min(item.width or 0, item.height or 0) >= 440 for item in sample.items)
    assert sample.bad == ()


def test_small_images_are_passed_over_by_their_headers_and_pages_go_on(tmp_path: Path):
    for number in range(40):
        side = 64 if number % 10 == 0 else 16
        scene_image(number, side, side).save(tmp_path / f"{number:02d}.png")
    lines = ["file_name,text", *(f"{number:02d}.png,scene {number}" for number in range(40))]
    (tmp_path / "metadata.csv").write_text("\n".join(lines))
    dataset = open_dataset(f"imagefolder:{tmp_path}")
    sample = sample_pairs(dataset, 4, 0, min_side=32)
    assert sorted(sample.ids) == ["00.png", "10.png", "20.png", "30.png"]
    assert {(item.width, item.height) for item in sample.items} == {(64, 64)}
    assert sample_pairs(dataset, 2, 0, min_side=32).items == sample.items[:2]
    with pytest.raises(UsageError, match=r"5 text-image pairs with sides of at least 32 px .* only 4 usable ones"):
        sample_pairs(dataset, 5, 0, min_side=32)


def test_filtered_by_nsfw_scores(tmp_path: Path):
    dataset = open_dataset(f"diffusiondb:{write_diffusiondb(tmp_path)}", max_nsfw=0.15)
    sample = sample_pairs(dataset, 4, 0)
    assert set(sample.ids) == {row["image_name"] for part in (1, 2) for row in diffusiondb_rows(part)[:2]}
    assert {item.seed for item in sample.items} == {1000, 1001, 2000, 2001}
    with pytest.raises(UsageError, match=r"\(NSFW scores up to 0.15\): 5 text-image pairs .* only 4 usable ones"):
        sample_pairs(dataset, 5, 0)


def test_the_bundled_world_is_sampled_offline():
    sample = sample_pairs(open_dataset("emoji", resolution="64", num_images=50), 5, 0)
    assert sample.has_images
    for item in sample.items:
        image = sample.open_image(item.id)
        assert image.size == (item.width, item.height) == (64, 64)


# --- cache


def cached_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_a_sample_is_kept_and_found_again(coco: CaptionDataset, tmp_path: Path):
    cache = tmp_path / "cache"
    drawn = sample_pairs(coco, 8, 0, cache_dir=cache)
    path = cached_file(cache)
    assert path.stat().st_size < 5000
    # What is found again was not drawn again: the images are gone, and nobody misses them.
    for image_id in drawn.ids:
        coco_path(coco, image_id).unlink()
    again = sample_pairs(coco, 8, 0, cache_dir=cache)
    assert again == drawn
    with pytest.raises(UsageError, match="the image file is missing"):
        sample_pairs(coco, 8, 0)


def test_whatever_decides_the_sample_decides_the_key(coco: CaptionDataset, tmp_path: Path):
    cache = tmp_path / "cache"
    sample_pairs(coco, 8, 0, cache_dir=cache)
    sample_pairs(coco, 7, 0, cache_dir=cache)
    sample_pairs(coco, 8, 1, cache_dir=cache)
    sample_pairs(coco, 8, 0, 16, cache_dir=cache)
    sample_pairs(coco, 8, 0, check="header", cache_dir=cache)
    assert len(list(cache.iterdir())) == 5
    path = tmp_path / "coco" / "annotations" / "captions_val2017.json"
    path.write_text(path.read_text().replace("Caption 0", "Legend 0"))
    os.utime(path, (0, 0))
    sample = sample_pairs(coco, 8, 0, cache_dir=cache)
    assert any(caption.startswith("Legend") for caption in sample.captions)
    assert len(list(cache.iterdir())) == 6


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
def test_a_damaged_cache_is_drawn_again(coco: CaptionDataset, tmp_path: Path, damage: Callable[[str], str]):
    cache = tmp_path / "cache"
    drawn = sample_pairs(coco, 8, 0, cache_dir=cache)
    path = cached_file(cache)
    whole = path.read_text()
    assert damage(whole) != whole
    path.write_text(damage(whole))
    assert sample_pairs(coco, 8, 0, cache_dir=cache) == drawn
    assert path.read_text() == whole


def test_a_sample_with_bad_entries_is_not_kept(coco: CaptionDataset, tmp_path: Path):
    cache = tmp_path / "cache"
    whole = sample_pairs(coco, 8, 0)
    path = coco_path(coco, whole.ids[0])
    content = path.read_bytes()
    path.unlink()
    assert len(sample_pairs(coco, 8, 0, max_bad=1, cache_dir=cache).bad) == 1
    assert not cache.exists()
    path.write_bytes(content)
    assert sample_pairs(coco, 8, 0, max_bad=1, cache_dir=cache).items == whole.items


def test_a_cache_that_cannot_be_written_is_an_error(coco: CaptionDataset, tmp_path: Path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(OSError, match="cache"):
        sample_pairs(coco, 2, 0, cache_dir=tmp_path / "cache")
    assert (tmp_path / "cache").read_text() == "a file"


# --- memory


PEAKS = """
import re, sys
from pathlib import Path
from patchedserve.data.datasets.registry import open_dataset
from patchedserve.data.datasets.sampling import _in_hash_order
dataset = open_dataset(sys.argv[1])
# Not ru_maxrss, which a child takes over from the process that started it.
def peak(): return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
start = peak()
if sys.argv[2] == "read first":
    for _ in dataset.entries(): pass
read = peak()
groups = [group for _, group in zip(range(100), _in_hash_order(dataset, 0, 101))]
print(len(groups), read - start, peak() - read)
"""


def peaks_in_kib(spec: str, what: str) -> list[int]:
    """Number of entries drawn, and by how much reading and then sampling raised the peak of a process's memory.

    By the operating system's count, because tracemalloc makes these sets take a minute.
    """
    run = subprocess.run([sys.executable, "-c", PEAKS, spec, what], capture_output=True, text=True, check=True)
    return [int(word) for word in run.stdout.split()]


def test_memory_of_sampling_does_not_grow_with_the_set(tmp_path: Path):
    path = tmp_path / "c.jsonl"
    with path.open("w") as file:
        file.writelines(f'{{"id": {i}, "caption": "caption number {i}"}}\n' for i in range(200_000))
    num_drawn, _, sampling = peaks_in_kib(f"captions:{path}", "sample only")
    assert num_drawn == 100
    # 200,000 entries in a list are 80 MB.
    assert sampling < 8192


def test_memory_of_sampling_coco_is_that_of_its_json(tmp_path: Path):
    count = 100_000
    images = ",".join(f'{{"id":{i},"file_name":"{i:012d}.jpg"}}' for i in range(count))
    captions = ",".join(f'{{"image_id":{i},"caption":"c {i}"}}' for i in range(count))
    (tmp_path / "val2017").mkdir()
    (tmp_path / "captions_val2017.json").write_text(f'{{"images":[{images}],"annotations":[{captions}]}}')
    num_drawn, reading, sampling = peaks_in_kib(f"coco:{tmp_path}", "read first")
    assert num_drawn == 100
    assert reading > 20_000
    assert sampling < 0.15 * reading


def test_small_sets_are_sampled_in_small_memory_too(tmp_path: Path):
    dataset = captions_file(tmp_path / "c.jsonl", 4000)
    tracemalloc.start()
    try:
        sample = sample_pairs(dataset, 20, 0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(sample) == 20
    # A list of all 4,000 would be 1.6 MB.
    assert peak < 300_000


def test_counting_bad_entries():
    bad = BadEntries("here", 2)
    bad.add("a: x")
    bad.add("b: y")
    assert (len(bad), bad.found) == (2, ("a: x", "b: y"))
    with pytest.raises(
        UsageError, match=r"^here: 3 bad entries so far, but at most 2 allowed \(--max-bad\); the first: a"
    ):
        bad.add("c: z")
