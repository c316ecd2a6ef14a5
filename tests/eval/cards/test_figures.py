"""The figures of the model cards, on synthetic images and labels."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from torch.nn import functional as F

from patchedserve.data.errors import UsageError
from patchedserve.eval.cards import figures as bundled
from patchedserve.eval.metrics.clip import Clip
from patchedserve.eval.metrics.psnr import psnr

from ...support.tiny_models import tiny_autoencoder

PALETTE = {"white": (250, 250, 250), "red": (205, 62, 66), "blue": (78, 132, 216), "purple": (146, 104, 196)}
NAMES = ("red", "green", "blue")
SQUARE_COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


class ColourJudge(Clip):
    """A judge for results by hand: an image is its mean colour, a text is the sum of the colours that it names."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Identity(), None, None)

    def embed_images(self, images: Sequence[Any], batch_size: int = 64) -> torch.Tensor:
        return F.normalize(torch.tensor(np.array([np.asarray(image).mean((0, 1)) for image in images])).float(), dim=-1)

    def embed_texts(self, texts: Sequence[str], batch_size: int = 256) -> torch.Tensor:
        return F.normalize(torch.tensor([[float(name in text) for name in NAMES] for text in texts]), dim=-1)


def _solid(*names: str) -> Image.Image:
    """Return an image with stripes of the named colours, the first one slightly wider."""
    image = Image.new("RGB", (30, 10), SQUARE_COLOURS[names[-1]])
    if len(names) == 2:
        image.paste(SQUARE_COLOURS[names[0]], (0, 0, 16, 10))
    return image


def test_autoencoder_psnr_equals_a_manual_round_trip() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vae: Any = tiny_autoencoder().eval()
    rng = np.random.default_rng(0)
    images = {
        "32x32": [rng.integers(0, 256, (32, 32, 3), dtype=np.uint8) for _ in range(3)],
        "48x32": [Image.new("RGB", (48, 32), "orange")],
    }
    found = bundled.measure_autoencoder_psnr(vae, images, batch_size=2)
    assert list(found) == ["32x32", "48x32"]
    for name, originals in images.items():
        values = []
        for original in map(np.asarray, originals):
            x = torch.from_numpy(original.copy()).permute(2, 0, 1)[None] / 127.5 - 1
            with torch.inference_mode():
                back = vae.decode(vae.encode(x).latent_dist.mean).sample[0].permute(1, 2, 0).numpy()
            values.append(psnr(np.rint((np.clip(back, -1, 1) + 1) * 127.5).astype(np.uint8), original))
        assert found[name] == pytest.approx(np.mean(values), abs=0.02)
        assert 3 < found[name] < 30
    with pytest.raises(UsageError, match="resolution 64x64"):
        bundled.measure_autoencoder_psnr(vae, {"64x64": []})


def test_retrieval_figures() -> None:
    images = [_solid("red"), _solid("green"), _solid("blue"), _solid("red", "green"), _solid("green", "blue")]
    captions = ["red", "green", "blue", "red and green", "green and blue"]
    figures = bundled.measure_clip_retrieval(ColourJudge(), images, captions)
    assert figures["image_to_text_recall_at_1"] == 1
    assert figures["text_to_image_recall_at_1"] == 1
    assert figures["clip_score"] == pytest.approx(100, abs=0.5)
    wrong = bundled.measure_clip_retrieval(ColourJudge(), images, [*captions[1:], captions[0]])
    assert wrong["image_to_text_recall_at_1"] == 0
    assert wrong["image_to_text_recall_at_5"] == 1
    with pytest.raises(UsageError, match="5 or more"):
        bundled.measure_clip_retrieval(ColourJudge(), images[:3], captions[:3])


def test_object_at_1_counts_any_of_a_pair_and_all_objects_count_both() -> None:
    images = [_solid("red"), _solid("green", "blue"), _solid("red", "green"), _solid("blue")]
    objects = [("red",), ("blue", "green"), ("green", "blue"), ("green",)]
    figures = bundled.measure_objects(ColourJudge(), images, objects, NAMES, ["{}"])
    # Image 2 is mostly red: wrong at 1, and not both objects are found; image 3 is wrong.
    assert figures == {"object_at_1": 0.5, "all_objects": 0.5}
    figures = bundled.measure_objects(ColourJudge(), [_solid("green", "red")], [("green", "blue")], NAMES, ["{}"])
    assert figures == {"object_at_1": 1.0, "all_objects": 0.0}


