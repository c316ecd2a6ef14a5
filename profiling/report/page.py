"""The frame of every HTML report: one file, no scripts, nothing from the network, all images inside it."""

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from .grid import to_png

IMAGE_SIDE_PX = 256
DASH = "\N{EN DASH}"


def page(title: str, parts: Iterable[str], *, css: str = "") -> str:
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


def header(title: str, facts: Iterable[object]) -> str:
    """The heading of a page and a line of facts; empty facts are left out."""
    line = " · ".join(str(fact) for fact in facts if fact)
    return f"<header><h1>{escape(title)}</h1><p>{escape(line)}</p></header>"


def figure(light: bytes, dark: bytes, alt: str, *, is_wide: bool = False) -> str:
    """A plot (PNG) that follows the reader's colour scheme."""
    wide = ' class="wide"' if is_wide else ""
    return (
        f'<figure{wide}><picture><source media="(prefers-color-scheme: dark)" srcset="{data_uri(dark)}">'
        f'<img src="{data_uri(light)}" alt="{escape(alt)}"></picture></figure>'
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, num_words: int = 1) -> str:
    """A table whose first `num_words` columns are words and the others numbers."""

    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}>{escape(cell)}</{tag}>" if index < num_words else f'<{tag} class="number">{escape(cell)}</{tag}>'
            for index, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{cells(columns, "th")}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def pairs(rows: Iterable[tuple[str, str]]) -> str:
    """A table of names and values."""
    body = "".join(f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in rows)
    return f'<div class="scroll"><table class="pair"><tbody>{body}</tbody></table></div>'


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
    """A PNG as the source of an image."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
