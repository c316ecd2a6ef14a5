"""Colours and style of all axes. In dark mode, pages invert the colours of plots."""

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

DOTS_PER_INCH = 150
_LETTER_PT, _MARKER_PT = 4.9, 24.0
"""Maximum average width of a letter in a legend, and the space around its text, in points."""
_LEGEND: dict[str, Any] = {"frameon": False, "fontsize": 8.5, "handlelength": 1.1, "columnspacing": 1.1}


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours; those of `series` are assigned to resolutions from the smallest to the largest."""

    background: str
    ink: str
    muted: str
    grid: str
    good: str
    bad: str
    series: tuple[str, ...]


# Neighbours differ in lightness as well as in hue, so that they stay distinct for colour-blind readers and in grey.
THEME = Theme(
    background="#ffffff",
    ink="#1c2230",
    muted="#667085",
    grid="#e6e9ef",
    good="#2e9e73",
    bad="#d1495b",
    series=("#2f6fde", "#f0913a", "#1f9e89", "#8e5bd0", "#d1495b", "#7fb800", "#0fb5d6", "#a0703c"),
)

MARKERS = "osD^vPXh"
"""Markers of the series' points, in order."""


def series_colours(labels: Sequence[str]) -> dict[str, str]:
    """Return one colour per label, in order; if the fixed colours do not suffice, evenly spaced colours of a map."""
    if len(labels) <= len(THEME.series):
        return dict(zip(labels, THEME.series, strict=False))
    colours = colormaps["turbo"]
    return {label: to_hex(colours((i + 0.5) / len(labels))) for i, label in enumerate(labels)}


def new_figure(width_in: float, height_in: float) -> Figure:
    """Return an empty figure in the background colour, without pyplot, so that it need not be closed."""
    return Figure(figsize=(width_in, height_in), dpi=DOTS_PER_INCH, layout="constrained", facecolor=THEME.background)


def style_axes(
    ax: Axes, title: str, x_label: str, y_label: str = "", *, grid_axis: Literal["x", "y", "both"] = "y"
) -> None:
    """Apply title, labels and the common style: no box, a light grid behind the data, room between ticks and labels."""
    ax.set_facecolor(THEME.background)
    ax.set_title(title, loc="left", color=THEME.ink, fontsize=11, fontweight="bold", pad=10)
    ax.set_xlabel(x_label, color=THEME.muted, fontsize=9)
    ax.set_ylabel(y_label, color=THEME.muted, fontsize=9)
    ax.tick_params(colors=THEME.muted, labelsize=8.5, length=0, pad=5)
    for side, spine in ax.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(THEME.muted)
        spine.set_linewidth(0.8)
    ax.set_axisbelow(True)
    ax.grid(visible=True, axis=grid_axis, color=THEME.grid, linewidth=0.8)


def add_legend(ax: Axes, *, handles: Sequence[Artist] | None = None, ncols: int = 4) -> None:
    """Add a legend without a box above the right end of the axes, of the given handles or of all labelled artists."""
    handles = ax.get_legend_handles_labels()[0] if handles is None else handles
    if not handles:
        return
    ax.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        borderaxespad=0.35,
        ncols=min(len(handles), ncols),
        handletextpad=0.5,
        labelcolor=THEME.ink,
        **_LEGEND,
    )


def add_wide_legend(figure: Figure, ax: Axes) -> None:
    """Add a legend over the whole width, above the title, in as many columns as fit, at most four."""
    handles, labels = ax.get_legend_handles_labels()
    room_pt = figure.get_figwidth() * 72
    most = int(room_pt // (_LETTER_PT * max(map(len, labels), default=0) + _MARKER_PT))
    columns = max(1, min(4, most))
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, labelcolor=THEME.ink, **_LEGEND)


def to_png(figure: Figure) -> bytes:
    """Return the figure as PNG; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # These warn of axes too small for their labels and values too large to draw, which a user cannot fix.
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        # `savefig` would draw everything twice, the first time for the layout alone.
        FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()
