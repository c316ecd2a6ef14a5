"""Plots of step latencies, measured and predicted, in the style of `profiling.report`; every function returns a PNG."""

from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from ...data.run_facts import RunFacts, describe
from ...data.tables.latency import LatencyTable
from ...training.latency.predictor import LatencyPredictor
from .theme import THEME, add_legend, add_wide_legend, new_figure, series_colours, style_axes, to_png


def plot_latencies(table: LatencyTable) -> bytes:
    """Plot how much step latency differs between combinations of one batch size (PatchedServe figure 5).

    Lines are batches of one resolution; a grey dot is a mixed batch.
    """
    figure = new_figure(8.0, 4.8)
    ax = figure.subplots()
    mixed = [row for row in table.rows if len(row.counts) > 1]
    if mixed:
        sizes, times = zip(*((row.num_requests, row.median_ms) for row in mixed), strict=True)
        ax.scatter(sizes, times, 16, color=THEME.muted, alpha=0.55, linewidths=0, label="mixed", zorder=2)
    colours = series_colours(list(map(str, table.resolutions)))
    for resolution in table.resolutions:
        alone = sorted((row.num_requests, row.median_ms) for row in table.rows if set(row.counts) == {resolution})
        if alone:
            line = {"marker": "o", "markersize": 4, "linewidth": 1.6, "zorder": 3}
            colour = colours[str(resolution)]
            ax.plot(*zip(*alone, strict=True), color=colour, label=f"only {resolution}", **line)
    style_axes(
        ax,
        "Same batch size, different combination",
        f"requests in the batch\n{_about(table.circumstances)}",
        "denoising step, median (ms)",
    )
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlim(0, max(row.num_requests for row in table.rows) + 0.7)
    ax.set_ylim(bottom=0)
    add_wide_legend(figure, ax)
    return to_png(figure)


def plot_predictions(table: LatencyTable, predictor: LatencyPredictor) -> bytes:
    """Plot predicted against measured step latency for the table that the predictor was fitted to, with held-out
    combinations highlighted.
    """
    figure = new_figure(6.4, 5.6)
    ax = figure.subplots()
    unseen = set(predictor.about.fit["held_out"])
    counts = [[row.counts.get(size, 0) for size in predictor.about.resolutions] for row in table.rows]
    pairs: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for row, ms in zip(table.rows, predictor.predict_ms(counts), strict=True):
        pairs[row.label in unseen].append((row.median_ms, ms))
    everything = [value for group in pairs.values() for pair in group for value in pair]
    low, high = min(everything) / 1.15, max(everything) * 1.15
    ax.plot([low, high], [low, high], color=THEME.ink, linewidth=0.9, zorder=1)
    within = [low * 0.9, high * 0.9], [low * 1.1, high * 1.1]
    ax.fill_between([low, high], *within, color=THEME.grid, linewidth=0, zorder=0, label="within 10 %")
    for held_out, label, colour in ((False, "fitted to", THEME.muted), (True, "held out", THEME.series[0])):
        measured_ms, predicted_ms = zip(*pairs[held_out], strict=True)
        label = f"{label} ({len(measured_ms)})"
        ax.scatter(
            measured_ms, predicted_ms, 18, color=colour, linewidths=0, alpha=0.8, label=label, zorder=2 + held_out
        )
    style_axes(
        ax,
        "Predicted against measured",
        f"measured, median (ms, log scale)\n{_about(table.circumstances)}",
        "predicted (ms, log scale)",
        grid_axis="both",
    )
    for axis, scale in ((ax.xaxis, ax.set_xscale), (ax.yaxis, ax.set_yscale)):
        scale("log")
        axis.set_major_locator(LogLocator(10, (1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    ax.set_xlim(low, high)
    ax.set_ylim(low, high)
    add_legend(ax)
    return to_png(figure)


def _about(facts: RunFacts | None) -> str:
    if facts is None:
        return "imported table"
    return describe(facts.to_json()) + ("" if facts.engine == "patched" else f", engine {facts.engine}")
