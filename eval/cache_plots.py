"""Pictures of `psctl bench cache`: quality against time, and the images side by side."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image, ImageDraw

from ..profiling.machine import describe
from ..serving.report.theme import LIGHT, Theme, add_wide_legend, new_figure, series_colours, style_axes, to_png

_KINDS = {
    "patch": "patch by patch, predicted",
    "image": "whole batch, predicted",
    "interval": "fixed interval",
    "accumulated": "accumulated change",
}
_CELL_PX, _LABEL_PX = 128, 110


def plot_cache_bench(result: Mapping[str, Any], theme: Theme = LIGHT) -> bytes:
    """SSIM and CLIP score against the speed-up, a line for every kind of caching; a PNG."""
    rows = result["rows"]
    kinds = [kind for kind in _KINDS if any(row["kind"] == kind for row in rows)]
    colours = series_colours(kinds, theme)
    has_clip = "clip" in rows[0]
    figure = new_figure(11.0 if has_clip else 6.0, 4.2, theme)
    panels = figure.subplots(1, 2 if has_clip else 1, squeeze=False)[0]
    names = [("ssim", "SSIM against the image without cache"), ("clip", f"CLIP score by {result['clip_judge']}")]
    for ax, (key, label) in zip(panels, names, strict=False):
        for kind, marker in zip(kinds, "osD^", strict=False):
            points = sorted((row["speedup"], row[key]) for row in rows if row["kind"] == kind)
            ax.plot(*zip(*points, strict=True), color=colours[kind], marker=marker, markersize=5, label=_KINDS[kind])
        if key == "clip":
            ax.axhline(rows[0]["clip"], color=theme.muted, linewidth=1, linestyle="--")
        style_axes(
            ax,
            theme,
            title=label,
            x_label=f"times as fast per image as without cache\n{result['batch']}, {describe(dict(result))}",
            y_label="",
            grid_axis="both",
        )
    add_wide_legend(figure, panels[0], theme)
    return to_png(figure)


def sheet_of(images: Mapping[str, Sequence[Image.Image]], batch_size: int) -> bytes:
    """The images of the first batch of every side, one line each; a PNG."""
    width = _LABEL_PX + batch_size * (_CELL_PX + 4)
    sheet = Image.new("RGB", (width, len(images) * (_CELL_PX + 4)), "white")
    draw = ImageDraw.Draw(sheet)
    for line, (label, own) in enumerate(images.items()):
        top = line * (_CELL_PX + 4)
        draw.text((4, top + _CELL_PX // 2 - 6), label, fill="black")
        for column, image in enumerate(own[:batch_size]):
            small = image.copy()
            small.thumbnail((_CELL_PX, _CELL_PX))
            if max(image.size) < _CELL_PX:
                small = image.resize((_CELL_PX, _CELL_PX * image.height // image.width))
            sheet.paste(small, (_LABEL_PX + column * (_CELL_PX + 4), top))
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    return buffer.getvalue()
