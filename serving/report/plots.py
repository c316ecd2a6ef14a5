"""Plots of what a run gave: latency, SLO attainment and step latency; and the list of all plots of a report."""

from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from . import over_time
from .over_time import HEIGHT_IN, WIDTH_IN
from .run_data import RunData
from .theme import DARK, LIGHT, Theme, add_legend, new_figure, series_colours, style_axes, to_png

MAX_STEP_POINTS = 4000


def latency(data: RunData, theme: Theme) -> Figure | None:
    """Histogram and cumulative distribution of the latency of completed requests, by resolution."""
    completed = data.completed
    if completed.empty:
        return None
    figure = new_figure(2 * WIDTH_IN, HEIGHT_IN, theme)
    left, right = figure.subplots(1, 2)
    latencies = completed["latency_s"].to_numpy(dtype=float)
    top_s = max(float(latencies.max()), 1e-3)
    edges = np.linspace(0, top_s, int(np.clip(np.sqrt(len(latencies)) * 2.5, 8, 50)) + 1)
    base = np.zeros(len(edges) - 1)
    for resolution, colour in series_colours(data.resolutions, theme).items():
        mine = np.sort(data.of_resolution(completed, resolution)["latency_s"].to_numpy(dtype=float))
        if not len(mine):
            continue
        counts = np.histogram(mine, edges)[0]
        left.bar(edges[:-1], counts, np.diff(edges) * 0.92, base, align="edge", color=colour, label=resolution)
        base += counts
        share = np.arange(1, len(mine) + 1) / len(mine)
        right.step([0, *mine, top_s], [0, *share, 1], where="post", color=colour, linewidth=1.8, label=resolution)
        slo_s = data.slo_of(resolution)
        if slo_s is not None and slo_s <= 1.6 * top_s:
            right.axvline(slo_s, color=colour, linewidth=1.2, linestyle=(0, (2, 2)))
    for percent in (50, 95):
        value = float(np.percentile(latencies, percent))
        left.axvline(value, color=theme.ink, linewidth=1, linestyle=(0, (4, 3)), alpha=0.75)
        left.annotate(
            f"p{percent} {value:.3g} s",
            (value, 0.98),
            xycoords=("data", "axes fraction"),
            xytext=(3, 0),
            textcoords="offset points",
            va="top",
            fontsize=8.5,
            color=theme.ink,
        )
    label = "latency from arrival to image (s)"
    style_axes(left, theme, title="Latency of completed requests", x_label=label, y_label="requests")
    style_axes(
        right, theme, title="Share finished within", x_label=f"{label}; dotted: SLO", y_label="share of requests"
    )
    left.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=2))
    left.set_ylim(0, float(base.max()) * 1.15)
    right.yaxis.set_major_formatter(PercentFormatter(1.0))
    right.set_ylim(0, 1.03)
    for ax in (left, right):
        ax.set_xlim(left=0)
        add_legend(ax, theme)
    return figure


def attainment(data: RunData, theme: Theme) -> Figure | None:
    """Share of the requests within their SLO, by resolution and of all, with the numbers behind it."""
    judged = data.records[data.records["slo_met"].notna()]
    if judged.empty:
        return None
    colours = series_colours(data.resolutions, theme)
    groups = [(name, colours[name], data.of_resolution(judged, name)) for name in data.resolutions]
    groups = [group for group in groups if len(group[2])]
    if len(groups) > 1:
        groups.append(("all", theme.muted, judged))
    figure = new_figure(WIDTH_IN, HEIGHT_IN, theme)
    ax = figure.subplots()
    for i, (_, colour, rows) in enumerate(groups):
        met = int(rows["slo_met"].astype(bool).sum())
        share = met / len(rows)
        ax.bar(i, 1, 0.62, color=theme.grid)
        ax.bar(i, share, 0.62, color=colour)
        ax.text(i, 1.09, f"{share:.1%}", ha="center", va="bottom", fontsize=11, fontweight="bold", color=theme.ink)
        ax.text(i, 1.02, f"{met} of {len(rows)}", ha="center", va="bottom", fontsize=8.5, color=theme.muted)
    style_axes(ax, theme, title="SLO attainment", x_label="resolution (px)", y_label="share within the SLO")
    ax.set_xticks(range(len(groups)), [name for name, _, _ in groups])
    ax.set_xlim(-0.7, len(groups) - 0.3)
    ax.set_ylim(0, 1.22)
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1])
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    return figure


