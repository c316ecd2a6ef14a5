"""HTML reports from the templates beside this module: one file each, without scripts or network resources."""

import base64
from collections.abc import Iterable, Mapping
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image, UnidentifiedImageError

from . import words
from .grid import to_png

IMAGE_SIDE_PX = 256
_FOLDER = Path(__file__).parent


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {name: getattr(words, name) for name in ("number", "share", "seconds", "plain", "figure")}
    made.filters |= {"data_uri": data_uri, "image_tag": lambda source: Markup(image_tag(source))}
    made.globals["common_css"] = Markup((_FOLDER / "report.css").read_text(encoding="utf-8"))
    return made


def render(template: str, **context: Any) -> str:
    """Render a template; texts are escaped. Filters are jinja's, those of `words`, `data_uri` and `image_tag`."""
    return _environment().get_template(template).render(context)


def page(title: str, parts: Iterable[str], *, css: str = "") -> str:
    """Return a whole HTML file.

    Args:
        title: title of the page, as plain text.
        parts: parts of the body as HTML, from top to bottom; empty ones are omitted.
        css: rules in addition to those that all reports share.
    """
    return render("parts.html", title=title, css=Markup(css), parts=[Markup(part) for part in parts if part])


def plots_of(drawn: Mapping[str, bytes], alt: Mapping[str, str], wide: Iterable[str] = ()) -> list[Any]:
    """Return plots (PNG) in the form that the templates' macro `plots` takes."""
    return [(png, alt[name], name in wide) for name, png in drawn.items()]


def image_tag(source: Path | Image.Image, alt: str = "") -> str:
    """Return a tag that embeds an image, at most 256 px wide and high; the name of a file that cannot be read."""
    if isinstance(source, Image.Image):
        return f'<img src="{data_uri(to_png(source, IMAGE_SIDE_PX))}" alt="{escape(alt)}">'
    try:
        with Image.open(source) as image:
            return image_tag(image, alt)
    except (OSError, UnidentifiedImageError):
        return f"<span>{escape(Path(source).name)} cannot be read</span>"


def data_uri(png: bytes) -> str:
    """Return a PNG as a data URI."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
