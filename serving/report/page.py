"""What all HTML reports share: the page around them, and pictures inside it. No scripts, nothing from the network."""

import base64
from collections.abc import Iterable
from html import escape
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from .grid import to_png

IMAGE_SIDE_PX = 256
DASH = "\N{EN DASH}"


def html_page(title: str, parts: Iterable[str], *, css: str = "") -> str:
    """A whole HTML file.

    Args:
        title: of the page, as plain text.
        parts: of its body, as HTML, one below the other; empty ones are left out.
        css: rules beyond those that all reports share.
    """
    common = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            # Says to the browser what the page promises: it loads nothing.
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">",
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{common}{css}</style></head><body><main>",
            *(part for part in parts if part),
            "</main></body></html>\n",
        ]
    )


def image_tag(source: Path | Image.Image, alt: str = "") -> str:
    """The image inside the page, at most 256 px wide and high; a file that cannot be read is named in its place."""
    if isinstance(source, Image.Image):
        return f'<img src="{data_uri(to_png(source, IMAGE_SIDE_PX))}" alt="{escape(alt)}">'
    try:
        with Image.open(source) as image:
            return f'<img src="{data_uri(to_png(image, IMAGE_SIDE_PX))}" alt="{escape(alt)}">'
    except (OSError, UnidentifiedImageError):
        return f"<span>{escape(Path(source).name)} cannot be read</span>"


def data_uri(png: bytes) -> str:
    """A PNG file as an address that holds it."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
