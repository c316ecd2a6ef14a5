"""Plot of a cache predictor's training, in the style of `profiling.report`."""

from typing import Any

from .theme import THEME, new_figure, style_axes, to_png

_NAMES = {
    "log10_input_mse_normalised": "change of the input",
    "block_index": "block",
    "step_fraction": "step",
    "reuses_in_row": "reuses in a row",
    "pixels": "image size",
}


def plot_cache_training(report: dict[str, Any], model: str) -> bytes:
    """Plot precision against recall on held-out requests, and the importance of each feature, from the report of
    `fit_cache_predictor`. Returns a PNG.
    """
    figure = new_figure(10.5, 4.2)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    sides = {
        "predictor": ("random forest", report),
        "baseline": ("threshold on the input's change", report["baseline"]),
    }
    for (name, (label, figures)), colour in zip(sides.items(), THEME.series, strict=False):
        curve = report["curve"][name]
        left.plot(*zip(*curve, strict=True) if curve else ((), ()), color=colour, linewidth=1.8, label=label)
        if figures["recall"] is not None and figures["precision"] is not None:
            left.scatter([figures["recall"]], [figures["precision"]], 42, color=colour, zorder=3)
    test = report["test"]
    style_axes(
        left,
        "Reuses that stay within the threshold",
        f"recall\n{model}, threshold {report['threshold']:g}; {test['rows']:,} rows of {test['requests']} "
        "held-out requests",
        "precision",
        grid_axis="both",
    )
    left.set_xlim(0, 1.01)
    left.set_ylim(top=1.005)
    left.legend(loc="lower left", frameon=False, fontsize=8.5, labelcolor=THEME.ink)
    importance = report["importance"]
    right.barh([_NAMES.get(name, name) for name in importance], list(importance.values()), color=THEME.series[0])
    right.invert_yaxis()
    style_axes(right, "What each feature is worth", "fall of F1 when it is shuffled", grid_axis="x")
    return to_png(figure)
