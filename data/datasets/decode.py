"""Decoding of image files into upright RGB images of eight bits."""

import io
import struct
import zlib
from pathlib import Path, PurePath

import numpy as np
from PIL import ExifTags, Image, ImageOps

from .base import BadImageError

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif"})

# Errors that Pillow is known to raise on damaged files.
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
_PNG_DEPTH = 24  # offset of the bits per sample; then follow colour type, two fixed bytes and the interlace flag
_PNG_GREY = 0
_PNG_BYTES = {2: 6, 4: 4, 6: 8}  # bytes of a pixel with 16 bits per sample, by colour type
_PNG_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
_EIGHT_BITS = ((np.arange(1 << 16) * 255 + 32767) // 65535).astype(np.uint8)
"""Eight-bit value by 16-bit value."""
_SIDEWAYS = {5, 6, 7, 8}  # EXIF orientations in which width and height are exchanged


def is_image_name(name: str) -> bool:
    """Return whether a file of this name counts as an image: it has a suffix of images and is not hidden."""
    return not name.startswith(".") and PurePath(name).suffix.lower() in IMAGE_SUFFIXES


def read_content(path: Path, name: str | None = None) -> bytes:
    """Return the bytes of an image file.

    Raises BadImageError if it is missing or cannot be read; the message calls it `name`.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise BadImageError(f"{name or path}: the image file is missing") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise BadImageError(f"{name or path}: cannot read the image file: {reason}") from error


def decode(content: bytes, name: str) -> Image.Image:
    """Decode an image into mode RGB, or RGBA if the file has transparency, upright by its EXIF orientation (unreadable
    EXIF counts as none).

    Grey, palette, CMYK, YCbCr and Lab images become RGB; colour profiles are not applied. CMYK in JPEG files is assumed
    to be inverted, as Adobe's programs write it (Pillow does so with or without their marker). 16 bits are scaled to 8,
    where Pillow clips them or drops the lower ones. An animation gives its first frame.

    Raises:
        BadImageError: the file is damaged or no image, or its values have no defined range (32-bit TIFF).
    """
    try:
        is_png = content.startswith(_PNG)
        if is_png:
            # Loading ignores checksums and silently gives wrong pixels; `verify` compares all checksums.
            with Image.open(io.BytesIO(content)) as image:
                image.verify()
        image = _opened(content)
        if not is_png:
            return _converted(image, name)
        depth, colour = content[_PNG_DEPTH], content[_PNG_DEPTH + 1]
        if depth == 16 and colour != _PNG_GREY:
            low = np.asarray(_opened(_with_bytes_exchanged(content)))
            values = (np.asarray(image, dtype=np.uint16) << 8) + low
            return _from_16_bits(values, image.info.get("transparency"))
        if depth < 8 and colour == _PNG_GREY and "transparency" in image.info:
            most = (1 << depth) - 1
            # Pillow scales the pixels, but not the transparent value that they are compared with.
            image.info["transparency"] = (image.info["transparency"] & most) * 255 // most
        return _converted(image, name)
    except BadImageError:
        raise
    except _DAMAGE as error:
        raise _bad(content, name, error) from error


def decode_rgb(content: bytes, name: str) -> Image.Image:
    """Decode an image as `decode` does, into mode RGB, with transparency over white. Raises as `decode`."""
    image = decode(content, name)
    if image.mode == "RGBA":
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image


def size_of(content: bytes, name: str, max_pixels: int | None = None) -> tuple[int, int]:
    """Return the (width, height) that `decode_rgb` would give, from the header. The pixels of a PNG without EXIF in its
    header are read too, because EXIF may follow them, unless the image has more than `max_pixels`.

    Raises BadImageError if the file is damaged or no image, or has more than `max_pixels`.
    """
    try:
        with Image.open(io.BytesIO(content)) as image:
            width, height = image.size
            if max_pixels is not None and width * height > max_pixels:
                raise BadImageError(f"{name}: {width}x{height} pixels, but at most {max_pixels:,} in all are taken")
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


def _opened(content: bytes) -> Image.Image:
    """Return the image of a file, upright by its EXIF orientation; unreadable EXIF counts as none."""
    with Image.open(io.BytesIO(content)) as image:
        image.load()
        try:
            return ImageOps.exif_transpose(image)
        except _DAMAGE:
            return image.copy()  # the file behind the image is closed


def _converted(image: Image.Image, name: str) -> Image.Image:
    if image.mode.startswith("I;16"):
        return _from_16_bits(np.asarray(image, dtype=np.uint16), image.info.get("transparency"))
    if image.mode == "I":
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise BadImageError(f"{name}: damaged image: grey values beyond 16 bits have no defined range")
        return _from_16_bits(values.astype(np.uint16))
    if image.mode == "F":
        raise BadImageError(f"{name}: damaged image: floating-point values have no defined range")
    return image.convert("RGBA" if image.has_transparency_data else "RGB")


def _from_16_bits(values: np.ndarray, transparent: int | tuple[int, ...] | None = None) -> Image.Image:
    """Return an image of grey values (height, width) or colours (height, width, channels); `transparent` is the value
    that is transparent.
    """
    values = np.dstack([values] * 3) if values.ndim == 2 else values
    shades = _EIGHT_BITS[values]
    if transparent is not None:
        alpha = np.where((values == transparent).all(-1), np.uint8(0), np.uint8(255))
        shades = np.dstack([shades, alpha])
    return Image.fromarray(shades)


def _with_bytes_exchanged(content: bytes) -> bytes:
    """Return a PNG of 16 bits with the two bytes of every sample exchanged. Pillow reads only the first byte of each.

    The filters of PNG work on each byte of a pixel separately, so that no filter has to be applied again.
    """
    width, height = struct.unpack(">II", content[16:24])
    num_bytes = _PNG_BYTES[content[_PNG_DEPTH + 1]]
    passes = _PNG_PASSES if content[_PNG_DEPTH + 4] else ((0, 0, 1, 1),)
    sizes = [(-(-(height - row) // down), -(-(width - column) // right)) for column, row, right, down in passes]
    blocks = [(rows, 1 + columns * num_bytes) for rows, columns in sizes if rows > 0 and columns > 0]
    kept, packed, place = [_PNG], [], len(_PNG)
    while place < len(content):
        end = place + 12 + struct.unpack(">I", content[place : place + 4])[0]
        if content[place + 4 : place + 8] == b"IDAT":
            packed.append(content[place + 8 : end - 4])
        else:
            kept.append(content[place:end])
        place = end
    most = sum(rows * length for rows, length in blocks)
    data = np.frombuffer(zlib.decompressobj().decompress(b"".join(packed), most), np.uint8).copy()
    place = 0
    for rows, length in blocks:
        # A filter type, then pairs of bytes.
        pairs = data[place : place + rows * length].reshape(rows, length)[:, 1:]
        pairs[:] = pairs.reshape(rows, -1, 2)[..., ::-1].reshape(rows, -1)
        place += rows * length
    body = b"IDAT" + zlib.compress(data.tobytes(), 1)
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    return b"".join([*kept[:-1], chunk, kept[-1]])
