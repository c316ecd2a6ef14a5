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
_PNG_DEPTH = 24  # bits of a sample; after it come the type of colour, two fixed bytes, and whether it is interlaced
_PNG_GREY = 0
_PNG_BYTES = {2: 6, 4: 4, 6: 8}  # of a pixel of 16 bits, by type of colour
_PNG_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
_EIGHT_BITS = ((np.arange(1 << 16) * 255 + 32767) // 65535).astype(np.uint8)
"""By value of 16 bits."""
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


def decode(content: bytes, name: str) -> Image.Image:
    """Decode an image into mode RGB, or RGBA if the file has transparency, upright by its EXIF orientation (unreadable
    EXIF counts as none).

    Grey, palette, CMYK, YCbCr and Lab images become RGB; colour profiles are not applied. CMYK in JPEG files is taken
    to be inverted, as Adobe's programs write it (Pillow does so whether their marker is there or not). 16 bits are
    scaled to 8, where Pillow clips them or drops the lower ones. Of an animation the first frame is taken.

    Raises:
        BadImageError: it is damaged or no image, or its values have no defined range (32-bit TIFF).
    """
    try:
        is_png = content.startswith(_PNG)
        if is_png:
            # Loading looks at no checksum and gives other pixels without a word; this compares them all.
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
            # Pillow scales the pixels, but not what they are compared with.
            image.info["transparency"] = (image.info["transparency"] & most) * 255 // most
        return _converted(image, name)
    except BadImageError:
        raise
    except _DAMAGE as error:
        raise _bad(content, name, error) from error


def decode_rgb(content: bytes, name: str) -> Image.Image:
    """Decode an image into mode RGB: what is transparent shows white. Raises as `decode`, which says the rest."""
    image = decode(content, name)
    if image.mode == "RGBA":
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image


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


def _opened(content: bytes) -> Image.Image:
    """The image of a file, as its EXIF orientation has it; unreadable EXIF counts as none."""
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
    """An image of grey values (height, width) or colours (height, width, channels), and the one that is transparent."""
    values = np.dstack([values] * 3) if values.ndim == 2 else values
    shades = _EIGHT_BITS[values]
    if transparent is not None:
        alpha = np.where((values == transparent).all(-1), np.uint8(0), np.uint8(255))
        shades = np.dstack([shades, alpha])
    return Image.fromarray(shades)


def _with_bytes_exchanged(content: bytes) -> bytes:
    """A PNG of 16 bits with the two bytes of every sample exchanged. Of each sample Pillow reads the first byte only.

    The filters of PNG work on every byte of a pixel by itself, so that nothing has to be filtered anew.
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
