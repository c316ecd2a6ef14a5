"""Output of a sweep: `result.json`, plots of attainment and goodput, and one HTML page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import PercentFormatter

from ...data.figures import write_figures
from ...data.files import write_bytes, write_json, write_text
from ...data.run_facts import describe
from ..report.page import plots_of, render
from ..report.table import Table
from ..report.theme import MARKERS, THEME, add_wide_legend, new_figure, series_colours, style_axes, to_png
from ..report.words import DASH, plain, seconds, share, worst
from .figures import NEAR_SATURATION, FinishedRun, agreement, estimates, sweep_figures
from .held import RATIO_TARGET, TARGETS
from .settings import SweepSettings

RESULT_FILE, REPORT_FILE = "result.json", "report.html"
_INTERVAL_NOTES = {
    "seeds": "Intervals over seeds are Student's 95 %, never narrower than Wilson's over their requests.",
    "requests": "Intervals over requests are Wilson's 95 %, as if requests were independent; they queue behind each "
    "other, so another run may lie further off. Three seeds give intervals over seeds.",
}
_BANDS = {"seeds": "seeds (Student)", "requests": "requests, as if independent (Wilson)"}
_HELD_NOTE = (
    "A rate is held up to where the attainment first falls below the target, on a straight line between two measured "
    "rates; below or beyond: not even at the lowest rate of the sweep, or still at its highest. In brackets: 95 % over "
    "three seeds or more (Student's, of logarithms), where each of them fell below the target within the sweep."
)
_PLOTS = {
    "attainment": "SLO attainment over the request rate, a line for every system",
    "worst": "SLO attainment of the resolution that fares worst over the request rate, a line for every system",
    "goodput": "Requests in time per second over the request rate, a line for every system",
}


def sweep_result(
    settings: SweepSettings,
    head: Mapping[str, Any],
    runs: Sequence[FinishedRun],
    run_dir: Path,
    *,
    was_interrupted: bool,
) -> dict[str, Any]:
    """Return all figures of a sweep's finished runs; `head` is that of their `SweepFolder`."""
    by_engine = {name: [run for run in runs if run.engine == name] for name in settings.engines}
    engines = {name: sweep_figures(mine) for name, mine in by_engine.items() if mine}
    agreed = agreement(runs) if settings.engine == "both" else None
    about = dict(head["circumstances"])
    content = {
        **about,
        "described": describe(about) if "device_name" in about else f"{about['model']}, simulated",
        "settings": {
            **head["settings"],
            "systems": list(settings.systems),
            "policies": list(settings.systems),
            "request_rates": list(settings.rates),
            "seeds": list(settings.seeds),
        },
        "standalone_s": head["standalone_s"],
        "predictor": head.get("predictor", {}).get("file"),
        "num_runs": settings.num_runs,
        "num_finished": len(runs),
        "was_interrupted": was_interrupted,
        "engines": engines,
        "agreement": agreed,
        "run_dir": str(run_dir),
    }
    return write_figures(content, estimates(engines, agreed))


def write_sweep(result: Mapping[str, Any], run_dir: Path) -> Path:
    """Write result, plots and page into the sweep's folder and return the page's path. Raises OSError."""
    write_json(run_dir / RESULT_FILE, dict(result))
    names = [name for name in _PLOTS if name != "worst" or _has_resolutions(result)]
    drawn = {name: _plot(result, name) for name in names}
    for name, png in drawn.items():
        write_bytes(run_dir / f"{name}.png", png)
    settings = {name: value for name, value in result["settings"].items() if name != "policies"}
    standalone = ", ".join(f"{size}: {time_s:.3g} s" for size, time_s in result["standalone_s"].items())
    text = render(
        "sweep.html",
        title=f"SLO attainment of {result['model']}",
        facts=[result["described"], f"SLO scale {settings['slo_scale']:g}", f"{result['num_finished']} runs"],
        result=result,
        plots=plots_of(drawn, _PLOTS),
        tables=tables_of(result),
        settings=[*((name, plain(value)) for name, value in settings.items()), ("standalone latencies", standalone)],
    )
    write_text(run_dir / REPORT_FILE, text)
    return run_dir / REPORT_FILE