def step_latency(data: RunData, theme: Theme) -> Figure | None:
    """Duration of a denoising iteration against the batch: one point a step, lines through the medians."""
    if data.steps.empty:
        return None
    steps = pd.DataFrame(
        {
            "active": data.steps["active"].to_numpy(dtype=int),
            "ms": data.steps["duration_s"].to_numpy(dtype=float) * 1e3,
            "mix": [_mix(dict(value)) for value in data.steps["resolutions"]],
        }
    )
    figure = new_figure(WIDTH_IN, HEIGHT_IN, theme)
    ax = figure.subplots()
    colours = series_colours(data.resolutions, theme) | {"mixed": theme.muted}
    spread = np.random.default_rng(0).uniform(-0.16, 0.16, len(steps))
    for name, colour in colours.items():
        mine = steps[steps["mix"] == name]
        if mine.empty:
            continue
        # Evenly thinned: more points than this cannot be told apart, but make the picture slow to draw.
        points = mine.iloc[:: len(mine) // MAX_STEP_POINTS + 1]
        ax.scatter(
            points["active"] + spread[points.index], points["ms"], s=9, color=colour, alpha=0.35, linewidths=0, zorder=2
        )
        median = mine.groupby("active")["ms"].median()
        ax.plot(median.index, median, "o-", color=colour, linewidth=1.6, markersize=4, label=name, zorder=3)
    style_axes(
        ax,
        theme,
        title="Step latency",
        x_label="requests in the batch (line: median)",
        y_label="duration of a step (ms)",
    )
    # The slowest steps of a run are warm-up; they would flatten all the others.
    high = float(np.percentile(steps["ms"], 99)) * 1.25
    num_above = int((steps["ms"] > high).sum())
    ax.set_ylim(0, high)
    if num_above:
        ax.annotate(
            f"{num_above} of {len(steps)} steps above",
            (0.99, 0.97),
            xycoords="axes fraction",
            ha="right",
            va="top",
            fontsize=8.5,
            color=theme.muted,
        )
    ax.set_xlim(0.5, int(steps["active"].max()) + 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    add_legend(ax, theme)
    return figure


Plot = Callable[[RunData, Theme], Figure | None]

PLOTS: dict[str, tuple[Plot, str]] = {
    "arrivals": (over_time.arrivals, "Requests that arrived per second, by resolution."),
    "queue": (over_time.queue, "Requests that wait, and requests in the denoise batch, over time."),
    "composition": (over_time.composition, "Requests in the denoise batch by resolution, over time."),
    "attainment": (attainment, "Share of the requests whose image came within the SLO, by resolution."),
    "latency": (latency, "Distribution of the latency of completed requests, by resolution."),
    "step-latency": (step_latency, "Duration of a denoising iteration against the number of requests in it."),
    "timeline": (over_time.timeline, "When each request waited, was denoised and was decoded."),
}
"""File name of each plot, the function that draws it (None: nothing to show) and what it shows, in the report's order."""

WIDE_PLOTS = frozenset({"latency", "timeline"})


def draw_all(data: RunData) -> dict[str, tuple[bytes, bytes]]:
    """All plots that have something to show, as PNG in light and in dark colours."""
    drawn = {}
    for name, (plot, _) in PLOTS.items():
        light, dark = plot(data, LIGHT), plot(data, DARK)
        if light is not None and dark is not None:
            drawn[name] = to_png(light), to_png(dark)
    return drawn


def _mix(counts: dict[str, int]) -> str:
    """The only resolution of a step, or "mixed"."""
    return next(iter(counts)) if len(counts) == 1 else "mixed"
