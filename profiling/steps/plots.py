"""Plots of the benchmarks of single steps, in the style of `profiling.report`; every function returns a PNG."""

from collections.abc import Mapping
from typing import Any

from ...data.run_facts import describe
from ..report.theme import THEME, add_wide_legend, new_figure, style_axes, to_png
from .attribution import CATEGORIES

_WIDTH_IN = 8.0
_ROW_IN = 0.27
_BASELINES = {"same_resolution": "against same-resolution batches", "one_by_one": "against one by one"}
_RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 16, 20, 25, 32)


def plot_steps(result: Mapping[str, Any]) -> bytes:
    """Plot the speed of the best patched step relative to the best baseline, one line for every combination."""
    rows = result["rows"]
    labels = [row["label"] for row in rows]
    figure = new_figure(_width_in(labels), 1.9 + _ROW_IN * len(rows))
    ax = figure.subplots()
    ends = [row["intervals"]["ratio"] or (row["ratio"], row["ratio"]) for row in rows]
    lows, highs = zip(*ends, strict=True)
    ax.hlines(range(len(rows)), lows, highs, color=THEME.series[0], alpha=0.35, linewidth=3, zorder=1)
    for (name, label), marker in zip(_BASELINES.items(), "os", strict=True):
        own = [(row["ratio"], place) for place, row in enumerate(rows) if row["baseline"] == name]
        if own:
            colour = THEME.series[list(_BASELINES).index(name)]
            ratios, places = zip(*own, strict=True)
            ax.scatter(ratios, places, 34, color=colour, marker=marker, label=label, zorder=3, linewidths=0)
    ax.axvline(1, color=THEME.ink, linewidth=1, zorder=2)
    mean = result["mean_ratio_mixed"]
    style_axes(
        ax,
        "Speed of a patched denoising step, relative to the fastest plain diffusers",
        "times as fast (log scale)"
        + ("" if mean is None else f"; mean of mixed batches {mean:.2f}")
        + f"\n{_circumstances(result)}; {', '.join(result['efforts'])}",
        "requests in the batch",
        grid_axis="x",
    )
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.4, -0.6)
    # Twice as fast and half as fast are equally far from 1.
    ax.set_xscale("log", base=2)
    ax.set_xlim(min(*lows, 0.8) / 1.1, max(*highs, 1.25) * 1.1)
    left, right = ax.get_xlim()
    ticks = [ratio for ratio in _RATIOS if left <= ratio <= right]
    ax.set_xticks(ticks, [f"{ratio:g}" for ratio in ticks])
    ax.set_xticks([], minor=True)
    add_wide_legend(figure, ax)
    return to_png(figure)


def plot_breakdown(result: Mapping[str, Any]) -> bytes:
    """Plot the time of a step by category, two bars for every combination."""
    bars = [
        (f"{row['label']}  {'patched' if side == 'patched' else 'same resolution'}", row["sides"][side])
        for row in result["rows"]
        for side in ("patched", "same_resolution")
    ]
    names = [name for name, _ in bars]
    figure = new_figure(_width_in(names), 2.0 + 0.36 * len(bars))
    ax = figure.subplots()
    # The two bars of a combination are adjacent.
    places = [index + 0.35 * (index // 2) for index in range(len(bars))]
    lefts = [0.0] * len(bars)
    colours = dict(zip(CATEGORIES, THEME.series, strict=True)) | {"host": THEME.grid}
    for category, colour in colours.items():
        widths = [side["ms"][category] for _, side in bars]
        ax.barh(places, widths, 0.78, lefts, color=colour, label=category.replace("_", "-"), zorder=2)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for place, total in zip(places, lefts, strict=True):
        ax.text(total, place, f" {total:.3g} ms", va="center", fontsize=8.5, color=THEME.ink)
    x_label = f"time of a denoising step (ms)\n{_circumstances(result)}"
    style_axes(ax, "Where the time of a denoising step goes", x_label, grid_axis="x")
    ax.set_yticks(places, names)
    ax.invert_yaxis()
    ax.set_xlim(0, max(lefts) * 1.13)
    add_wide_legend(figure, ax)
    return to_png(figure)


def _width_in(names: list[str]) -> float:
    """Return the figure's width: names of many resolutions are long, and the axes keep their width."""
    return _WIDTH_IN + 0.08 * max(0, max(map(len, names)) - 22)


def _circumstances(result: Mapping[str, Any]) -> str:
    sizes = ", ".join(f"{letter} {size}" for letter, size in result["letters"].items())
    return "; ".join(filter(None, [describe(result), sizes]))
