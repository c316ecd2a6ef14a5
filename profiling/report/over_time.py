"""Plots over the time of a run: arrivals, queue and batch, batch composition, and one bar per request."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba_array
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ...serving.core.request_state import RequestRecord
from .run_data import RunData, count_open, of_resolution, phases_s
from .theme import THEME, add_legend, new_figure, series_colours, style_axes

WIDTH_IN, HEIGHT_IN = 6.6, 3.3
TIMELINE_MAX_REQUESTS = 200
_TIME = "time since the start of the trace (s)"


def arrivals(data: RunData) -> Figure | None:
    """Plot arrivals per second in equal intervals, stacked by resolution."""
    if not data.records:
        return None
    figure = new_figure(WIDTH_IN, HEIGHT_IN)
    ax = figure.subplots()
    # About four arrivals an interval, so that bursts show and single arrivals do not look like bursts.
    num_bins = int(np.clip(len(data.records) / 4, 8, 60))
    edges = np.linspace(0, data.duration_s, num_bins + 1)
    width_s = edges[1] - edges[0]
    base = np.zeros(num_bins)
    for resolution, colour in series_colours(data.resolutions).items():
        times = [record.arrival_s for record in of_resolution(data.records, resolution)]
        rate = np.histogram(times, edges)[0] / width_s
        ax.bar(edges[:-1], rate, width_s * 0.9, bottom=base, align="edge", color=colour, label=resolution)
        base += rate
    last_s, label = data.records[-1].arrival_s, "requests per second"
    if last_s > 0:
        mean = len(data.records) / last_s
        label += f" (dashed: mean {mean:.3g})"
        ax.axhline(mean, color=THEME.ink, linewidth=1, linestyle=(0, (4, 3)), alpha=0.75)
    style_axes(ax, "Arrivals", _TIME, label)
    ax.set_xlim(0, data.duration_s)
    add_legend(ax)
    return figure


def queue(data: RunData) -> Figure | None:
    """Plot waiting requests and requests in the denoise batch, exactly from the events of the records."""
    if not data.records:
        return None
    spans = [phases_s(record) for record in data.records]
    figure = new_figure(WIDTH_IN, HEIGHT_IN)
    ax = figure.subplots()
    for label, colour, each in (
        ("active (denoising)", THEME.series[0], [(admitted, denoised) for _, admitted, denoised, _ in spans]),
        ("waiting (or being prepared)", THEME.series[1], [(arrival, admitted) for arrival, admitted, _, _ in spans]),
    ):
        times, counts = count_open(each)
        ax.fill_between(times, counts, step="post", color=colour, alpha=0.18, linewidth=0)
        ax.step(times, counts, where="post", color=colour, linewidth=1.5, label=label)
    style_axes(ax, "Queue and batch", _TIME, "requests")
    _count_axis(ax, data)
    add_legend(ax)
    return figure


def composition(data: RunData) -> Figure | None:
    """Plot the requests in the denoise batch, stacked by resolution, one value per iteration."""
    times, curves = data.composition()
    if not len(times):
        return None
    figure = new_figure(2 * WIDTH_IN, HEIGHT_IN)
    ax = figure.subplots()
    colours = series_colours(data.resolutions)
    base = np.zeros(len(times))
    for resolution, counts in curves.items():
        ax.fill_between(times, base, base + counts, step="post", color=colours[resolution], lw=0, label=resolution)
        base = base + counts
    style_axes(ax, "Batch composition", _TIME, "requests in the batch")
    _count_axis(ax, data)
    add_legend(ax)
    return figure


def timeline(data: RunData) -> Figure | None:
    """Plot one bar per request: waiting, denoising, decoding and saving. None if there are too many to distinguish."""
    records = data.records
    if not records or len(records) > TIMELINE_MAX_REQUESTS:
        return None
    row_in = float(np.clip(8.0 / len(records), 0.055, 0.16))
    figure = new_figure(2 * WIDTH_IN, max(2.4, 1.1 + row_in * len(records)))
    ax = figure.subplots()
    colours = series_colours(data.resolutions)
    _draw_requests(ax, records, colours)
    style_axes(ax, "Requests", _TIME, "request, by arrival", grid_axis="x")
    ax.set_xlim(0, data.duration_s)
    ax.set_ylim(len(records) - 0.4, -0.6)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, steps=[1, 2, 5, 10]))
    phases: list[Patch | Line2D] = [
        Patch(color=THEME.muted, alpha=0.35, label="waiting"),
        *(Patch(color=colour, label=f"denoising {name}") for name, colour in colours.items()),
        Patch(color=THEME.ink, alpha=0.8, label="decoding and saving"),
    ]
    if any(record.slo_met is False and record.status == "completed" for record in records):
        phases.append(Line2D([], [], color=THEME.bad, marker="|", markersize=8, lw=0, mew=2, label="missed deadline"))
    if any(record.status != "completed" for record in records):
        phases.append(Line2D([], [], color=THEME.bad, marker="x", markersize=6, lw=0, mew=1.6, label="no image"))
    add_legend(ax, handles=phases, ncols=len(phases))
    return figure


def _draw_requests(ax: Axes, records: Sequence[RequestRecord], colours: Mapping[str, str]) -> None:
    """Draw all bars as one artist, and all marks of a kind as another: hundreds of artists would take seconds."""
    bars, shades = [], []
    ended, missed = list[tuple[float, int]](), list[tuple[float, int]]()
    for row, record in enumerate(records):
        arrival, admitted, denoised, finish = phases_s(record)
        for begin, end, shade in (
            (arrival, admitted, (THEME.muted, 0.35)),
            (admitted, denoised, (colours[str(record.resolution)], 1.0)),
            (denoised, finish, (THEME.ink, 0.8)),
        ):
            if end > begin:
                low, high = row - 0.36, row + 0.36
                bars.append([(begin, low), (begin, high), (end, high), (end, low)])
                shades.append(shade)
        if record.status != "completed":
            ended.append((finish, row))
        elif record.slo_met is False and record.deadline_s is not None:
            missed.append((record.deadline_s, row))
    ax.add_collection(PolyCollection(bars, facecolors=to_rgba_array(shades), linewidths=0))
    looks: tuple[tuple[list[tuple[float, int]], dict[str, Any]], ...] = (
        (ended, {"marker": "x", "markersize": 5, "markeredgewidth": 1.6, "clip_on": False}),
        (missed, {"marker": "|", "markersize": 7, "markeredgewidth": 2.2}),
    )
    for points, look in looks:
        if points:
            ax.plot(*zip(*points, strict=True), color=THEME.bad, linestyle="", **look)


def _count_axis(ax: Axes, data: RunData) -> None:
    ax.set_xlim(0, data.duration_s)
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=2))
