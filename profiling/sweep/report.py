"""What a sweep leaves for people and programs: `result.json`, plots, and one HTML page."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ...data.files import write_bytes, write_json, write_text
from ..measure.machine import describe
from ..report.page import figure, header, page, pairs, table
from ..report.theme import DARK, LIGHT
from .figures import FinishedRun, agreement, estimates, sweep_figures
from .plots import PLOTS
from .sweep import RESULT_FILE, SweepSettings
from .tables import tables_of

REPORT_FILE = "report.html"


def sweep_result(
    settings: SweepSettings,
    head: Mapping[str, Any],
    runs: Sequence[FinishedRun],
    run_dir: Path,
    *,
    was_interrupted: bool,
) -> dict[str, Any]:
    """All figures of a sweep, of the runs that are finished.

    Args:
        settings: what was to be swept.
        head: what its runs have in common (`SweepFolder.head`).
        runs: the finished ones.
        run_dir: their folder.
        was_interrupted: whether Ctrl-C ended the sweep.
    """
    by_engine = {name: [run for run in runs if run.engine == name] for name in settings.engines}
    engines = {name: sweep_figures(mine) for name, mine in by_engine.items() if mine}
    agreed = agreement(runs) if settings.engine == "both" else None
    about = dict(head["circumstances"])
    return {
        **about,
        "described": describe(about) if "device_name" in about else f"{about['model']}, simulated",
        "settings": {
            **head["settings"],
            "policies": list(settings.policies),
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
        "figures": {name: each.to_json() for name, each in estimates(engines, agreed).items()},
        "run_dir": str(run_dir),
    }


def write_sweep(result: Mapping[str, Any], run_dir: Path) -> Path:
    """Write result, plots (light colours) and page into the sweep's folder; returns the page. Raises OSError."""
    write_json(run_dir / RESULT_FILE, dict(result))
    pictures = []
    for name, (plot, alt) in PLOTS.items():
        light = plot(result, LIGHT)
        write_bytes(run_dir / f"{name}.png", light)
        pictures.append(figure(light, plot(result, DARK), alt))
    settings = result["settings"]
    title = f"SLO attainment of {result['model']}"
    facts = [result["described"], f"SLO scale {settings['slo_scale']:g}", f"{result['num_finished']} runs"]
    parts = [header(title, facts)]
    if result["num_finished"] < result["num_runs"]:
        missing = result["num_runs"] - result["num_finished"]
        parts.append(f'<p class="note">{missing} of {result["num_runs"]} runs are not finished.</p>')
    parts.append(f'<h2>Over the request rate</h2><section class="plots">{"".join(pictures)}</section>')
    for each in tables_of(result):
        parts.append(f"<h2>{escape(each.title)}</h2>")
        parts.append(table(each.columns, each.rows, num_words=each.num_words))
        if each.note:
            parts.append(f"<p><small>{escape(each.note)}</small></p>")
    standalone = ", ".join(f"{size}: {time_s:.3g} s" for size, time_s in result["standalone_s"].items())
    rows = [(name, _plain(value)) for name, value in settings.items()]
    parts.append(f"<h2>Settings</h2>{pairs([*rows, ('standalone latencies', standalone)])}")
    parts.append("<footer>All policies of one rate and seed served the same requests. Made by psctl.</footer>")
    write_text(run_dir / REPORT_FILE, page(title, parts))
    return run_dir / REPORT_FILE


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_plain(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_plain(item)}" for name, item in value.items())
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
