"""Images and masks in files, and inputs that edits refuse."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from patchedserve.data import edits
from patchedserve.data.edits import EditSpec, active_cells, active_share, has_alpha, latent_mask, read_image, read_mask
from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution

from ..support.edits import image_of, mask_of
from ..support.png import CASES, PngCase, random_png

SIZE = Resolution(48, 32)


def file_of(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def test_white_mask_pixels_are_editable() -> None:
    values = np.array([[0, 127, 128, 255]], np.uint8)
    assert read_mask(file_of(Image.fromarray(values)), "mask").tolist() == [[False, False, True, True]]
    # By luma, pure green is lighter than the limit, pure red is not.
    colours = Image.fromarray(np.array([[[0, 255, 0], [255, 0, 0]]], np.uint8))
    assert read_mask(file_of(colours), "mask").tolist() == [[True, False]]


def test_transparent_mask_pixels_are_editable() -> None:
    pixels = np.full((1, 3, 4), 255, np.uint8)
    pixels[0, :, 3] = [0, 127, 128]
    assert read_mask(file_of(Image.fromarray(pixels)), "mask").tolist() == [[True, True, False]]
    assert edits.has_alpha(file_of(Image.fromarray(pixels)))
    assert not edits.has_alpha(file_of(Image.new("RGB", (2, 2))))
    for mode in ("RGB", "RGBA"):
        assert edits.own_mask(file_of(Image.new(mode, (2, 2), "red")), "image") is None, "nothing is transparent"


def test_masks_of_16_bits_and_of_opaque_files() -> None:
    values = np.array([[0, 1000, 32_000, 33_000, 65_535]], np.uint16)
    assert read_mask(file_of(Image.fromarray(values)), "mask").tolist() == [[False, False, False, True, True]]
    opaque = Image.fromarray(np.full((2, 2, 4), 255, np.uint8))
    with pytest.raises(UsageError, match="in a file with an alpha channel what is transparent"):
        EditSpec(image_of(Resolution(2, 2)), read_mask(file_of(opaque), "mask"))


def test_masks_and_images_are_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    lying = np.zeros((32, 48), np.uint8)
    lying[:, :8] = 255
    content = file_of(Image.fromarray(lying), "TIFF", exif=exif)
    mask = read_mask(content, "mask")
    assert mask.shape == (48, 32)
    assert mask[:8].all()
    assert not mask[8:].any()
    assert (read_image(content, "image")[..., 0] >= 128).tolist() == mask.tolist()


def test_unreadable_exif_is_ignored() -> None:
    mask = mask_of(SIZE)
    content = file_of(Image.fromarray(mask), "PNG", exif=b"Exif\0\0no TIFF")
    assert (read_mask(content, "mask") == mask).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_masks_are_read_from_pngs_of_every_kind(case: PngCase) -> None:
    for is_interlaced in (False, True):
        png = random_png(np.random.default_rng(1), *case, is_interlaced=is_interlaced)
        rgba = png.rgba()
        luma = np.rint(rgba[..., :3] @ (0.299, 0.587, 0.114))
        expected = rgba[..., 3] < 128 if png.has_transparency else luma >= 128
        assert 0 < expected.sum() < expected.size
        assert np.array_equal(read_mask(png.to_bytes(), "mask"), expected)
        assert has_alpha(png.to_bytes()) == png.has_transparency


@pytest.mark.parametrize("read", [read_image, read_mask])
def test_damaged_animated_and_huge_images_are_refused(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    good = file_of(Image.fromarray(image_of(SIZE)))
    frames = [Image.new("L", SIZE, shade) for shade in (0, 99)]
    animated = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    monkeypatch.setattr(edits, "MAX_PIXELS", 48 * 32)
    huge = file_of(Image.new("L", (49, 32)))
    for content, message in (
        (good[:-30], "damaged"),
        (b"", "is empty"),
        (b"hello", "not an image"),
        (animated, "an animation of 2 images"),
        (huge, "49x32 pixels, but at most 1,536"),
    ):
        with pytest.raises(UsageError, match=message):
            read(content, "file.png")
    read(good, "file.png")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": mask_of(Resolution(32, 48))}, "the mask has 32x48 pixels, but the image to edit has 48x32"),
        ({"mask": np.zeros((32, 48), bool)}, "the mask is empty"),
        ({"mask": np.zeros((32, 48), np.uint8)}, "of uint8, but must be"),
        ({"image": image_of(SIZE)[..., 0]}, "the image to edit is"),
        ({"strength": 0.0}, "strength is 0.0"),
        ({"strength": 1.01}, "strength is 1.01"),
        ({"strength": float("nan")}, "strength is nan"),
        ({"strength": True}, "strength is True"),
        ({"feather_px": -1}, "feather_px is -1"),
        ({"feather_px": 257}, "feather_px is 257"),
        ({"feather_px": 2, "paste": False}, "needs paste"),
        ({"full_steps": -1}, "full_steps is -1"),
        ({"full_steps": 1.0}, "full_steps is 1.0"),
        ({"dilate": 65}, "dilate is 65, but it must be a whole number of cells from 0 to 64"),
    ],
)
def test_bad_edits_are_refused(change: dict[str, Any], message: str) -> None:
    good = {"image": image_of(SIZE), "mask": mask_of(SIZE)}
    with pytest.raises(UsageError, match=message):
        EditSpec(**good | change)


def test_edit_request_has_the_image_size_and_its_share_of_steps() -> None:
    edit = EditSpec(image_of(SIZE), mask_of(SIZE), 0.5)
    with pytest.raises(UsageError, match="resolution is 32x32, but the image to edit has 48x32 pixels"):
        Request(0, "a hat", Resolution(32, 32), edit=edit)
    assert Request(0, "a hat", SIZE, 9, edit=edit).num_steps == 4
    assert Request(0, "a hat", SIZE, 1, edit=edit).num_steps == 1
    assert Request(0, "a hat", SIZE, 9).num_steps == 9


def test_latent_mask_follows_the_upper_left_pixel() -> None:
    mask = np.zeros((32, 48), bool)
    mask[8, 16] = mask[25, 33] = True
    found = latent_mask(mask, 8)
    assert found.shape == (4, 6)
    assert np.argwhere(found).tolist() == [[1, 2]]
    with pytest.raises(UsageError, match="too thin: of no latent, 16x16 pixels"):
        latent_mask(mask, 16)


def test_cell_is_active_if_any_latent_is_editable() -> None:
    mask = np.zeros((5, 6), bool)
    mask[4, 0] = True  # in a cell that extends beyond the edge
    assert active_share(mask, 4) == 0.25
    assert active_share(mask, 2) == pytest.approx(1 / 9)
    assert active_share(mask, 1) == pytest.approx(1 / 30)


def test_context_cells_are_those_near_the_mask() -> None:
    mask = np.zeros((12, 20), dtype=bool)
    mask[0, 5] = mask[9, 19] = True
    for dilate in range(4):
        found = active_cells(mask, 2, dilate)
        down, right = np.mgrid[:6, :10]
        near = [np.maximum(abs(down - row), abs(right - column)) <= dilate for row, column in ((0, 2), (4, 9))]
        assert (found == near[0] | near[1]).all()
        assert active_share(mask, 2, dilate) == found.mean()
