"""Page of compared scorers: FID over latency (figures 1a and 7), easy prompts (1b), and allocations (1c)."""

from collections.abc import Mapping
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.ticker import PercentFormatter

from ...profiling.experiment.experiment import Outcome, write_page
from ...profiling.report.table import Table
from ...profiling.report.theme import MARKERS, THEME, add_wide_legend, new_figure, series_colours, style_axes, to_png
from .scores import RANDOM


def write_scores(result: dict[str, Any]) -> Outcome:
    """Write result, plots and page into the result's folder. Raises OSError."""
    pictures = {"over-latency": plot_over_latency, "easy-prompts": plot_easy, "allocations": plot_allocations}
    return write_page("Which light images to defer", result, score_tables, pictures)


def score_tables(result: Mapping[str, Any]) -> list[Table]:
    """Return tables of each scorer's FID against random choices, and of the share of prompts it considers easy."""
    rows = [
        (
            row["scorer"],
            f"{each['share']:.0%}",
            f"{each['fid']:.2f}",
            f"{each['fid_random']:.2f}",
            f"{each['difference']:+.2f}",
            f"{each['low']:+.2f} to {each['high']:+.2f}",
        )
        for row in result["rows"]
        for each in row["against_random"]
    ]
    light, heavy = (result["random"][place]["fid"] for place in (0, -1))
    against = Table(
        f"FID of {result['num_prompts']} images, {light:.2f} all light, {heavy:.2f} all heavy",
        ("scorer", "deferred", "FID", "random choices", "difference", "95 % interval"),
        rows,
        note=f"Random choices: the mean of {result['settings']['num_draws']} draws.",
    )
    easy = [
        (row["scorer"], f"{row['easy']['share']:.1%}", f"{row['easy']['low']:.1%} to {row['easy']['high']:.1%}")
        for row in result["rows"]
        if row["easy"]["share"] is not None
    ]
    columns = ("scorer", "of prompts", "95 % interval")
    return [against, Table("The light image scores at least as well as the heavy one", columns, easy)]


def plot_over_latency(result: Mapping[str, Any]) -> bytes:
    """Plot FID over the mean latency of a request alone, from all light to all heavy, by scorer. Returns a PNG."""
    figure = new_figure(7.4, 4.6)
    ax = figure.subplots()
    latency_s = result["mean_latency_s"]

    def at(points: list[dict[str, float]]) -> list[float]:
        return [latency_s[0] + point["share"] * (latency_s[1] - latency_s[0]) for point in points]

    band = result["random"]
    ax.fill_between(
        at(band), [each["low"] for each in band], [each["high"] for each in band], color=THEME.muted, alpha=0.25, lw=0
    )
    ax.plot(at(band), [each["fid"] for each in band], color=THEME.muted, linestyle="--", label=RANDOM)
    names = [row["scorer"] for row in result["rows"]]
    for marker, row in zip(cycle(MARKERS), result["rows"], strict=False):
        colour = series_colours(names)[row["scorer"]]
        ax.plot(
            at(row["curve"]), [each["fid"] for each in row["curve"]], marker=marker, markersize=4, color=colour,
            label=row["scorer"], linewidth=1.3,
        )  # fmt: skip
    style_axes(ax, "Images that score lowest are heavy", "mean latency of a request alone (s)", "FID")
    add_wide_legend(figure, ax)
    return to_png(figure)


def plot_easy(result: Mapping[str, Any]) -> bytes:
    """Plot the score differences of light and heavy images of a prompt, a panel for each scorer. Returns a PNG."""
    rows = [row for row in result["rows"] if row["easy"]["share"] is not None]
    figure = new_figure(max(4.2, 3.4 * len(rows)), 3.4)
    for ax, row in zip(figure.subplots(1, len(rows), squeeze=False)[0], rows, strict=True):
        differences = np.array(row["easy"]["differences"])
        edges = np.histogram_bin_edges(differences, 40)
        ax.hist(differences[differences < 0], edges, color=THEME.muted)
        ax.hist(differences[differences >= 0], edges, color=THEME.series[2])
        title = f"{row['scorer']}: {row['easy']['share']:.0%} easy"
        style_axes(ax, title, "score of the light image - of the heavy one", "prompts")
    return to_png(figure)


def plot_allocations(result: Mapping[str, Any]) -> bytes:
    """Plot requests a second over FID of allocations, with the best ones. Returns a PNG."""
    figure = new_figure(6.6, 4.4)
    ax = figure.subplots()
    points = result["allocations"]["rows"]
    rates, fids = (np.array([row[name] for row in points]) for name in ("requests_per_s", "fid"))
    coloured = ax.scatter(fids, rates, c=[row["share"] for row in points], s=7, cmap="viridis", linewidths=0)
    bar = figure.colorbar(coloured, ax=ax, format=PercentFormatter(1.0))
    bar.set_label("deferred", color=THEME.ink)
    order = np.argsort(fids, kind="stable")
    best = np.maximum.accumulate(rates[order])
    ax.step(fids[order], best, where="post", color=THEME.series[3], linewidth=1.2, label="best")
    workers = result["allocations"]["num_workers"]
    style_axes(ax, f"Allocations of {workers} workers", "FID", "requests per second", grid_axis="both")
    add_wide_legend(figure, ax)
    return to_png(figure)
