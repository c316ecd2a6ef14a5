"""Report of a cascade's run: that of any served run, with plans and thresholds over time (DiffServe figure 5)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from ...serving.cascade.result import CascadeResult
from .html import write_report
from .over_time import WIDTH_IN
from .theme import THEME, add_legend, new_figure, style_axes, to_png

_WHAT = "Demand, threshold of confidence, workers, late and heavy requests, and the quality of images, over time."
_MAX_WINDOWS = 60


def write_cascade_report(run_dir: Path, summary: Mapping[str, Any], result: CascadeResult) -> Path:
    """Write `report.html` and its plots into a run's folder and return the page's path. Raises OSError."""
    windows = (summary["quality"] or {}).get("over_time", ())
    more = {"cascade": (to_png(over_time(result, windows)), _WHAT)}
    return write_report(run_dir, summary, result.records, (), more=more)


def over_time(result: CascadeResult, windows: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot a cascade's run over time, one plot above the other. The last plots the KID of windows of images, if any."""
    records, plans = result.records, result.plans
    end_s = max(record.finish_s or record.arrival_s for record in records)
    num_plots = 5 if windows else 4
    figure = new_figure(2 * WIDTH_IN, 2.1 * num_plots)
    plots = figure.subplots(num_plots, sharex=True)
    demand, threshold, workers, outcome = plots[:4]
    edges = np.linspace(0, end_s, int(np.clip(len(records) / 30, 8, _MAX_WINDOWS)) + 1)
    arrivals_s = np.array([record.arrival_s for record in records])
    counts = np.histogram(arrivals_s, edges)[0]
    demand.stairs(counts / np.diff(edges), edges, color=THEME.series[0], linewidth=1.6, label="arrivals")
    starts_s = np.array([row.start_s for row in plans])

    def steps(values: list[float]) -> tuple[np.ndarray, np.ndarray]:
        return np.append(starts_s, end_s), np.append(values, values[-1])

    demand.step(
        *steps([row.observed.demand for row in plans]),
        where="post",
        color=THEME.series[1],
        label="planned for",
        linewidth=1.4,
    )
    style_axes(demand, "Demand", "", "requests per second")
    demand.set_ylim(bottom=0)
    add_legend(demand)

    thresholds = [np.nan if row.plan.threshold is None else row.plan.threshold for row in plans]
    threshold.step(*steps(thresholds), where="post", color=THEME.series[3], linewidth=1.6, label="threshold")
    shares = [row.plan.share for row in plans]
    threshold.step(
        *steps(shares), where="post", color=THEME.muted, linewidth=1.2, label="share that goes to the heavy model"
    )
    style_axes(threshold, "Threshold of confidence", "", "")
    threshold.set_ylim(-0.03, 1.03)
    add_legend(threshold)

    x, light = steps([row.plan.num_light for row in plans])
    if plans[0].plan.is_shared:
        workers.fill_between(x, 0, light, step="post", color=THEME.series[2], linewidth=0, label="light and heavy")
    else:
        total = light + steps([row.plan.num_heavy for row in plans])[1]
        workers.fill_between(x, 0, light, step="post", color=THEME.series[2], linewidth=0, label="light")
        workers.fill_between(x, light, total, step="post", color=THEME.series[1], linewidth=0, label="heavy")
    style_axes(workers, "Workers that the plan gives each model", "", "workers")
    workers.set_ylim(bottom=0)
    workers.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=2))
    add_legend(workers)

    middle_s = (edges[1:] + edges[:-1]) / 2
    late = np.array([record.slo_met is False for record in records], dtype=float)
    served_by = result.served_by()
    heavy = np.array([served_by.get(record.request_id) == "heavy" for record in records], dtype=float)
    with np.errstate(invalid="ignore"):
        for values, colour, label in ((late, THEME.bad, "late or discarded"), (heavy, THEME.series[1], "heavy image")):
            outcome.plot(
                middle_s, np.histogram(arrivals_s, edges, weights=values)[0] / counts, "o-", color=colour, label=label,
                markersize=3, linewidth=1.4,
            )  # fmt: skip
    style_axes(outcome, "Outcome, by time of arrival", "", "share of requests")
    outcome.yaxis.set_major_formatter(PercentFormatter(1.0))
    outcome.set_ylim(-0.03, 1.03)
    outcome.set_xlim(0, end_s)
    add_legend(outcome)
    if windows:
        starts_s, ends_s, kids, lows, highs = (
            np.array([row[name] for row in windows]) for name in ("start_s", "end_s", "kid", "low", "high")
        )
        quality, middle_s = plots[4], (starts_s + ends_s) / 2
        quality.errorbar(
            middle_s, kids, (kids - lows, highs - kids), fmt="o-", color=THEME.series[0], markersize=3, linewidth=1.4,
            elinewidth=0.8,
        )  # fmt: skip
        style_axes(quality, "Quality of the images served, windows of 256 and more", "", "KID")
    plots[-1].set_xlabel("time since the start of the trace (s)", color=THEME.muted)
    return figure
