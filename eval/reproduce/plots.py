"""Pictures and tables of exhibits: what was measured, and below it what the paper says, in words and numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import PercentFormatter

from ...profiling.report.table import Cell, Table
from ...profiling.report.theme import (
    MARKERS,
    THEME,
    add_legend,
    add_wide_legend,
    new_figure,
    series_colours,
    style_axes,
)
from ...profiling.report.words import DASH, number, share
from .statement import Verdict, statements_of

_CHANGES = {"mse": "mean square error, as in the paper", "relative": "relative to the output's mean square"}
_PANEL_IN, _LINE_IN = 3.4, 0.24
_SYSTEMS = {
    "nirvana": "NIRVANA",
    "distrifusion-fcfs": "DistriFusion",
    "diffusers": "diffusers, static batches",
    "diffusers-fcfs": "diffusers, one by one (DistriFusion on one GPU)",
    "bucketed": "a batch per resolution",
    "patched-fcfs": "PatchedCache",
    "patchedserve": "PatchedServe",
    "patched-slack": "mixed batches, no cache",
    "patched-schedule": "the same, cache by a schedule",
}
"""Systems as the paper calls them, and ours, both with another policy than PatchedServe's."""
_SIDES = {"baseline": "baseline: a batch per resolution", "patched": "patched", "patched + cache": "patched + cache"}
_COLOURS = series_colours([name for name in _SYSTEMS if name != "diffusers-fcfs"])
_COLOURS["diffusers-fcfs"] = _COLOURS["distrifusion-fcfs"]
_VERDICTS: Mapping[Verdict, tuple[str, str]] = {
    "agrees": ("green", THEME.good),
    "same way only": ("orange", THEME.series[1]),
    "differs": ("red", THEME.bad),
    "cannot be told": ("grey", THEME.muted),
}
"""Colours of what was measured, and what they are called."""


def block_savings(result: Mapping[str, Any]) -> Figure:
    """Figure 4: bars by resolution, and the shares of patches at all thresholds."""
    ours = result["ours"]
    figure, (left, right) = _sheet(result, 2)
    for place, (kind, shares) in enumerate(ours["shares"].items()):
        values = list(shares.values())
        _bars(left, values, place, len(ours["shares"]), THEME.series[place], _CHANGES[kind], True)
    title = f"Blocks that change by less than {ours['threshold']:g} in a step"
    style_axes(left, title, "resolution", "share")
    left.set_xticks(range(len(ours["patches_by_threshold"])), list(ours["patches_by_threshold"]))
    left.set_ylim(0, 1.32)
    left.set_yticks([0, 0.25, 0.5, 0.75, 1])
    left.legend(loc="upper left", fontsize=8.5, frameon=False, labelcolor=THEME.ink)
    colours = series_colours(list(ours["patches_by_threshold"]))
    for name, shares in ours["patches_by_threshold"].items():
        right.plot(ours["thresholds"], shares, color=colours[name], label=name)
    right.axvline(ours["threshold"], color=THEME.muted, linestyle="--", linewidth=1)
    label = "threshold of the relative change (log scale)"
    style_axes(right, "Patches", label, "share below it", grid_axis="both")
    right.set_xscale("log")
    right.set_ylim(0, 1.03)
    add_legend(right)
    _percent(left, right)
    return figure


def step_latencies(result: Mapping[str, Any]) -> Figure:
    """Figure 5: a bar for each combination, and the paper's 68 % as a mark."""
    rows = result["ours"]["rows"]
    figure, (ax,) = _sheet(result, 1)
    times = [row["patched_ms"] for row in rows]
    ax.bar(range(len(rows)), times, 0.74, color=THEME.series[0], label="here")
    for place, (own, row) in enumerate(zip(times, rows, strict=True)):
        _label_above(ax, place, row["patched_p90_ms"], number(own))
    ends = [[own - row["patched_p10_ms"], row["patched_p90_ms"] - own] for own, row in zip(times, rows, strict=True)]
    low, high = zip(*(map(abs, each) for each in ends), strict=True)
    ax.errorbar(
        range(len(rows)), times, [low, high], fmt="none", ecolor=THEME.ink, elinewidth=1, capsize=2, label="p10 to p90"
    )
    ax.hlines(1.68 * times[0], len(rows) - 1.45, len(rows) - 0.55, color=THEME.bad, linewidth=2)
    ax.plot([], [], color=THEME.bad, linewidth=2, label=f"paper: 1.68 times {rows[0]['label']}")
    sizes = ", ".join(f"{letter} {size}" for letter, size in result["ours"]["letters"].items())
    style_axes(ax, "A step of three requests", f"combination, from few to many pixels ({sizes})", "ms")
    ax.set_xticks(range(len(rows)), [row["label"] for row in rows])
    ax.set_ylim(0, max(*(row["patched_p90_ms"] for row in rows), 1.68 * times[0]) * 1.15)
    add_legend(ax)
    return figure


