"""Plots of a sweep: SLO attainment and goodput over the request rate (figure 11 of PatchedServe)."""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from ..report.theme import LIGHT, Theme, add_wide_legend, new_figure, series_colours, style_axes, to_png
from .held import RATIO_TARGET

_MARKERS = "osD^vPXh"
_WIDTH_IN, _HEIGHT_IN = 7.2, 4.6


def plot_attainment(result: Mapping[str, Any], theme: Theme = LIGHT) -> bytes:
    """SLO attainment of every policy with its interval, and with the simulator's dotted beside it; a PNG."""
    figure = new_figure(_WIDTH_IN, _HEIGHT_IN, theme)
    ax = figure.subplots()
    for engine, policy, colour, marker, points in _lines(result, theme):
        rates = [point["request_rate"] for point in points]
        shares = [point["slo_attainment_rate"] for point in points]
        _draw(ax, result, engine, policy, colour, marker, rates, shares)
        if engine == _first(result):
            low, high = ([point[key] for point in points] for key in ("interval_low", "interval_high"))
            ax.fill_between(rates, low, high, color=colour, alpha=0.10, linewidth=0)
    ax.axhline(RATIO_TARGET, color=theme.muted, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    style_axes(
        ax,
        theme,
        title="SLO attainment",
        x_label=f"{_x_label(result)}\n{_band(result)}",
        y_label="share of requests in time",
        grid_axis="both",
    )
    ax.set_ylim(-0.02, 1.03)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    add_wide_legend(figure, ax, theme)
    return to_png(figure)


def plot_goodput(result: Mapping[str, Any], theme: Theme = LIGHT) -> bytes:
    """Requests in time per second of every policy; the grey line is every request in time. A PNG."""
    figure = new_figure(_WIDTH_IN, _HEIGHT_IN, theme)
    ax = figure.subplots()
    top = right = 0.0
    for engine, policy, colour, marker, points in _lines(result, theme):
        rates = [point["request_rate"] for point in points]
        goodput = [point["goodput_qps"] for point in points]
        _draw(ax, result, engine, policy, colour, marker, rates, goodput)
        top, right = max(top, *goodput), max(right, *rates)
    ax.plot([0, right], [0, right], color=theme.muted, linewidth=1, zorder=1)
    style_axes(
        ax, theme, title="Goodput", x_label=_x_label(result), y_label="requests in time per second", grid_axis="both"
    )
    ax.set_xlim(left=0)
    ax.set_ylim(0, top * 1.12 or 1.0)
    add_wide_legend(figure, ax, theme)
    return to_png(figure)


PLOTS = {
    "attainment": (plot_attainment, "SLO attainment over the request rate, a line for every policy"),
    "goodput": (plot_goodput, "Requests in time per second over the request rate, a line for every policy"),
}


def _band(result: Mapping[str, Any]) -> str:
    """What the shaded intervals are."""
    kinds = {point["interval_over"] for point in result["engines"][_first(result)]["points"]}
    names = {"seeds": "seeds (Student)", "requests": "requests, as if independent (Wilson)"}
    return "shaded: 95 % over " + " or ".join(name for kind, name in names.items() if kind in kinds)


def _first(result: Mapping[str, Any]) -> str:
    return next(iter(result["engines"]))


def _lines(result: Mapping[str, Any], theme: Theme) -> list[tuple[str, str, str, str, list[Mapping[str, Any]]]]:
    """Engine, policy, colour, marker and points of every line."""
    names = [policy["policy"] for policy in result["engines"][_first(result)]["policies"]]
    colours = series_colours(names, theme)
    lines = []
    for engine, figures in result["engines"].items():
        for index, name in enumerate(names):
            points = [point for point in figures["points"] if point["policy"] == name]
            if points:
                lines.append((engine, name, colours[name], _MARKERS[index % len(_MARKERS)], points))
    return lines


def _draw(
    ax: Axes,
    result: Mapping[str, Any],
    engine: str,
    policy: str,
    colour: str,
    marker: str,
    rates: list[float],
    values: list[float],
) -> None:
    is_first = engine == _first(result)
    ax.plot(
        rates,
        values,
        color=colour,
        marker=marker if is_first else None,
        markersize=5,
        linewidth=1.8 if is_first else 1.3,
        linestyle="-" if is_first else ":",
        label=policy if is_first else None,
        zorder=3,
    )


def _x_label(result: Mapping[str, Any]) -> str:
    label = f"requests per second\n{result['described']}"
    return f"{label}; dotted: simulator" if len(result["engines"]) > 1 else label
