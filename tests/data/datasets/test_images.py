"""Image files of every kind in data sets are read as upright RGB in the right colours."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchedserve.data.datasets.base import BadImageError
from patchedserve.data.datasets.decode import decode, decode_rgb, read_content, size_of

from ...support.caption_sets import encoded, scene_image
from ...support.png import CASES, RGBA, PngCase, random_png

ORIENTATION = 0x0112


def array_of(content: bytes) -> np.ndarray:
    image = decode_rgb(content, "x")
    assert image.mode == "RGB"
    assert image.size == size_of(content, "x")
    return np.asarray(image).astype(int)


def test_rgb_is_unchanged():
    scene = scene_image(0)
    assert np.array_equal(array_of(encoded(scene)), np.asarray(scene))


@pytest.mark.parametrize(("image_format", "tolerance"), [("JPEG", 12), ("PNG", 0), ("WEBP", 0), ("TIFF", 0)])
def test_grey_becomes_three_equal_channels(image_format: str, tolerance: int):
    grey = scene_image(1).convert("L")
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 95}}.get(image_format, {})
    found = array_of(encoded(grey, image_format, **options))
    assert (found[..., 0] == found[..., 1]).all()
    assert (found[..., 0] == found[..., 2]).all()
    assert np.abs(found[..., 0] - np.asarray(grey)).max() <= tolerance


def test_adobe_cmyk_jpeg_is_inverted():
    flat = Image.new("RGB", (16, 16), (200, 40, 90))
    content = encoded(flat.convert("CMYK"), "JPEG", quality=100)
    # Four channels with Adobe's marker, in which 255 means no ink.
    assert b"\xff\xee\x00\x0eAdobe" in content
    with Image.open(io.BytesIO(content)) as image:
        assert image.mode == "CMYK"
    assert np.abs(array_of(content) - (200, 40, 90)).max() <= 4


def test_cmyk_tiff():
    flat = Image.new("RGB", (4, 4), (10, 120, 250))
    assert np.abs(array_of(encoded(flat.convert("CMYK"), "TIFF")) - (10, 120, 250)).max() <= 1


def test_palette():
    scene = scene_image(2).quantize(16)
    assert np.array_equal(array_of(encoded(scene)), np.asarray(scene.convert("RGB")))
    assert np.array_equal(array_of(encoded(scene, "GIF")), np.asarray(scene.convert("RGB")))


def test_transparent_pixels_become_white():
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    half = Image.new("RGBA", (4, 4), (0, 0, 0, 128))
    assert (array_of(encoded(clear)) == 255).all()
    assert np.abs(array_of(encoded(half)) - 127).max() <= 1
    grey = Image.new("LA", (4, 4), (0, 0))
    assert (array_of(encoded(grey)) == 255).all()
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([9, 9, 9, 40, 50, 60])
    assert (array_of(encoded(palette, transparency=1)) == 255).all()
    assert (array_of(encoded(palette, transparency=0)) == (40, 50, 60)).all()


def test_sixteen_bits_are_scaled_not_clipped():
    values = np.linspace(0, 65535, 64 * 4).astype(np.uint16).reshape(4, 64)
    found = array_of(encoded(Image.fromarray(values)))
    assert np.abs(found[..., 0] - values / 257).max() <= 0.5
    assert found.max() == 255
    assert len(np.unique(found)) > 200
    ppm = b"P5 64 4 65535\n" + values.astype(">u2").tobytes()
    assert np.array_equal(array_of(ppm), found)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pngs_of_every_kind_decode_as_specified(case: PngCase):
    for is_interlaced in (False, True):
        png = random_png(np.random.default_rng(0), *case, is_interlaced=is_interlaced)
        rgba = png.rgba().astype(float)
        alpha = rgba[..., 3:] / 255
        expected = rgba[..., :3] * alpha + 255 * (1 - alpha)
        assert np.abs(array_of(png.to_bytes()) - expected).max() <= 0.5


def test_deep_pngs_are_turned_upright():
    png = random_png(np.random.default_rng(0), RGBA, 16, False)
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    lying, upright = (decode(png.to_bytes(exif=each), "x") for each in (exif.tobytes()[6:], None))
    assert np.array_equal(np.rot90(np.asarray(upright), -1), np.asarray(lying))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int):
    upright = scene_image(3)
    # Transforms of the pixels that a camera stores, so that a viewer that obeys the tag shows `upright`.
    stored_by = {
        1: [],
        2: [Image.Transpose.FLIP_LEFT_RIGHT],
        3: [Image.Transpose.ROTATE_180],
        4: [Image.Transpose.FLIP_TOP_BOTTOM],
        5: [Image.Transpose.ROTATE_90, Image.Transpose.FLIP_TOP_BOTTOM],
        6: [Image.Transpose.ROTATE_90],
        7: [Image.Transpose.ROTATE_90, Image.Transpose.FLIP_LEFT_RIGHT],
        8: [Image.Transpose.ROTATE_270],
    }
    stored = upright
    for step in stored_by[orientation]:
        stored = stored.transpose(step)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    content = encoded(stored, exif=exif)
    with Image.open(io.BytesIO(content)) as image:
        assert image.size == stored.size
    assert np.array_equal(array_of(content), np.asarray(upright))


def test_invalid_exif_is_ignored():
    content = encoded(scene_image(3), "JPEG", exif=b"Exif\0\0" + b"nonsense" * 4)
    assert array_of(content).shape == (24, 32, 3)
    exif = Image.Exif()
    exif[ORIENTATION] = 77
    assert array_of(encoded(scene_image(3), exif=exif)).shape == (24, 32, 3)


def test_damaged_files_give_a_one_line_error():
    png, jpeg = encoded(scene_image(4)), encoded(scene_image(4), "JPEG")
    for content, message in [
        (b"", "img-7: the image file is empty"),
        (b"<html>not found</html>", "img-7: not an image"),
        (png[: len(png) // 2], "img-7: damaged image"),
        (jpeg[: len(jpeg) // 2], "img-7: damaged image"),
        (png[:20], "img-7: "),
        (encoded(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"), "img-7: .*floating-point"),
        (encoded(Image.fromarray(np.full((4, 4), 70000, np.int32)), "TIFF"), "img-7: .*beyond 16 bits"),
    ]:
        with pytest.raises(BadImageError, match=message) as caught:
            decode_rgb(content, "img-7")
        assert "\n" not in str(caught.value)


def test_any_damaged_png_byte_is_detected():
    scene = scene_image(4)
    png = encoded(scene)
    for place in range(33, len(png) - 12, 40):
        wrong = bytearray(png)
        wrong[place] ^= 0x55
        with pytest.raises(BadImageError, match="img-7: damaged image"):
            decode_rgb(bytes(wrong), "img-7")


def test_header_is_readable_although_the_image_is_damaged():
    jpeg = encoded(scene_image(4, 64, 48), "JPEG")
    assert size_of(jpeg[: len(jpeg) - 200], "x") == (64, 48)
    with pytest.raises(BadImageError):
        size_of(b"", "x")


def test_missing_and_unreadable_files(tmp_path: Path):
    with pytest.raises(BadImageError, match=r"no.png: the image file is missing"):
        read_content(tmp_path / "no.png")
    with pytest.raises(BadImageError, match=r"cannot read the image file: Is a directory"):
        read_content(tmp_path)
    with pytest.raises(BadImageError, match="cannot read the image file"):
        read_content(Path("a\0b.png"))
