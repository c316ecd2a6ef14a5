"""Images as files hold them, turned into upright RGB images of eight bits."""

import io
import struct
import zlib
from pathlib import Path, PurePath

import numpy as np
from PIL import ExifTags, Image, ImageOps

from .base import BadImageError

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif"})

# What Pillow is known to raise on damaged files.
_DAMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    OverflowError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
_PNG = b"\x89PNG\r\n\x1a\n"
_SIDEWAYS = {5, 6, 7, 8}  # EXIF orientations in which width and height are exchanged


def is_image_name(name: str) -> bool:
    """Whether a file of this name is taken for an image: by its suffix, and not hidden."""
    return not name.startswith(".") and PurePath(name).suffix.lower() in IMAGE_SUFFIXES


def read_content(path: Path, name: str | None = None) -> bytes:
    """The bytes of an image file.

    Raises BadImageError: it is missing or cannot be read; the message calls it `name`.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise BadImageError(f"{name or path}: the image file is missing") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise BadImageError(f"{name or path}: cannot read the image file: {reason}") from error


def decode_rgb(content: bytes, name: str) -> Image.Image:
    """Decode an image into mode RGB, upright by its EXIF orientation (unreadable EXIF counts as none).

    Grey, palette, CMYK, YCbCr and Lab images become RGB; colour profiles are not applied. CMYK in JPEG files is taken
    to be inverted, as Adobe's programs write it (Pillow does so whether their marker is there or not).
    What is transparent shows white. Grey of 16 bits is scaled to 8, not clipped as Pillow's own conversion does. Of an
    animation the first frame is taken.

    Raises:
        BadImageError: it is damaged or no image, or its values have no defined range (32-bit TIFF).
    """
    try:
        if content.startswith(_PNG):
            # Loading looks at no checksum and gives other pixels without a word; this compares them all.
            with Image.open(io.BytesIO(content)) as image:
                image.verify()
        with Image.open(io.BytesIO(content)) as image:
            image.load()
            return _to_rgb(upright(image), name)
    except BadImageError:
        raise
    except _DAMAGE as error:
        raise _bad(content, name, error) from error


def size_of(content: bytes, name: str, most_pixels: int | None = None) -> tuple[int, int]:
    """(width, height) that `decode_rgb` would give, from the header; of a PNG without EXIF the pixels are read, too, as
    its EXIF may stand behind them, but not if they are more than `most_pixels`.

    Raises BadImageError: it is damaged or no image, or has more pixels.
    """
    try:
        with Image.open(io.BytesIO(content)) as image:
            width, height = image.size
            if most_pixels is not None and width * height > most_pixels:
                raise BadImageError(f"{name}: {width}x{height} pixels, but at most {most_pixels:,} in all are taken")
            try:
                is_sideways = image.getexif().get(ExifTags.Base.Orientation) in _SIDEWAYS
            except _DAMAGE:
                is_sideways = False
            return (height, width) if is_sideways else (width, height)
    except BadImageError:
        raise
    except _DAMAGE as error:
        raise _bad(content, name, error) from error


def _bad(content: bytes, name: str, error: Exception) -> BadImageError:
    if not content:
        return BadImageError(f"{name}: the image file is empty")
    if isinstance(error, Image.UnidentifiedImageError):
        return BadImageError(f"{name}: not an image that Pillow knows")
    return BadImageError(f"{name}: damaged image: {' '.join(str(error).split()) or type(error).__name__}")


def upright(image: Image.Image) -> Image.Image:
    """An image as its EXIF orientation has it; unreadable EXIF counts as none."""
    try:
        return ImageOps.exif_transpose(image)
    except _DAMAGE:
        return image


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    if image.mode.startswith("I;16"):
        return _from_16_bits(np.asarray(image, dtype=np.uint32))
    if image.mode == "I":
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise BadImageError(f"{name}: damaged image: grey values beyond 16 bits have no defined range")
        return _from_16_bits(values.astype(np.uint32))
    if image.mode == "F":
        raise BadImageError(f"{name}: damaged image: floating-point values have no defined range")
    if image.has_transparency_data:
        pixels = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", pixels.size, "white"), pixels)
    # A copy, because the file behind the image is closed.
    return image.copy() if image.mode == "RGB" else image.convert("RGB")


def _from_16_bits(values: np.ndarray) -> Image.Image:
    return Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8)).convert("RGB")
