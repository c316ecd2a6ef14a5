"""Images for metrics: cut and scaled, read ahead within limits, identified by content, paired by folder."""

import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchedserve.data.datasets import loading
from patchedserve.data.datasets.base import BadEntries, BadImageError
from patchedserve.data.datasets.folders import ImageFolder, open_folder, pair_folders
from patchedserve.data.datasets.loading import digest_of_images, fitted, iter_images
from patchedserve.data.datasets.prefetch import AHEAD_PER_WORKER, prefetch
from patchedserve.data.datasets.registry import open_dataset
from patchedserve.data.datasets.sampling import Sample, sample_pairs
from patchedserve.data.errors import UsageError
from patchedserve.data.resolution import Resolution

from ...support.caption_sets import coco_content, encoded, scene_image, write_coco


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    return sample_pairs(open_dataset(f"coco:{write_coco(tmp_path / 'coco', coco_content(8))}"), 6, 0)


def write_scenes(folder: Path, names: list[str], width: int = 32, height: int = 24) -> Path:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        scene_image(number, width, height).save(folder / name)
    return folder


# --- reading


@pytest.mark.parametrize("workers", [1, 3])
def test_images_are_yielded_in_storage_order(sample: Sample, workers: int):
    found = list(iter_images(sample, workers=workers, crop="none"))
    assert [image_id for image_id, _ in found] == list(sample.reading_order)
    assert sorted(sample.ids) == list(sample.reading_order) != list(sample.ids)
    for image_id, array in found:
        assert array.shape == (24, 32, 3)
        assert array.dtype == np.uint8
        assert array.flags.writeable
        assert np.array_equal(array, np.asarray(sample.open_image(image_id)))


def test_sizes_and_crops():
    wide = scene_image(0, 40, 24)
    pixels = np.asarray(wide)
    assert np.array_equal(np.asarray(fitted(wide, None, "none")), pixels)
    assert np.array_equal(np.asarray(fitted(wide, None, "center-square")), pixels[:, 8:32])
    assert np.array_equal(np.asarray(fitted(wide, Resolution(24, 24), "center-square")), pixels[:, 8:32])
    cut = Image.fromarray(pixels[:, 8:32])
    assert fitted(wide, Resolution(16, 16), "center-square") == cut.resize((16, 16), Image.Resampling.BICUBIC)
    assert fitted(wide, Resolution(16, 16), "none") == wide.resize((16, 16), Image.Resampling.BICUBIC)
    # The window has the shape of the target: 12x24 for an upright one, all of it for 40x24 itself.
    assert np.array_equal(np.asarray(fitted(wide, Resolution(12, 24), "center-square")), pixels[:, 14:26])
    assert np.array_equal(np.asarray(fitted(wide, Resolution(40, 24), "center-square")), pixels)
    tall = wide.transpose(Image.Transpose.TRANSPOSE)
    assert np.array_equal(np.asarray(fitted(tall, None, "center-square")), np.asarray(tall)[8:32])
    assert fitted(Image.new("RGB", (500, 1)), Resolution(8, 800), "center-square").size == (8, 800)


def test_scaling_down_is_antialiased():
    # Lines of one pixel: black or white without antialiasing, all grey with it.
    lines = np.zeros((64, 64, 3), np.uint8)
    lines[:, ::2] = 255
    small = np.asarray(fitted(Image.fromarray(lines), Resolution(16, 16), "center-square"))
    assert np.abs(small[:, 2:-2].astype(int) - 127).max() < 10


@pytest.mark.parametrize(("size", "shape"), [(16, (16, 16, 3)), (Resolution(48, 16), (16, 48, 3)), (None, (24, 24, 3))])
def test_arrays_have_the_requested_size(sample: Sample, size: int | Resolution | None, shape: tuple[int, ...]):
    assert {array.shape for _, array in iter_images(sample, size)} == {shape}


def test_invalid_arguments_are_refused_before_loading(sample: Sample, tmp_path: Path):
    with pytest.raises(UsageError, match="workers is 0"):
        iter_images(sample, workers=0)
    with pytest.raises(UsageError, match="image size is 0x0"):
        iter_images(sample, 0)
    with pytest.raises(UsageError, match="crop is 'left'"):
        iter_images(sample, crop="left")  # pyright: ignore[reportArgumentType]
    (tmp_path / "c.csv").write_text("caption\na\n")
    captions = sample_pairs(open_dataset(f"captions:{tmp_path / 'c.csv'}"), 1)
    assert not captions.has_images
    with pytest.raises(UsageError, match="holds captions only, no images"):
        iter_images(captions)
    with pytest.raises(UsageError, match="holds captions only, no images"):
        digest_of_images(captions)


