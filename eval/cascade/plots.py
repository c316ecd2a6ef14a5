"""Plots of cascades: FID over lateness (figure 4), systems beside each other (6, 8), and SLO scales (figure 9)."""

from collections.abc import Mapping
from itertools import cycle
from typing import Any

from matplotlib.ticker import PercentFormatter

from ...profiling.report.theme import MARKERS, THEME, add_wide_legend, new_figure, series_colours, style_axes, to_png


def plot_over_lateness(result: Mapping[str, Any]) -> bytes:
    """Plot FID of served images over the share of late requests, a line over lambda for each system. Returns a PNG.

    There is a panel for each SLO scale. Down and to the left is better.
    """
    scales = result["settings"]["slo_scales"]
    figure = new_figure(max(8.4, 5.4 * len(scales)), 4.8)
    panels = figure.subplots(1, len(scales), squeeze=False, sharey=True)[0]
    systems = result["settings"]["systems"]
    for ax, scale in zip(panels, scales, strict=True):
        for marker, (name, colour) in zip(cycle(MARKERS), series_colours(systems).items(), strict=False):
            mine = [row for row in result["rows"] if row["system"] == name and row["slo_scale"] == scale]
            mine = sorted(
                (row for row in mine if row["quality"]["fid"] is not None), key=lambda row: row["overprovision"]
            )
            points = [(row["violation_rate"]["value"], row["quality"]["fid"]) for row in mine]
            if points:
                ax.plot(*zip(*points, strict=True), marker=marker, color=colour, label=name, linewidth=1.2, alpha=0.9)
        style_axes(ax, f"SLO scale {scale:g}", "requests that were late or refused", "FID", grid_axis="both")
        ax.xaxis.set_major_formatter(PercentFormatter(1.0))
    add_wide_legend(figure, panels[0])
    return to_png(figure)


def plot_side_by_side(result: Mapping[str, Any]) -> bytes:
    """Plot FID and lateness of each system as points, at the first SLO scale and lambda. Returns a PNG.

    Lateness has its 95 % interval over seeds; FID has the interval of its difference from the base system.
    """
    first = result["settings"]["slo_scales"][0], result["settings"]["overprovisions"][0]
    rows = [
        row
        for row in result["rows"]
        if (row["slo_scale"], row["overprovision"]) == first and row["quality"]["fid"] is not None
    ][::-1]
    names = [row["system"] for row in rows]
    colours = series_colours(names[::-1])
    figure = new_figure(11.0, 1.2 + 0.36 * len(rows))
    quality, late = figure.subplots(1, 2, sharey=True)
    for ax, title, values, ranges in (
        (
            quality,
            "FID of the images served",
            [row["quality"]["fid"] for row in rows],
            [None if row["against_base"] is None else row["against_base"]["fid_difference"] for row in rows],
        ),
        (
            late,
            "Late or refused",
            [row["violation_rate"]["value"] for row in rows],
            [row["violation_rate"] for row in rows],
        ),
    ):
        halves = [0.0 if each is None or each["low"] is None else each["high"] - each["value"] for each in ranges]
        for place, (name, value, half) in enumerate(zip(names, values, halves, strict=True)):
            ax.errorbar(
                value,
                place,
                xerr=half or None,
                fmt="o",
                color=colours[name],
                ecolor=THEME.muted,
                capsize=2,
                clip_on=False,
            )
        ax.set_yticks(range(len(names)), names)
        ax.set_ylim(-0.6, len(names) - 0.4)
        style_axes(ax, title, "", grid_axis="x")
    late.xaxis.set_major_formatter(PercentFormatter(1.0))
    late.set_xlim(left=0)
    return to_png(figure)


def plot_over_slo_scales(result: Mapping[str, Any]) -> bytes:
    """Plot lateness and FID over the SLO scale, a line for each system at the first lambda. Returns a PNG."""
    figure = new_figure(11.0, 4.2)
    late, quality = figure.subplots(1, 2)
    first = result["settings"]["overprovisions"][0]
    systems = result["settings"]["systems"]
    for marker, (name, colour) in zip(cycle(MARKERS), series_colours(systems).items(), strict=False):
        mine = [row for row in result["rows"] if row["system"] == name and row["overprovision"] == first]
        scales = [row["slo_scale"] for row in mine]
        late.plot(scales, [row["violation_rate"]["value"] for row in mine], marker=marker, color=colour, label=name)
        known = [(row["slo_scale"], row["quality"]["fid"]) for row in mine if row["quality"]["fid"] is not None]
        if known:
            quality.plot(*zip(*known, strict=True), marker=marker, color=colour, label=name)
    label = "SLO as a multiple of the heavy model's own latency"
    style_axes(late, "Late or refused", label, "share of requests", grid_axis="both")
    late.yaxis.set_major_formatter(PercentFormatter(1.0))
    late.set_ylim(bottom=0)
    style_axes(quality, "FID of the images served", label, "FID", grid_axis="both")
    add_wide_legend(figure, late)
    return to_png(figure)