def attainment(result: Mapping[str, Any]) -> Figure:
    """Figure 11: SLO attainment over the rate (dotted: the simulator), and over the SLO scale at the middle rate."""
    figure, (ax, beside) = _sheet(result, 2)
    engines, by_scale = result["ours"]["engines"], result["ours"]["by_slo_scale"]
    _lines(ax, engines["real"]["points"])
    _lines(ax, engines["simulator"]["points"], is_dotted=True)
    _style_rates(ax, "Requests in time", "requests per second (dotted: simulator)")
    scaled = [{**point, "slo_scale": float(scale)} for scale, points in by_scale["points"].items() for point in points]
    _lines(beside, scaled, over="slo_scale")
    title = f"At {by_scale['request_rate']:g} requests per second"
    _style_rates(beside, title, "SLO, times the latency alone")
    add_wide_legend(figure, ax)
    return figure


def attainment_by_gpus(result: Mapping[str, Any]) -> Figure:
    """Figures 12 and 13: a panel for each number of GPUs."""
    by_gpus = result["ours"]["gpus"]
    figure, panels = _sheet(result, len(by_gpus))
    for ax, (num_gpus, found) in zip(panels, by_gpus.items(), strict=True):
        _lines(ax, found["engines"]["simulator"]["points"])
        _style_rates(ax, f"{num_gpus} GPUs, simulated", "requests per second")
    add_wide_legend(figure, panels[0])
    return figure


def batches(result: Mapping[str, Any]) -> Figure:
    """Figure 14: latency (with the paper's 13 % as marks), throughput and overheads by batch size."""
    rows = result["ours"]["rows"]
    figure, (left, right, beside) = _sheet(result, 3)
    for place, (name, label) in enumerate(_SIDES.items()):
        seconds = [row["image_ms"][name] * row["requests"] / 1e3 for row in rows]
        _bars(left, seconds, place, len(_SIDES), THEME.series[place], label, False)
        rates = [1e3 / row["image_ms"][name] for row in rows]
        right.plot(range(len(rows)), rates, color=THEME.series[place], marker=MARKERS[place], markersize=5)
    for place, row in enumerate(rows):
        said = 0.87 * row["image_ms"]["baseline"] * row["requests"] / 1e3
        left.hlines(said, place - 0.14, place + 0.14, color=THEME.bad, linewidth=2, zorder=4)
    left.plot([], [], color=THEME.bad, linewidth=2, label="paper: 13 % less than the baseline")
    style_axes(left, "Latency of a batch", "requests, as many of each resolution", "seconds of denoising")
    style_axes(right, "Throughput", "requests, as many of each resolution", "images per second")
    for place, kind in enumerate(rows[0]["overheads"]):
        shares = [row["overheads"][kind]["value"] for row in rows]
        _bars(beside, shares, place, 2, THEME.series[3 + place], kind, True)
    scheduler = result["ours"]["scheduling"]["patchedserve"]["value"]
    beside.axhline(scheduler, color=THEME.ink, linestyle="--", linewidth=1, label="scheduler, in a served trace")
    style_axes(beside, "Overheads", "requests, as many of each resolution", "share of a request's time")
    beside.margins(y=0.5)
    _percent(beside)
    beside.legend(loc="upper left", fontsize=8.5, frameon=False, labelcolor=THEME.ink)
    for ax in (left, right, beside):
        ax.set_xticks(range(len(rows)), [str(row["requests"]) for row in rows])
    left.margins(y=0.15)
    right.set_ylim(bottom=0)
    add_wide_legend(figure, left)
    return figure


def savings(result: Mapping[str, Any]) -> Figure:
    """Figure 15: saved computation and latency by resolution."""
    ours = result["ours"]
    figure, (left, right) = _sheet(result, 2)
    sides = {"off": "no cache", "image": "whole batches", "patch": "patch by patch"}
    colours = dict(zip(sides, (THEME.muted, *THEME.series), strict=False))
    for place, (kind, label) in enumerate(sides.items()):
        found = [each[kind] for each in ours["by_resolution"].values()]
        if kind != "off":
            shares = [each["saved_computation"] for each in found]
            _bars(left, shares, place - 1, 2, colours[kind], label, True)
        _bars(right, [each["image_ms"] for each in found], place, 3, colours[kind], label, False)
    style_axes(left, f"Saved computation, threshold {ours['threshold']:.2g}", "resolution", "patches, blocks and steps")
    style_axes(right, "Latency of a request", f"resolution, {ours['requests']} requests in a batch", "ms of denoising")
    for ax in (left, right):
        ax.set_xticks(range(len(ours["by_resolution"])), list(ours["by_resolution"]))
        ax.margins(y=0.12)
    _percent(left)
    add_wide_legend(figure, right)
    return figure


