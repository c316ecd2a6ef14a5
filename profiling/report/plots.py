"""Plots of a run's results: latency, SLO attainment and step latency; and the list of all plots of a report."""

from collections.abc import Callable

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from . import over_time
from .over_time import HEIGHT_IN, WIDTH_IN
from .run_data import RunData, latencies_of, of_resolution
from .theme import THEME, add_legend, new_figure, series_colours, style_axes, to_png

MAX_STEP_POINTS = 4000


def latency(data: RunData) -> Figure | None:
    """Plot histogram and cumulative distribution of the latency of completed requests, by resolution."""
    latencies = latencies_of(data.records)
    if not len(latencies):
        return None
    figure = new_figure(2 * WIDTH_IN, HEIGHT_IN)
    left, right = figure.subplots(1, 2)
    top_s = max(float(latencies[-1]), 1e-3)
    edges = np.linspace(0, top_s, int(np.clip(np.sqrt(len(latencies)) * 2.5, 8, 50)) + 1)
    base = np.zeros(len(edges) - 1)
    for resolution, colour in series_colours(data.resolutions).items():
        mine = latencies_of(of_resolution(data.records, resolution))
        if not len(mine):
            continue
        counts = np.histogram(mine, edges)[0]
        left.bar(edges[:-1], counts, np.diff(edges) * 0.92, base, align="edge", color=colour, label=resolution)
        base += counts
        share = np.arange(1, len(mine) + 1) / len(mine)
        right.step([0, *mine, top_s * 1.12], [0, *share, 1], where="post", color=colour, lw=1.8, label=resolution)
        slo_s = data.slo_of(resolution)
        if slo_s is not None and slo_s <= 1.12 * top_s:
            right.axvline(slo_s, color=colour, linewidth=1.2, linestyle=(0, (2, 2)))
    for percent, side in ((50, -1), (95, 1)):  # labels on the outer sides never collide
        value = float(np.percentile(latencies, percent))
        left.axvline(value, color=THEME.ink, linewidth=1, linestyle=(0, (4, 3)), alpha=0.75)
        ha = "left" if side > 0 else "right"
        place = {"xycoords": ("data", "axes fraction"), "xytext": (3 * side, 0), "textcoords": "offset points"}
        text = f"p{percent} {value:.3g} s"
        left.annotate(text, (value, 0.98), va="top", ha=ha, fontsize=8.5, color=THEME.ink, **place)
    label = "latency from arrival to image (s)"
    style_axes(left, "Latency of completed requests", label, "requests")
    style_axes(right, "Share finished within", f"{label}; dotted: SLO", "share of requests")
    left.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=2))
    left.set_ylim(0, float(base.max()) * 1.15)
    right.yaxis.set_major_formatter(PercentFormatter(1.0))
    right.set_ylim(0, 1.03)
    for ax in (left, right):
        ax.set_xlim(0, top_s * 1.12)
        add_legend(ax)
    return figure


def attainment(data: RunData) -> Figure | None:
    """Plot the share of requests within their SLO, by resolution and overall, with the numbers behind it."""
    judged = data.judged
    if not judged:
        return None
    colours = series_colours(data.resolutions)
    groups = [(name, colours[name], of_resolution(judged, name)) for name in data.resolutions]
    groups = [group for group in groups if len(group[2])]
    if len(groups) > 1:
        groups.append(("all", THEME.muted, judged))
    figure = new_figure(WIDTH_IN, HEIGHT_IN)
    ax = figure.subplots()
    for i, (_, colour, rows) in enumerate(groups):
        met = sum(record.slo_met is True for record in rows)
        share = met / len(rows)
        ax.bar(i, 1, 0.62, color=THEME.grid)
        ax.bar(i, share, 0.62, color=colour)
        ax.text(i, 1.09, f"{share:.1%}", ha="center", va="bottom", fontsize=11, fontweight="bold", color=THEME.ink)
        ax.text(i, 1.02, f"{met} of {len(rows)}", ha="center", va="bottom", fontsize=8.5, color=THEME.muted)
    style_axes(ax, "SLO attainment", "resolution (px)", "share within the SLO")
    ax.set_xticks(range(len(groups)), [name for name, _, _ in groups])
    ax.set_xlim(-0.7, len(groups) - 0.3)
    ax.set_ylim(0, 1.22)
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1])
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    return figure


def step_latency(data: RunData) -> Figure | None:
    """Plot the duration of a denoising iteration against the batch size: a point per step, lines through medians."""
    if not len(data.step_active):
        return None
    active, step_ms = data.step_active, data.step_duration_s * 1e3
    mixes = np.array(["mixed" if len(counts) != 1 else next(iter(counts)) for counts in data.step_counts])
    figure = new_figure(WIDTH_IN, HEIGHT_IN)
    ax = figure.subplots()
    colours = series_colours(data.resolutions) | {"mixed": THEME.muted}
    spread = np.random.default_rng(0).uniform(-0.16, 0.16, len(active))
    for name, colour in colours.items():
        mine = np.flatnonzero(mixes == name)
        if not len(mine):
            continue
        # Evenly thinned: more points cannot be distinguished, and make the plot slow to draw.
        shown = mine[:: len(mine) // MAX_STEP_POINTS + 1]
        ax.scatter(active[shown] + spread[shown], step_ms[shown], 9, color=colour, alpha=0.35, linewidths=0, zorder=2)
        sizes = np.unique(active[mine])
        medians = [float(np.median(step_ms[mine][active[mine] == size])) for size in sizes]
        ax.plot(sizes, medians, "o-", color=colour, linewidth=1.6, markersize=4, label=name, zorder=3)
    style_axes(ax, "Step latency", "requests in the batch (line: median)", "duration of a step (ms)")
    # The slowest steps of a run are warm-up; they would flatten all the others.
    high = float(np.percentile(step_ms, 99)) * 1.25
    num_above = int((step_ms > high).sum())
    ax.set_ylim(0, max(high, 1e-3))
    if num_above:
        text = f"{num_above} of {len(step_ms)} steps above"
        ax.text(0.99, 0.97, text, transform=ax.transAxes, ha="right", va="top", fontsize=8.5, color=THEME.muted)
    ax.set_xlim(0.5, int(active.max()) + 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    add_legend(ax)
    return figure


Plot = Callable[[RunData], Figure | None]

PLOTS: dict[str, tuple[Plot, str]] = {
    "arrivals": (over_time.arrivals, "Requests that arrived per second, by resolution."),
    "queue": (over_time.queue, "Requests that wait, and requests in the denoise batch, over time."),
    "composition": (over_time.composition, "Requests in the denoise batch by resolution, over time."),
    "latency": (latency, "Distribution of the latency of completed requests, by resolution."),
    "attainment": (attainment, "Share of the requests whose image came within the SLO, by resolution."),
    "step-latency": (step_latency, "Duration of a denoising iteration against the number of requests in it."),
    "timeline": (over_time.timeline, "When each request waited, was denoised and was decoded."),
}
"""Plots in order: file name, the function that draws the plot (None if there is nothing to show), and description."""

WIDE_PLOTS = frozenset({"composition", "latency", "timeline"})


def draw_all(data: RunData) -> dict[str, bytes]:
    """Return all plots that have something to show, as PNG."""
    figures = {name: plot(data) for name, (plot, _) in PLOTS.items()}
    return {name: to_png(figure) for name, figure in figures.items() if figure is not None}
