"""Encoding of images for clients. No torch."""

import base64
import io
from typing import TYPE_CHECKING

from .fields import OutputFormat

if TYPE_CHECKING:
    from PIL.Image import Image

MEDIA_TYPES: dict[OutputFormat, str] = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
_PNG_LEVEL = 1


def encode(image: "Image", output_format: OutputFormat, compression: int = 100) -> bytes:
    """Encode an image as a file; `compression` is the quality of JPEG and WebP, 0 to 100. Takes some milliseconds."""
    file = io.BytesIO()
    if output_format == "png":
        image.save(file, "PNG", compress_level=_PNG_LEVEL)
    else:
        image.save(file, output_format.upper(), quality=compression)
    return file.getvalue()


def base64_of(content: bytes) -> str:
    """Return bytes as base64 text, for JSON."""
    return base64.b64encode(content).decode("ascii")