def test_images_damaged_after_sampling_are_reported_and_skipped(sample: Sample, tmp_path: Path):
    victim = sample.ids[2]
    (tmp_path / "coco" / "val2017" / f"{int(victim):012d}.jpg").write_bytes(b"")
    with pytest.raises(UsageError, match=f"1 bad entry so far, but at most 0 allowed.*first: {victim}: .*is empty"):
        list(iter_images(sample))
    bad = BadEntries(sample.name, 1)
    assert [image_id for image_id, _ in iter_images(sample, bad=bad)] == sorted(set(sample.ids) - {victim})
    assert len(bad) == 1
    assert victim in bad.problems[0]


def test_prefetch_is_bounded_and_stops_with_its_consumer():
    begun: list[int] = []
    lock = threading.Lock()

    def work(item: int) -> int:
        with lock:
            begun.append(item)
        return item * item

    results = prefetch(itertools.count(), work, 2)
    assert [next(results) for _ in range(5)] == [0, 1, 4, 9, 16]
    assert max(begun) < 5 + 2 * AHEAD_PER_WORKER
    results.close()  # type: ignore[attr-defined]
    count = len(begun)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("psctl-images")]
    assert len(begun) == count


def test_worker_error_is_raised_at_its_item():
    def work(item: int) -> int:
        if item == 3:
            raise KeyError(item)
        return item

    results = prefetch(range(10), work, 3)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError):
        next(results)
    assert list(prefetch([], work, 1)) == []


def test_threads_decode_in_parallel(sample: Sample, monkeypatch: pytest.MonkeyPatch):
    # Each image waits for another one, so that loading one at a time would time out.
    barrier = threading.Barrier(2, timeout=60)
    original = loading.fitted

    def waiting(*arguments: object) -> Image.Image:
        barrier.wait()
        return original(*arguments)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(loading, "fitted", waiting)
    assert len(list(iter_images(sample, workers=2))) == 6


# --- digests


def test_digest_depends_on_ids_and_contents(tmp_path: Path):
    content = coco_content(8)
    one = sample_pairs(open_dataset(f"coco:{write_coco(tmp_path / 'a', content)}"), 6, 0)
    for annotation in content["annotations"]:
        annotation["caption"] += " Indeed."
    other = write_coco(tmp_path / "b", content)
    # Another folder, another time and other captions, but the same images.
    same = sample_pairs(open_dataset(f"coco:{other}"), 6, 0)
    assert same.captions != one.captions
    assert digest_of_images(one) == digest_of_images(same, workers=1)
    assert len(digest_of_images(one)) == 64
    other_seed, fewer = (sample_pairs(one.dataset, n, seed) for n, seed in ((6, 1), (5, 0)))
    path = other / "val2017" / f"{int(one.ids[3]):012d}.jpg"
    changed = bytearray(path.read_bytes())
    changed[-5] ^= 1
    path.write_bytes(changed)
    assert len({digest_of_images(each) for each in (one, same, other_seed, fewer)}) == 4
    path.unlink()
    with pytest.raises(BadImageError, match="the image file is missing"):
        digest_of_images(same)


def test_drawn_images_have_digests():
    emoji = [sample_pairs(open_dataset("emoji", resolution="32", num_images=6, data_seed=s), 3) for s in (0, 0, 1)]
    digests = [digest_of_images(each) for each in emoji]
    assert digests[0] == digests[1] != digests[2]


# --- folders


def test_folder_lists_its_images_in_order(tmp_path: Path):
    write_scenes(tmp_path, ["b.png", "a/2.jpg", "a/10.PNG", "c.webp"])
    for name in (".hidden.png", "notes.txt", "metadata.json"):
        (tmp_path / name).write_text("x")
    write_scenes(tmp_path / ".cache", ["d.png"])
    folder = open_folder(tmp_path)
    assert folder.ids == ("a/10.PNG", "a/2.jpg", "b.png", "c.webp")
    assert folder.path("a/2.jpg") == tmp_path / "a" / "2.jpg"
    assert [array.shape for _, array in iter_images(folder, 16)] == [(16, 16, 3)] * 4
    before = digest_of_images(folder)
    (tmp_path / "b.png").rename(tmp_path / "bb.png")
    assert digest_of_images(open_folder(tmp_path)) != before