def test_object_names_are_translated_for_the_judge() -> None:
    words = {"rojo": "red", "verde": "green", "azul": "blue"}
    arguments: Any = (ColourJudge(), [_solid("green")], [("verde",)], list(words), ["a {}"])
    assert bundled.measure_objects(*arguments, describe=words.__getitem__)["object_at_1"] == 1
    assert bundled.measure_objects(*arguments)["object_at_1"] == 0  # the judge does not know these names


@pytest.mark.parametrize(
    ("objects", "message"),
    [([("pink",)], "'pink'"), ([()], "one or more"), ([("red",), ("red",)], "2 labels were given for 1 images")],
)
def test_invalid_object_lists_are_refused(objects: list[tuple[str, ...]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bundled.measure_objects(ColourJudge(), [_solid("red")], objects, NAMES)


def test_background_is_read_from_the_border() -> None:
    for name, colour in PALETTE.items():
        image = Image.new("RGB", (128, 96), tuple(level - 6 for level in colour))
        draw = ImageDraw.Draw(image)
        other = next(value for key, value in PALETTE.items() if key != name)
        draw.rectangle((8, 0, 119, 91), fill=other)  # most of the picture, and the upper border except its ends
        assert bundled.background_of(image, PALETTE) == name
        draw.rectangle((0, 0, 119, 95), fill=other)  # only the right border keeps the background
        assert bundled.background_of(image, PALETTE) != name


def test_background_of_noisy_shades_and_tiny_images() -> None:
    rng = np.random.default_rng(0)
    for name, colour in PALETTE.items():
        noisy = np.clip(np.array(colour) + rng.normal(0, 12, (40, 64, 3)), 0, 255).astype(np.uint8)
        assert bundled.background_of(noisy, PALETTE) == name
        assert bundled.background_of(np.full((1, 1, 3), colour, np.uint8), PALETTE) == name


def test_share_of_correct_backgrounds() -> None:
    images = [Image.new("RGB", (16, 16), PALETTE[name]) for name in ("red", "blue", "white")]
    assert bundled.measure_backgrounds(images, ["red", "blue", "purple"], PALETTE) == pytest.approx(2 / 3)
    with pytest.raises(UsageError, match="not in the palette"):
        bundled.measure_backgrounds(images, ["red", "blue", "teal"], PALETTE)
    with pytest.raises(UsageError, match="2 labels were given for 3 images"):
        bundled.measure_backgrounds(images, ["red", "blue"], PALETTE)


def test_generated_images_are_compared_with_real_ones() -> None:
    objects = [("red",), ("green",), ("blue",), ("red", "green")]
    real = [_solid("red"), _solid("green"), _solid("blue"), _solid("blue")]  # three of four are recognised
    generated = [_solid("red"), _solid("red"), _solid("blue"), _solid("blue")]  # two of four are recognised
    palette = SQUARE_COLOURS
    figures = bundled.measure_generated(
        ColourJudge(),
        generated,
        objects,
        ["red", "red", "blue", "green"],
        names=NAMES,
        palette=palette,
        real_images=real,
        templates=["{}"],
    )
    assert figures["object_at_1"] == 0.5
    assert figures["real_object_at_1"] == 0.75
    assert figures["object_at_1_of_real"] == pytest.approx(2 / 3)
    assert figures["background"] == 0.75


def test_fid_by_resolution() -> None:
    from ..metrics.test_fid import _Colours

    rng = np.random.default_rng(0)
    real = {name: [rng.integers(0, 256, (8, 8, 3), dtype=np.uint8) for _ in range(6)] for name in ("8x8", "16x16")}
    same, shifted = list(real["8x8"]), [image // 2 for image in real["16x16"]]
    assert bundled.fid_of_images(real["8x8"], same, _Colours()) == pytest.approx(0, abs=1e-3)
    assert bundled.fid_of_images(real["16x16"], shifted, _Colours()) > 1000
    with pytest.raises(UsageError, match="6 real and 1 generated"):
        bundled.fid_of_images(real["8x8"], same[:1], _Colours())
