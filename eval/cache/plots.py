"""Plots of `psctl bench cache`: quality against time, and what is saved at which threshold."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from ...data.run_facts import describe
from ...profiling.report.theme import THEME, add_wide_legend, new_figure, series_colours, style_axes, to_png

_KINDS = {
    "patch": "each for itself, predicted",
    "image": "whole batch, predicted",
    "interval": "fixed interval",
    "accumulated": "accumulated change",
    "schedule": "schedule",
}


def plot_quality(result: Mapping[str, Any]) -> bytes:
    """Plot the measured quality against the speed-up for the first batch, a line for every kind. Returns a PNG."""
    first = result["rows"][0]
    rows = first["sides"]
    names = {
        "ssim": "SSIM against the image without cache",
        "lpips": "LPIPS against it (less is better)",
        "clip": f"CLIP score by {result['clip_judge']}",
        "fid": "FID against real images (less is better)",
    }
    shown = [name for name in names if any(name in row for row in rows)]
    lines = (len(shown) + 1) // 2
    figure = new_figure(5.6 * min(len(shown), 2), 4.2 * lines)
    panels = figure.subplots(lines, min(len(shown), 2), squeeze=False).flatten()
    for ax in panels[len(shown) :]:
        ax.set_visible(False)
    for ax, key in zip(panels, shown, strict=False):
        _draw(ax, rows, "speedup", key)
        if key in rows[0]:
            ax.axhline(rows[0][key], color=THEME.muted, linewidth=1, linestyle="--")
        style_axes(
            ax,
            title=names[key],
            x_label=f"times as fast per image as without cache\n{first['label']}, {describe(result)}",
            y_label="",
            grid_axis="both",
        )
    add_wide_legend(figure, panels[0])
    return to_png(figure)


def plot_saved(result: Mapping[str, Any]) -> bytes:
    """Plot saved computation and speed-up against the threshold, for single images and whole batches. Returns a PNG.

    There is a column for every batch, as in figure 15 of PatchedServe.
    """
    figure = new_figure(max(5.0, 3.4 * len(result["rows"])), 6.2)
    columns = figure.subplots(2, len(result["rows"]), squeeze=False, sharex=True, sharey="row")
    for column, row in enumerate(result["rows"]):
        for line, (key, name) in enumerate((("saved_computation", "saved computation"), ("speedup", "times as fast"))):
            ax = columns[line, column]
            _draw(ax, row["sides"], "threshold", key, kinds=("patch", "image"))
            style_axes(
                ax,
                title=row["label"] if line == 0 else "",
                x_label="threshold (log scale)" if line else "",
                y_label="" if column else name,
                grid_axis="both",
            )
            if ax.lines:
                ax.set_xscale("log")
    for ax in columns.flat:
        # After drawing, because it also fixes the upper end, which the panels of a row share.
        ax.set_ylim(bottom=0)
    add_wide_legend(figure, columns[0, 0])
    return to_png(figure)


def _draw(ax: Axes, rows: Sequence[Mapping[str, Any]], x: str, y: str, kinds: Sequence[str] = tuple(_KINDS)) -> None:
    """Draw one figure against another, a line for each measured kind."""
    colours = series_colours(list(_KINDS))
    for kind, marker in zip(kinds, "osD^", strict=False):
        if points := sorted((row[x], row[y]) for row in rows if row["kind"] == kind and row[x] is not None):
            line = {"color": colours[kind], "marker": marker, "markersize": 5, "label": _KINDS[kind]}
            ax.plot(*zip(*points, strict=True), **line)
