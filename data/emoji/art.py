"""Drawings: SVG files of Microsoft's Fluent emoji (flat style, MIT licence), rasterised with resvg."""

import io
import zipfile
from functools import cache
from pathlib import Path

from PIL import Image

from ..errors import RunError

ART_FILE = Path(__file__).with_name("art.zip")
ART_SOURCE = "npm package @iconify-json/fluent-emoji-flat 1.2.6 (Fluent emoji by Microsoft, MIT)"
RASTER_PX = 256


@cache
def object_names() -> tuple[str, ...]:
    """Return the sorted names of all drawings, the classes of the bundled models."""
    with zipfile.ZipFile(ART_FILE) as archive:
        return tuple(sorted(name.removesuffix(".svg") for name in archive.namelist()))


@cache
def object_raster(name: str) -> Image.Image:
    """Return the drawing `name` as a premultiplied RGBa image of RASTER_PX x RASTER_PX pixels.

    It is premultiplied, so that scaling and pasting leave no dark fringe at the outline.
    """
    try:
        import resvg_py
    except ImportError as error:
        raise RunError("drawing emoji needs resvg: pip install 'psctl[train]'") from error
    with zipfile.ZipFile(ART_FILE) as archive:
        svg = archive.read(f"{name}.svg").decode()
    png = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=RASTER_PX, height=RASTER_PX))
    return Image.open(io.BytesIO(png)).convert("RGBA").convert("RGBa")