def test_files_and_folders_without_images_are_refused(tmp_path: Path):
    with pytest.raises(UsageError, match=r"none: no such file or folder, but a folder of images is needed"):
        open_folder(tmp_path / "none")
    (tmp_path / "x.png").write_bytes(encoded(scene_image(0)))
    with pytest.raises(UsageError, match=r"x.png: is a file, but it must be a folder of images"):
        open_folder(tmp_path / "x.png")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"empty: holds no image \(.bmp, .gif, .jpeg"):
        open_folder(tmp_path / "empty")


def folders(tmp_path: Path, left: list[str], right: list[str]) -> tuple[ImageFolder, ImageFolder]:
    return open_folder(write_scenes(tmp_path / "left", left)), open_folder(write_scenes(tmp_path / "right", right))


def test_pairs_are_found_by_their_stems(tmp_path: Path):
    # Whole names would sort differently on the two sides: "a.b.png" before "a.png", but "a.b.jpg" after "a.bmp".
    left, right = folders(tmp_path, ["a.b.png", "a.png", "s/1.png"], ["a.b.jpg", "a.bmp", "s/1.jpg"])
    pairs = pair_folders(left, right)
    assert pairs.stems == ("a", "a.b", "s/1")
    assert list(zip(pairs.generated_ids, pairs.reference_ids, strict=True)) == [
        ("a.png", "a.bmp"),
        ("a.b.png", "a.b.jpg"),
        ("s/1.png", "s/1.jpg"),
    ]
    for one_id, other_id in zip(pairs.generated_ids, pairs.reference_ids, strict=True):
        one, other = (np.asarray(folder.open_image(name), int) for folder, name in ((left, one_id), (right, other_id)))
        # The other image is a JPEG or the same.
        assert np.abs(one - other).mean() < 12, one_id


def one_line(error: pytest.ExceptionInfo[UsageError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_folders_with_unmatched_images_are_refused(tmp_path: Path):
    left, right = folders(tmp_path, [f"{i}.png" for i in range(6)], ["0.png", "1.png", "x.png"])
    with pytest.raises(UsageError) as caught:
        pair_folders(left, right)
    assert one_line(caught) == (
        f"{left.root} holds 6 images and {right.root} 3, but pairs need as many of each; "
        f"only in {left.root}: 2, 3, 4, ...; only in {right.root}: x"
    )
    same_count = ImageFolder(left.root, left.ids[:3])
    with pytest.raises(UsageError) as caught:
        pair_folders(same_count, right)
    assert one_line(caught) == (
        f"1 of 3 names in {left.root} and {right.root} have no partner; only in {left.root}: 2; only in {right.root}: x"
    )


def test_duplicate_stems_are_refused(tmp_path: Path):
    left, right = folders(tmp_path, ["a.png", "a.jpg"], ["a.png", "b.png"])
    with pytest.raises(UsageError, match=r"left: a.jpg and a.png differ in their suffix only"):
        pair_folders(left, right)


def test_pairs_of_different_sizes_are_refused(tmp_path: Path):
    left, right = folders(tmp_path, ["a.png", "b.png", "c.png"], ["a.png", "b.png", "c.png"])
    scene_image(1, 24, 32).save(right.root / "b.png")
    scene_image(1, 16, 16).save(right.root / "c.png")
    with pytest.raises(
        UsageError, match=r"^2 of 3 pairs differ in size; the first: b is 32x24, but its reference is 24x32"
    ):
        pair_folders(left, right)


def test_rotated_image_has_the_size_of_the_upright_one(tmp_path: Path):
    left, right = folders(tmp_path, ["a.png"], ["a.png"])
    exif = Image.Exif()
    exif[0x0112] = 6
    scene_image(0).transpose(Image.Transpose.ROTATE_90).save(right.root / "a.png", exif=exif)
    assert pair_folders(left, right).stems == ("a",)
    upright, turned = (np.asarray(folder.open_image("a.png")) for folder in (left, right))
    assert np.array_equal(upright, turned)


def test_pairs_with_damaged_headers(tmp_path: Path):
    left, right = folders(tmp_path, ["a.png", "b.png"], ["a.png", "b.png"])
    (right.root / "b.png").write_bytes(b"")
    with pytest.raises(BadImageError, match=r"b.png: the image file is empty"):
        pair_folders(left, right)
