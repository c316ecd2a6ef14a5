"""Pictures of `psctl bench cache`: quality against time, and the images side by side."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image, ImageDraw

from ...profiling.machine import describe
from ...profiling.report.theme import LIGHT, Theme, add_wide_legend, new_figure, series_colours, style_axes, to_png

_KINDS = {
    "patch": "patch by patch, predicted",
    "image": "whole batch, predicted",
    "interval": "fixed interval",
    "accumulated": "accumulated change",
}
_CELL_PX, _LABEL_PX = 128, 110


def plot_quality(result: Mapping[str, Any], theme: Theme = LIGHT) -> bytes:
    """What was measured of quality against the speed-up, for the first batch; a line for every kind; a PNG."""
    first = result["rows"][0]
    rows = first["sides"]
    kinds = [kind for kind in _KINDS if any(row["kind"] == kind for row in rows)]
    colours = series_colours(kinds, theme)
    names = {
        "ssim": "SSIM against the image without cache",
        "lpips": "LPIPS against it (less is better)",
        "clip": f"CLIP score by {result['clip_judge']}",
        "fid": "FID against real images (less is better)",
    }
    shown = [name for name in names if any(name in row for row in rows)]
    lines = (len(shown) + 1) // 2
    figure = new_figure(5.6 * min(len(shown), 2), 4.2 * lines, theme)
    panels = figure.subplots(lines, min(len(shown), 2), squeeze=False).flatten()
    for ax in panels[len(shown) :]:
        ax.set_visible(False)
    for ax, key in zip(panels, shown, strict=False):
        for kind, marker in zip(kinds, "osD^", strict=False):
            points = sorted((row["speedup"], row[key]) for row in rows if row["kind"] == kind)
            ax.plot(*zip(*points, strict=True), color=colours[kind], marker=marker, markersize=5, label=_KINDS[kind])
        if key in rows[0]:
            ax.axhline(rows[0][key], color=theme.muted, linewidth=1, linestyle="--")
        style_axes(
            ax,
            theme,
            title=names[key],
            x_label=f"times as fast per image as without cache\n{first['label']}, {describe(dict(result))}",
            y_label="",
            grid_axis="both",
        )
    add_wide_legend(figure, panels[0], theme)
    return to_png(figure)


def plot_saved(result: Mapping[str, Any], theme: Theme = LIGHT) -> bytes:
    """Saved computation and speed-up against the threshold, patch by patch and whole batches; a PNG.

    A column for every batch, as in figure 15 of PatchedServe.
    """
    kinds = [kind for kind in ("patch", "image") if any(side["kind"] == kind for side in result["rows"][0]["sides"])]
    colours = series_colours(list(_KINDS), theme)
    figure = new_figure(max(5.0, 3.4 * len(result["rows"])), 6.2, theme)
    columns = figure.subplots(2, len(result["rows"]), squeeze=False, sharex=True, sharey="row")
    for column, row in enumerate(result["rows"]):
        for line, (key, name) in enumerate((("saved_computation", "saved computation"), ("speedup", "times as fast"))):
            ax = columns[line, column]
            for kind, marker in zip(kinds, "os", strict=False):
                sides = [side for side in row["sides"] if side["kind"] == kind]
                points = sorted((side["threshold"], side[key]) for side in sides)
                ax.plot(
                    *zip(*points, strict=True), color=colours[kind], marker=marker, markersize=5, label=_KINDS[kind]
                )
            style_axes(
                ax,
                theme,
                title=row["label"] if line == 0 else "",
                x_label="threshold (log scale)" if line else "",
                y_label="" if column else name,
                grid_axis="both",
            )
            if kinds:
                ax.set_xscale("log")
    for ax in columns.flat:
        # Only now: it also sets the upper end, which the panels of a line share.
        ax.set_ylim(bottom=0)
    add_wide_legend(figure, columns[0, 0], theme)
    return to_png(figure)


def sheet_of(images: Mapping[str, Sequence[Image.Image]]) -> bytes:
    """Images by the label of their side, one line each; a PNG."""
    batch_size = max(map(len, images.values()))
    width = _LABEL_PX + batch_size * (_CELL_PX + 4)
    sheet = Image.new("RGB", (width, len(images) * (_CELL_PX + 4)), "white")
    draw = ImageDraw.Draw(sheet)
    for line, (label, own) in enumerate(images.items()):
        top = line * (_CELL_PX + 4)
        draw.text((4, top + _CELL_PX // 2 - 6), label, fill="black")
        for column, image in enumerate(own):
            small = image.copy()
            small.thumbnail((_CELL_PX, _CELL_PX))
            if max(image.size) < _CELL_PX:
                small = image.resize((_CELL_PX, _CELL_PX * image.height // image.width))
            sheet.paste(small, (_LABEL_PX + column * (_CELL_PX + 4), top))
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    return buffer.getvalue()
