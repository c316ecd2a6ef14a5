"""One trace served by several systems, on one page: attainment, latency, composition of the batches, and images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from ...data.files import write_bytes, write_text
from .page import plots_of, render
from .run_data import RunData
from .table import Table
from .theme import THEME, add_legend, new_figure, series_colours, style_axes, to_png
from .words import number, seconds, share, worst

OVERVIEW_FILE, PAGE_FILE = "overview.png", "comparison.html"
_MAX_IMAGES = 12
_FARTHEST = 3.0
"""End of the latency axis, in SLOs."""


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One run of the trace.

    Attributes:
        name: name of the system.
        about: description of the system in one line.
        summary: summary as in `summary.json`.
        data: records and steps of the run.
        images: image files by request id.
    """

    name: str
    about: str
    summary: Mapping[str, Any]
    data: RunData
    images: Mapping[int, Path]

    @property
    def num_met(self) -> int:
        """Number of requests that met their SLO."""
        return sum(record.slo_met is True for record in self.data.judged)

    @property
    def attainment(self) -> float:
        """Share of the requests with an SLO that met it."""
        return self.num_met / len(self.data.judged)

    @property
    def mixed_share(self) -> float:
        """Share of the denoising steps with more than one resolution in the batch."""
        counts = self.data.step_counts
        return sum(len(each) > 1 for each in counts) / len(counts) if counts else 0.0


def headline(runs: Sequence[ComparedRun]) -> str:
    """Return a summary of all runs in one sentence, the last run first."""
    last, *others = reversed(runs)
    said = f"{last.name}: {last.num_met} of {len(last.data.judged)} requests in time ({last.attainment:.0%})"
    return "; ".join([said, *(f"{run.name}: {run.num_met} ({run.attainment:.0%})" for run in others)])


def write_comparison(folder: Path, runs: Sequence[ComparedRun], facts: Sequence[str]) -> Path:
    """Write `comparison.html` and `overview.png` (light colours) into a folder.

    Args:
        folder: an existing folder.
        runs: runs of the same trace, whose requests have SLOs; the baseline comes first.
        facts: circumstances of the measurement, for the heading.

    Returns:
        The page's path.

    Raises:
        OSError: a file cannot be written.
    """
    png = to_png(overview(runs))
    write_bytes(folder / OVERVIEW_FILE, png)
    alt = "SLO attainment, latency over SLO, and requests in the batch by resolution over time, for each system."
    drawn_by_all = [
        record.request_id for record in runs[-1].data.records if all(record.request_id in run.images for run in runs)
    ]
    prompts = {record.request_id: f"{record.prompt} ({record.resolution})" for record in runs[-1].data.records}
    text = render(
        "comparison.html",
        title="The same requests, served by " + " and by ".join(run.name for run in runs),
        facts=facts,
        headline=headline(runs),
        plots=plots_of({"overview": png}, {"overview": alt}, {"overview"}),
        table=figures_table(runs),
        runs=runs,
        prompts=prompts,
        request_ids=drawn_by_all[:_MAX_IMAGES],
    )
    path = folder / PAGE_FILE
    write_text(path, text)
    return path


def figures_table(runs: Sequence[ComparedRun]) -> Table:
    """Return a table of figures with a column for each run."""
    rows = [
        ("SLO attainment", *(share(run.attainment) for run in runs)),
        ("  of the worst resolution", *(_worst_resolution(run) for run in runs)),
        ("requests in time", *(f"{run.num_met} of {len(run.data.judged)}" for run in runs)),
        ("images in time per second", *(number(run.summary.get("goodput_qps")) for run in runs)),
        ("given up before drawing", *(str(run.summary.get("discarded_requests", 0)) for run in runs)),
        ("median latency", *(seconds(run.summary.get("latency_p50")) for run in runs)),
        ("latency, 95th percentile", *(seconds(run.summary.get("latency_p95")) for run in runs)),
        ("requests in a step, mean", *(number(run.summary.get("batch_size_mean")) for run in runs)),
        ("steps of mixed resolutions", *(share(run.mixed_share) for run in runs)),
    ]
    return Table("Figures", ("", *(run.name for run in runs)), rows)


def _worst_resolution(run: ComparedRun) -> str:
    """Return the resolution with the lowest SLO attainment, and its share."""
    shares = {name: each["slo_attainment_rate"] for name, each in run.summary["per_resolution"].items()}
    return worst({name: each for name, each in shares.items() if each is not None})


def overview(runs: Sequence[ComparedRun]) -> Figure:
    """Plot attainment and latency of all runs, and below them the batch of each run over time."""
    figure = new_figure(11, 3.1 + 1.9 * len(runs))
    grid = figure.add_gridspec(1 + len(runs), 2, height_ratios=[1.5, *(1 for _ in runs)], width_ratios=[1, 1.7])
    colours = dict(zip((run.name for run in runs), (THEME.muted, *THEME.series), strict=False))
    _draw_attainment(figure.add_subplot(grid[0, 0]), runs, colours)
    _draw_latency(figure.add_subplot(grid[0, 1]), runs, colours)
    end_s = max(run.data.duration_s for run in runs)
    for index, run in enumerate(runs):
        _draw_batch(figure.add_subplot(grid[1 + index, :]), run, end_s, is_last=index == len(runs) - 1)
    return figure


def _draw_attainment(ax: Any, runs: Sequence[ComparedRun], colours: Mapping[str, str]) -> None:
    for place, run in enumerate(runs):
        ax.bar(place, 1, 0.6, color=THEME.grid)
        ax.bar(place, run.attainment, 0.6, color=colours[run.name])
        ax.text(place, 1.04, f"{run.attainment:.0%}", ha="center", fontsize=13, fontweight="bold", color=THEME.ink)
    style_axes(ax, title="Images within their deadline", x_label="", y_label="share of requests")
    ax.set_xticks(range(len(runs)), [run.name for run in runs])
    ax.set_ylim(0, 1.2)
    ax.set_yticks([0, 0.5, 1])
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))


def _draw_latency(ax: Any, runs: Sequence[ComparedRun], colours: Mapping[str, str]) -> None:
    for run in runs:
        judged = run.data.judged
        slower = [each.latency_s / each.slo_s for each in judged if each.latency_s is not None and each.slo_s]
        times = np.sort(slower)
        shares = np.arange(1, len(times) + 1) / len(judged)
        end = shares[-1] if len(shares) else 0.0
        ax.step([0, *times, _FARTHEST], [0, *shares, end], where="post", color=colours[run.name], lw=2, label=run.name)
    ax.axvline(1, color=THEME.ink, linewidth=1, linestyle=(0, (2, 2)))
    label = "latency from arrival to image, in deadlines (dotted: the deadline)"
    style_axes(ax, title="Share finished within", x_label=label, y_label="share of requests")
    ax.set_xlim(0, _FARTHEST)
    ax.set_ylim(0, 1.03)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    add_legend(ax)


def _draw_batch(ax: Any, run: ComparedRun, end_s: float, *, is_last: bool) -> None:
    times, curves = run.data.composition()
    base = np.zeros(len(times))
    for resolution, colour in series_colours(run.data.resolutions).items():
        if resolution in curves:
            top = base + curves[resolution]
            ax.fill_between(times, base, top, step="post", color=colour, lw=0, label=resolution)
            base = top
    when = "time since the start of the trace (s)" if is_last else ""
    style_axes(ax, title=f"What {run.name} has in its batch", x_label=when, y_label="requests in the batch")
    ax.set_xlim(0, end_s)
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=2))
    add_legend(ax)
