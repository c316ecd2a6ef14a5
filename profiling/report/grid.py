"""Image grids: many images of several sizes on one sheet, with captions."""

import io
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont, ImageOps

from ...data.errors import UsageError

GAP_PX = 10
CAPTION_LINES = 2
BACKGROUND, INK, CELL = "#ffffff", "#1c2230", "#f2f4f8"


def image_grid(
    images: Sequence[Image.Image], captions: Sequence[str] | None = None, columns: int = 6, cell_px: int = 192
) -> Image.Image:
    """Lay out images row by row in square cells and return an RGB image.

    An image that is larger than its cell is shrunk; a smaller one is enlarged only by a whole factor. Both keep their
    aspect ratio. Images of the cell's size therefore show their true pixels, and a 128 px image can look smaller than a
    256 px one.

    Args:
        images: at least one image, of any mode and size.
        captions: one text per image, or None; each is cut to two lines with an ellipsis.
        columns: number of cells in a row, fewer if there are fewer images.
        cell_px: side of a cell in pixels.

    Raises:
        UsageError: there is no image, the number of captions differs, or a column count or cell side is out of range.
    """
    if not images:
        raise UsageError("an image grid needs at least one image, but none was given")
    if captions is not None and len(captions) != len(images):
        raise UsageError(
            f"{len(captions)} captions were given for {len(images)} images, but there must be one for each"
        )
    if columns < 1:
        raise UsageError(f"an image grid has {columns} columns, but it must have at least 1")
    if cell_px < 16:
        raise UsageError(f"a cell is {cell_px} px, but it must be at least 16 px")
    columns = min(columns, len(images))
    rows = math.ceil(len(images) / columns)
    font_px = max(10, round(cell_px / 14))
    line_px = round(font_px * 1.3)
    text_px = 0 if captions is None else CAPTION_LINES * line_px + 4
    step_x, step_y = cell_px + GAP_PX, cell_px + text_px + GAP_PX
    sheet = Image.new("RGB", (columns * step_x + GAP_PX, rows * step_y + GAP_PX), BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    for i, image in enumerate(images):
        left, top = GAP_PX + i % columns * step_x, GAP_PX + i // columns * step_y
        draw.rectangle((left, top, left + cell_px - 1, top + cell_px - 1), fill=CELL)
        tile = _fit(image, cell_px)
        sheet.paste(tile, (left + (cell_px - tile.width) // 2, top + (cell_px - tile.height) // 2))
        if captions is not None:
            for row, line in enumerate(wrap(captions[i], _font(font_px), cell_px)):
                draw.text((left, top + cell_px + 4 + row * line_px), line, INK, _font(font_px))
    return sheet


def wrap(text: str, font: ImageFont.FreeTypeFont, width_px: int, max_lines: int = CAPTION_LINES) -> list[str]:
    """Break a text into at most `max_lines` lines no wider than `width_px`; "…" replaces the omitted rest."""
    lines: list[str] = []
    words = text.split()
    while words:
        count = len(words)
        while count > 1 and font.getlength(" ".join(words[:count])) > width_px:
            count -= 1
        is_last = len(lines) == max_lines - 1
        line = " ".join(words if is_last else words[:count])
        if font.getlength(line) > width_px:
            while line and font.getlength(line + "…") > width_px:
                line = line[:-1]
            line = line.rstrip() + "…"
        lines.append(line)
        words = [] if is_last else words[count:]
    return lines


def to_png(image: Image.Image, largest_side_px: int) -> bytes:
    """Return the image as RGB PNG, shrunk if a side is longer than `largest_side_px`."""
    image = image.convert("RGB")
    image.thumbnail((largest_side_px, largest_side_px), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _fit(image: Image.Image, cell_px: int) -> Image.Image:
    image = image.convert("RGB")
    if factor := cell_px // max(image.size):
        return ImageOps.scale(image, factor, Image.Resampling.NEAREST)
    image.thumbnail((cell_px, cell_px), Image.Resampling.LANCZOS, reducing_gap=None)
    return image


@cache
def _font(size_px: int) -> ImageFont.FreeTypeFont:
    # matplotlib ships DejaVu Sans, so that captions look the same on every machine.
    return ImageFont.truetype(Path(font_manager.findfont("DejaVu Sans")), size_px)