def quality_table(result: Mapping[str, Any]) -> Table:
    """Tables 1 and 2: ours by data set on the left, the paper's columns on the right."""
    datasets, printed = result["ours"]["datasets"], result["paper_numbers"]
    columns = next(iter(printed.values()))
    rows = [
        [
            side,
            *(_estimate(found["sides"][side]) for found in datasets.values()),
            *(f"{each:.2f}" for each in numbers.values()),
        ]
        for side, numbers in printed.items()
    ]
    changes = [_estimate(found["difference"], "+") for found in datasets.values()]
    own, other = (list(printed[side].values()) for side in ("PatchedServe", "Original"))
    rows.append(["difference", *changes, *(f"{one - two:+.2f}" for one, two in zip(own, other, strict=True))])
    model = result["settings"]["model"].rstrip("/").rpartition("/")[2]
    heads = [f"{model}, {name}, {found['metric']}" for name, found in datasets.items()]
    count = result["settings"]["num_prompts"]
    note = f"Ours: {count} captions of each data set, {result['settings']['num_steps']} steps, 95 % intervals."
    return Table(result["title"], ["", *heads, *(f"paper: {name}" for name in columns)], rows, note=note)


def _sheet(result: Mapping[str, Any], num_panels: int) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels side by side; the paper's statements stand below them."""
    lines = statements_of(result)
    below_in = _LINE_IN * (len(lines) + 2.5)
    figure = new_figure(max(8.4, 4.6 * num_panels), _PANEL_IN + 0.5 + below_in)
    grid = figure.add_gridspec(2, num_panels, height_ratios=[_PANEL_IN, below_in])
    text = figure.add_subplot(grid[1, :])
    text.set_axis_off()
    text.set_ylim(-len(lines) - 2, 0.5)
    text.set_xlim(0, 1)
    places = (0, 0.51, 0.67, 0.79)
    for place, head in zip(places, ("What the paper says of it", "paper", "here", "95 % interval"), strict=True):
        text.text(place, 0, head, fontsize=9, fontweight="bold", color=THEME.ink, va="center")
    for line, each in enumerate(lines, 1):
        cells, colour = (each.text, each.paper_text, each.ours_text, each.interval_text), _VERDICTS[each.verdict][1]
        for place, cell, own in zip(places, cells, (THEME.ink, THEME.ink, colour, colour), strict=True):
            text.text(place, -line, cell, fontsize=8.5, color=own, va="center")
    about = result["circumstances"]["described"] + ("; a smoke run" if result["settings"]["is_quick"] else "")
    note = "; ".join(f"{name}: {verdict}" for verdict, (name, _) in _VERDICTS.items()) + f". {about}"
    text.text(0, -len(lines) - 1.3, note, fontsize=8, color=THEME.muted, va="center")
    return figure, [figure.add_subplot(grid[0, place]) for place in range(num_panels)]


def _bars(ax: Axes, values: Sequence[float], place: int, of: int, colour: str, label: str, is_share: bool) -> None:
    """One bar in each group of `of`, with its value above."""
    width = 0.8 / of
    places = [index + (place - (of - 1) / 2) * width for index in range(len(values))]
    ax.bar(places, values, width * 0.92, color=colour, label=label)
    for where, value in zip(places, values, strict=True):
        _label_above(ax, where, value, share(value, 0) if is_share else number(value))


def _label_above(ax: Axes, x: float, y: float, text: str) -> None:
    # Outlined, where marks cross it.
    outline = withStroke(linewidth=2.5, foreground=THEME.background)
    offset = {"xytext": (0, 2.5), "textcoords": "offset points", "zorder": 5, "path_effects": [outline]}
    ax.annotate(text, (x, y), ha="center", fontsize=7.5, color=THEME.ink, **offset)


def _lines(
    ax: Axes,
    all_points: Sequence[Mapping[str, Any]],
    *,
    over: str = "request_rate",
    is_dotted: bool = False,
) -> None:
    """Attainment of all systems over the rate or the SLO scale, with its intervals."""
    for place, name in enumerate(dict.fromkeys(each["policy"] for each in all_points)):
        points = [each for each in all_points if each["policy"] == name]
        places, shares = ([each[key] for each in points] for key in (over, "slo_attainment_rate"))
        if is_dotted:
            ax.plot(places, shares, color=_COLOURS[name], linestyle=":", linewidth=1.3)
            continue
        ax.plot(
            places, shares, color=_COLOURS[name], marker=MARKERS[place], markersize=5, label=_SYSTEMS[name], zorder=3
        )
        low, high = ([each[end] for each in points] for end in ("interval_low", "interval_high"))
        ax.fill_between(places, low, high, color=_COLOURS[name], alpha=0.1, linewidth=0)


def _style_rates(ax: Axes, title: str, x_label: str) -> None:
    style_axes(ax, title, x_label, "share", grid_axis="both")
    ax.set_ylim(-0.02, 1.03)
    ax.set_xlim(left=0)
    _percent(ax)


def _percent(*panels: Axes) -> None:
    for ax in panels:
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))


def _estimate(found: Mapping[str, Any], sign: str = "") -> Cell:
    interval = () if found["low"] is None else (f"{found['low']:{sign}.2f} to {found['high']:{sign}.2f}",)
    return Cell(f"{found['value']:{sign}.2f}" if found else DASH, below=interval)
