"""Plots of step latencies, measured and predicted, in the style of `serving.report`; every function returns a PNG."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict

from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from ..data.latency_table import Circumstances, LatencyRow, LatencyTable
from ..serving.report.theme import LIGHT, Theme, add_legend, new_figure, series_colours, style_axes, to_png
from .machine import describe


def plot_latencies(table: LatencyTable, theme: Theme = LIGHT) -> bytes:
    """How much the latency of a step differs between combinations of one batch size (PatchedServe figure 5).

    Batches of one resolution are lines; a grey dot is a mixed batch.
    """
    figure = new_figure(8.0, 4.8, theme)
    ax = figure.subplots()
    mixed = [row for row in table.rows if len(row.counts) > 1]
    if mixed:
        sizes = [row.num_requests for row in mixed]
        times = [row.median_ms for row in mixed]
        ax.scatter(sizes, times, 16, color=theme.muted, alpha=0.55, linewidths=0, label="mixed", zorder=2)
    colours = series_colours(list(map(str, table.resolutions)), theme)
    for resolution in table.resolutions:
        alone = sorted((row.num_requests, row.median_ms) for row in table.rows if set(row.counts) == {resolution})
        if alone:
            ax.plot(
                *zip(*alone, strict=True),
                color=colours[str(resolution)],
                marker="o",
                markersize=4,
                linewidth=1.6,
                label=f"only {resolution}",
                zorder=3,
            )
    style_axes(
        ax,
        theme,
        title="Same batch size, different combination",
        x_label=f"requests in the batch\n{_about(table.circumstances)}",
        y_label="denoising step, median (ms)",
    )
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlim(0, max(row.num_requests for row in table.rows) + 0.7)
    ax.set_ylim(bottom=0)
    add_legend(ax, theme, ncols=5)
    return to_png(figure)


def plot_predictions(
    measured: Sequence[LatencyRow],
    predicted_ms: Sequence[float],
    is_held_out: Sequence[bool],
    circumstances: Circumstances | None,
    theme: Theme = LIGHT,
) -> bytes:
    """Predicted against measured step latency; combinations that the fit has not seen stand out."""
    figure = new_figure(6.4, 5.6, theme)
    ax = figure.subplots()
    pairs: dict[bool, list[tuple[float, float]]] = defaultdict(list)
    for row, ms, held_out in zip(measured, predicted_ms, is_held_out, strict=True):
        pairs[held_out].append((row.median_ms, ms))
    everything = [value for group in pairs.values() for pair in group for value in pair]
    low, high = min(everything) / 1.15, max(everything) * 1.15
    ax.plot([low, high], [low, high], color=theme.ink, linewidth=0.9, zorder=1)
    ax.fill_between(
        [low, high],
        [low * 0.9, high * 0.9],
        [low * 1.1, high * 1.1],
        color=theme.grid,
        linewidth=0,
        zorder=0,
        label="within 10 %",
    )
    for held_out, label, colour, marker in (
        (False, "fitted to", theme.muted, "o"),
        (True, "held out", theme.series[0], "D"),
    ):
        if pairs[held_out]:
            ax.scatter(
                *zip(*pairs[held_out], strict=True),
                18,
                color=colour,
                marker=marker,
                linewidths=0,
                alpha=0.6 if not held_out else 0.9,
                label=f"{label} ({len(pairs[held_out])})",
                zorder=2 + held_out,
            )
    style_axes(
        ax,
        theme,
        title="Predicted against measured",
        x_label=f"measured, median (ms, log scale)\n{_about(circumstances)}",
        y_label="predicted (ms, log scale)",
        grid_axis="both",
    )
    for axis, scale in ((ax.xaxis, ax.set_xscale), (ax.yaxis, ax.set_yscale)):
        scale("log")
        axis.set_major_locator(LogLocator(10, (1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    ax.set_xlim(low, high)
    ax.set_ylim(low, high)
    add_legend(ax, theme)
    return to_png(figure)


def _about(circumstances: Circumstances | None) -> str:
    if circumstances is None:
        return "imported table"
    engine = "" if circumstances.engine == "patched" else f", engine {circumstances.engine}"
    return describe(asdict(circumstances)) + engine
