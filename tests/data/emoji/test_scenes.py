"""The emoji world: deterministic scenes, captions that match the images, and no held-out compositions in training."""

import numpy as np
import pytest
from PIL import Image

from patchedserve.data.emoji.art import RASTER_PX, object_names, object_raster
from patchedserve.data.emoji.dataset import EmojiDataset
from patchedserve.data.emoji.scene import (
    BACKGROUNDS,
    SHADE_JITTER,
    caption_of,
    heldout_pairs,
    heldout_singles,
    is_heldout,
    plural,
    sample_scene,
    with_article,
)
from patchedserve.data.resolution import Resolution

SIZES = [Resolution(128, 128), Resolution(192, 128), Resolution(128, 256)]


@pytest.mark.slow
def test_every_drawing_rasterises_to_something_visible():
    names = object_names()
    assert len(names) == 126
    assert list(names) == sorted(set(names))
    for name in names:
        raster = object_raster(name)
        assert raster.size == (RASTER_PX, RASTER_PX)
        alpha = np.asarray(raster)[..., 3]
        assert 0.05 < (alpha > 128).mean() < 0.95, name


@pytest.mark.parametrize("resolution", SIZES, ids=str)
def test_drawing_is_deterministic(resolution):
    dataset = EmojiDataset(resolution, 6, "heldout", seed=3)
    again = EmojiDataset(resolution, 100, "heldout", seed=3)
    for index in (0, 5):
        image = dataset.image(index)
        assert image.size == resolution
        assert image.tobytes() == again.image(index).tobytes()
    assert dataset.image(0).tobytes() != dataset.image(1).tobytes()
    with pytest.raises(IndexError):
        dataset.image(6)


def test_splits_and_seeds_draw_different_images():
    size = SIZES[0]
    first = [EmojiDataset(size, 4, split, seed).scene(0) for split in ("train", "heldout") for seed in (0, 1)]
    assert len(set(first)) == 4


def test_heldout_compositions_appear_only_in_the_heldout_split():
    rng = np.random.default_rng(0)
    for _ in range(600):
        scene = sample_scene(rng, SIZES[0], "train")
        names = [placement.name for placement in scene.placements]
        assert not any(is_heldout(name, scene.background) for name in names)
        assert len(set(names)) < 2 or not is_heldout(*names)
    for _ in range(300):
        scene = sample_scene(rng, SIZES[0], "heldout")
        names = [placement.name for placement in scene.placements]
        assert is_heldout(names[0], scene.background) or (len(set(names)) == 2 and is_heldout(*names))


def test_about_10_percent_is_held_out():
    num_objects = len(object_names())
    assert 0.07 < len(heldout_singles()) / (num_objects * len(BACKGROUNDS)) < 0.13
    assert 0.07 < len(heldout_pairs()) / (num_objects * (num_objects - 1) / 2) < 0.13


def test_corner_has_the_background_colour():
    dataset = EmojiDataset(Resolution(256, 256), 20)
    for scene, image in dataset:
        corner = np.array(image.getpixel((0, 0)), dtype=int)
        assert np.abs(corner - BACKGROUNDS[scene.background]).max() <= SHADE_JITTER


def test_scene_is_similar_at_every_size():
    scene_set = EmojiDataset(Resolution(128, 128), 8)
    from patchedserve.data.emoji.scene import render

    for scene in (scene_set.scene(index) for index in range(8)):
        small = np.asarray(render(scene, Resolution(128, 128)), dtype=float)
        large = render(scene, Resolution(256, 256)).resize((128, 128), Image.Resampling.BOX)
        assert np.abs(small - np.asarray(large, dtype=float)).mean() < 6


@pytest.mark.parametrize(
    ("names", "background", "caption"),
    [
        (("red apple",), "blue", "a red apple on a blue background"),
        (("hedgehog", "candle"), "yellow", "a hedgehog and a candle on a yellow background"),
        (("owl",), "orange", "an owl on an orange background"),
        (("unicorn",), "white", "a unicorn on a white background"),
        (("cherries",), "red", "cherries on a red background"),
        (("butterfly", "butterfly"), "gray", "two butterflies on a gray background"),
        (("fox", "fox"), "pink", "two foxes on a pink background"),
    ],
)
def test_captions(names, background, caption):
    assert caption_of(names, background) == caption


def test_every_name_has_a_plural_and_an_article():
    for name in object_names():
        assert plural(name) != name
        assert with_article(name).endswith(name)
