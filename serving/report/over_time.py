"""Plots over the time of a run: arrivals, queue and batch, batch composition, and one bar per request."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from .run_data import RunData, count_between
from .theme import Theme, add_legend, new_figure, series_colours, style_axes

WIDTH_IN, HEIGHT_IN = 6.6, 3.3
TIMELINE_MAX_REQUESTS = 200
_TIME = "time since the start of the trace (s)"


def arrivals(data: RunData, theme: Theme) -> Figure | None:
    """Arrivals per second in equal intervals, stacked by resolution."""
    if data.records.empty:
        return None
    figure = new_figure(WIDTH_IN, HEIGHT_IN, theme)
    ax = figure.subplots()
    # About four arrivals an interval, so that bursts show and single arrivals do not look like bursts.
    num_bins = int(np.clip(len(data.records) / 4, 8, 60))
    edges = np.linspace(0, data.duration_s, num_bins + 1)
    width_s = edges[1] - edges[0]
    base = np.zeros(num_bins)
    for resolution, colour in series_colours(data.resolutions, theme).items():
        times = data.of_resolution(data.records, resolution)["arrival_s"].to_numpy(dtype=float)
        rate = np.histogram(times, edges)[0] / width_s
        ax.bar(edges[:-1], rate, width_s * 0.9, bottom=base, align="edge", color=colour, label=resolution)
        base += rate
    last_s = float(data.records["arrival_s"].max())
    if last_s > 0:
        mean = len(data.records) / last_s
        ax.axhline(mean, color=theme.ink, linewidth=1, linestyle=(0, (4, 3)), alpha=0.75)
        ax.annotate(
            f"mean {mean:.3g} /s",
            (1.0, mean),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8.5,
            color=theme.ink,
        )
    style_axes(ax, theme, title="Arrivals", x_label=_TIME, y_label="requests per second")
    ax.set_xlim(0, data.duration_s)
    add_legend(ax, theme)
    return figure


def queue(data: RunData, theme: Theme) -> Figure | None:
    """Requests that wait and requests in the denoise batch, exact from the events of the records."""
    if data.records.empty:
        return None
    records = data.records
    # A request that never ended or joined (cancelled before it arrived) counts as ended when it arrived.
    finish = records["finish_s"].fillna(records["arrival_s"]).clip(lower=records["arrival_s"])
    left_queue = records["admitted_s"].fillna(finish)
    joined = records[records["admitted_s"].notna()]
    left_batch = joined["denoise_end_s"].fillna(finish[joined.index])
    figure = new_figure(WIDTH_IN, HEIGHT_IN, theme)
    ax = figure.subplots()
    for label, colour, begin, end in (
        ("active (denoising)", theme.series[0], joined["admitted_s"], left_batch),
        ("waiting (or being prepared)", theme.series[1], records["arrival_s"], left_queue),
    ):
        times, counts = count_between(begin, end)
        ax.fill_between(times, counts, step="post", color=colour, alpha=0.18, linewidth=0)
        ax.step(times, counts, where="post", color=colour, linewidth=1.5, label=label)
    style_axes(ax, theme, title="Queue and batch", x_label=_TIME, y_label="requests")
    _count_axis(ax, data)
    add_legend(ax, theme)
    return figure


def composition(data: RunData, theme: Theme) -> Figure | None:
    """Requests in the denoise batch, stacked by resolution, one value per iteration."""
    times, curves = data.composition()
    if not len(times):
        return None
    figure = new_figure(WIDTH_IN, HEIGHT_IN, theme)
    ax = figure.subplots()
    colours = series_colours(data.resolutions, theme)
    base = np.zeros(len(times))
    for resolution, counts in curves.items():
        ax.fill_between(times, base, base + counts, step="post", color=colours[resolution], lw=0, label=resolution)
        base = base + counts
    style_axes(ax, theme, title="Batch composition", x_label=_TIME, y_label="requests in the batch")
    _count_axis(ax, data)
    add_legend(ax, theme)
    return figure


def timeline(data: RunData, theme: Theme) -> Figure | None:
    """One bar per request: waiting, denoising, decoding and saving. None if there are too many to tell apart."""
    records = data.records.sort_values(["arrival_s", "request_id"]).reset_index(drop=True)
    if records.empty or len(records) > TIMELINE_MAX_REQUESTS:
        return None
    row_in = float(np.clip(8.0 / len(records), 0.055, 0.16))
    figure = new_figure(2 * WIDTH_IN, max(2.4, 1.1 + row_in * len(records)), theme)
    ax = figure.subplots()
    colours = series_colours(data.resolutions, theme)
    for row, record in enumerate(records.itertuples(index=False)):
        _draw_request(ax, row, record, colours[str(record.resolution)], theme)
    style_axes(ax, theme, title="Requests", x_label=_TIME, y_label="request, by arrival", grid_axis="x")
    ax.set_xlim(0, data.duration_s)
    ax.set_ylim(len(records) - 0.4, -0.6)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    phases: list[Patch | Line2D] = [
        Patch(color=theme.muted, alpha=0.35, label="waiting"),
        *(Patch(color=colour, label=f"denoising {name}") for name, colour in colours.items()),
        Patch(color=theme.ink, alpha=0.8, label="decoding and saving"),
    ]
    if (records["slo_met"].dropna() == 0).any():
        phases.append(Line2D([], [], color=theme.bad, marker="|", markersize=8, lw=0, mew=2, label="missed deadline"))
    if (records["status"] != "completed").any():
        phases.append(Line2D([], [], color=theme.bad, marker="x", markersize=6, lw=0, mew=1.6, label="no image"))
    add_legend(ax, theme, handles=phases, ncols=len(phases))
    return figure


def _draw_request(ax: Axes, row: int, record: Any, colour: str, theme: Theme) -> None:
    """The bar of one request; a phase that it never reached has no length."""
    arrival = float(record.arrival_s)
    finish = _time_or(record.finish_s, arrival)
    admitted = _time_or(record.admitted_s, finish)
    denoised = _time_or(record.denoise_end_s, finish)
    if admitted > arrival:
        ax.barh(row, admitted - arrival, 0.72, left=arrival, color=theme.muted, alpha=0.35, linewidth=0)
    if pd.notna(record.admitted_s):
        ax.barh(row, denoised - admitted, 0.72, left=admitted, color=colour, linewidth=0)
        ax.barh(row, finish - denoised, 0.72, left=denoised, color=theme.ink, alpha=0.8, linewidth=0)
    if record.status != "completed":
        ax.plot(finish, row, "x", color=theme.bad, markersize=5, markeredgewidth=1.6, clip_on=False)
    elif pd.notna(record.slo_met) and not record.slo_met:
        ax.plot(float(record.deadline_s), row, "|", color=theme.bad, markersize=6, markeredgewidth=1.8)


def _time_or(value: Any, otherwise: float) -> float:
    return float(value) if pd.notna(value) else otherwise


def _count_axis(ax: Axes, data: RunData) -> None:
    ax.set_xlim(0, data.duration_s)
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=2))