def _has_resolutions(result: Mapping[str, Any]) -> bool:
    """Return whether a point has several resolutions."""
    points = next(iter(result["engines"].values()))["points"]
    return any(len(point["slo_attainment_by_resolution"]) > 1 for point in points)


def _plot(result: Mapping[str, Any], name: str) -> bytes:
    """Plot SLO attainment with its intervals, that of the worst resolution, or goodput. The second engine is dotted."""
    key = {"attainment": "slo_attainment_rate", "worst": "slo_attainment_worst", "goodput": "goodput_qps"}[name]
    is_share = name != "goodput"
    figure = new_figure(7.2, 4.6)
    ax = figure.subplots()
    first = next(iter(result["engines"].values()))
    names = [system["policy"] for system in first["policies"]]
    colours = series_colours(names)
    top = right = 0.0
    for figures in result["engines"].values():
        is_first = figures is first
        for index, system in enumerate(names):
            points = [point for point in figures["points"] if point["policy"] == system]
            if not points:
                continue
            rates, values = ([point[each] for point in points] for each in ("request_rate", key))
            top, right = max(top, *values), max(right, *rates)
            ax.plot(
                rates,
                values,
                color=colours[system],
                marker=MARKERS[index % len(MARKERS)] if is_first else None,
                markersize=5,
                linewidth=1.8 if is_first else 1.3,
                linestyle="-" if is_first else ":",
                label=system if is_first else None,
                zorder=3,
            )
            if name == "attainment" and is_first:
                low, high = ([point[end] for point in points] for end in ("interval_low", "interval_high"))
                ax.fill_between(rates, low, high, color=colours[system], alpha=0.10, linewidth=0)
    x_label = f"requests per second\n{result['described']}" + "; dotted: simulator" * (len(result["engines"]) > 1)
    if is_share:
        ax.axhline(RATIO_TARGET, color=THEME.muted, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        ax.set_ylim(-0.02, 1.03)
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
        if name == "attainment":
            x_label += f"\n{band_of(result)}"
        title = "SLO attainment" + ", worst resolution" * (name == "worst")
        y_label = "share of requests in time"
    else:
        # On the grey line every request is in time.
        ax.plot([0, right], [0, right], color=THEME.muted, linewidth=1, zorder=1)
        ax.set_xlim(left=0)
        ax.set_ylim(0, top * 1.12 or 1.0)
        title, y_label = "Goodput", "requests in time per second"
    style_axes(ax, title, x_label, y_label, grid_axis="both")
    add_wide_legend(figure, ax)
    return to_png(figure)


def band_of(result: Mapping[str, Any]) -> str:
    """Return a description of the shaded intervals."""
    kinds = {point["interval_over"] for point in next(iter(result["engines"].values()))["points"]}
    return "shaded: 95 % over " + " or ".join(name for kind, name in _BANDS.items() if kind in kinds)


def tables_of(result: Mapping[str, Any]) -> list[Table]:
    """Return all tables of a sweep's result."""
    found = []
    for engine, figures in result["engines"].items():
        where = f" ({engine})" if len(result["engines"]) > 1 else ""
        found += [_sustained_rate_table(figures, where), _points_table(figures, where)]
    if result["agreement"] is not None:
        found.append(_agreement_table(result["agreement"]))
    return found


def _sustained_rate_table(figures: Mapping[str, Any], where: str) -> Table:
    *others, last = figures["baselines"] or [""]
    baselines = f"{', '.join(others)} and {last}" if others else last
    against = f"at {RATIO_TARGET:.0%}, against best of {baselines}" if figures["baselines"] else "ratio"
    rows = [
        (
            system["policy"],
            share(system["mean_attainment"]),
            *(_rate(system["held_rates"][f"{target:.2f}"]) for target in TARGETS),
            _ratio(system["ratio_at_95"]),
        )
        for system in figures["policies"]
    ]
    columns = ("system", "mean attainment", *(f"holds {target:.0%} up to" for target in TARGETS), against)
    return Table(f"Highest request rate{where}", columns, rows, note=_HELD_NOTE)


def _points_table(figures: Mapping[str, Any], where: str) -> Table:
    rows = []
    for point in figures["points"]:
        seeds = [each for each in point["attainment_by_seed"].values() if each is not None]
        lost = [f"{count} {reason}" for reason, count in point["discarded_by_reason"].items()]
        lost += [f"{point['failed_requests']} failed"] if point["failed_requests"] else []
        rows.append(
            (
                point["policy"],
                f"{point['request_rate']:g}/s",
                share(point["slo_attainment_rate"]),
                worst(point["slo_attainment_by_resolution"]),
                f"{share(point['interval_low'])} to {share(point['interval_high'])}",
                f"{point['num_runs']} seeds" if point["interval_over"] == "seeds" else "requests (Wilson)",
                f"{min(seeds):.0%} to {max(seeds):.0%}" if len(seeds) > 1 else DASH,
                str(point["num_requests"]),
                f"{point['goodput_qps']:.3g}/s",
                seconds(point["latency_p50"]),
                seconds(point["latency_p95"]),
                "; ".join(lost) or DASH,
            )
        )
    kinds = {point["interval_over"] for point in figures["points"]}
    columns = ("system", "rate", "SLO attainment", "worst resolution", "95 % interval", "over", "seeds")
    note = " ".join(note for over, note in _INTERVAL_NOTES.items() if over in kinds)
    return Table(f"Every rate{where}", (*columns, "requests", "goodput", "p50", "p95", "lost"), rows, note=note)


def _agreement_table(found: Mapping[str, Any]) -> Table:
    rows = [
        (
            row["policy"],
            f"{row['request_rate']:g}/s",
            DASH if row["load"] is None else f"{row['load']:.0%}",
            share(row["real_attainment"]),
            share(row["simulated_attainment"]),
            f"{row['attainment_difference_points']:+.1f}",
            seconds(row["real_latency_mean"]),
            seconds(row["simulated_latency_mean"]),
            _signed(row["latency_difference"]),
            _signed(row["step_difference"]),
        )
        for row in found["rows"]
    ]
    note = ""
    if rows and found["max_latency_difference"] is not None:
        note = (
            f"Attainment within {found['max_attainment_difference_points']:.1f} points "
            f"(mean {found['mean_attainment_difference_points']:.1f}), mean latency within "
            f"{found['max_latency_difference']:.1%} (mean {found['mean_latency_difference']:.1%})."
        )
        for name, where in (("below", f"Below {NEAR_SATURATION:.0%} of capacity"), ("near", "From there on")):
            largest = found[f"max_latency_difference_{name}_saturation"]
            note += "" if largest is None else f" {where} mean latency is within {largest:.1%}."
    columns = ("system", "rate", "of capacity", "attainment", "simulated", "points", "mean latency", "simulated")
    columns += ("difference", "steps at equal batch")
    return Table("Simulator against engine", columns, rows, note=note)


def _signed(difference: float | None) -> str:
    return DASH if difference is None else f"{difference:+.1%}"


def _rate(held: Mapping[str, Any]) -> str:
    rate = f"{held['rate']:.3g}/s"
    if held["low"] is not None:
        rate += f" ({held['low']:.3g} to {held['high']:.3g})"
    return {"between": rate, "below": f"below {rate}", "beyond": f"beyond {rate}"}[held["where"]]


def _ratio(found: Mapping[str, Any] | None) -> str:
    if found is None or found["value"] is None:
        return DASH
    interval = "" if found["low"] is None else f" ({found['low']:.2f} to {found['high']:.2f})"
    return {"exact": "", "least": "at least ", "most": "at most "}[found["kind"]] + f"{found['value']:.2f}x{interval}"
