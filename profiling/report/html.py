"""Report of one run as one HTML file, without scripts or network resources, with all images embedded."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from ...data.files import write_bytes, write_text
from ...serving.core.request_state import RequestRecord
from ...serving.core.step_row import StepRow
from .page import plots_of, render
from .plots import PLOTS, WIDE_PLOTS, draw_all
from .run_data import RunData
from .tables import resolution_table, slo_doubt
from .words import figure, number, plain, seconds, share

MAX_IMAGES = 96
MAX_PROBLEMS = 200


def write_report(
    run_dir: Path,
    summary: Mapping[str, Any],
    records: Sequence[RequestRecord],
    steps: Sequence[StepRow],
    *,
    images: Sequence[tuple[Path | Image.Image, str]] = (),
    more: Mapping[str, tuple[bytes, str]] | None = None,
) -> Path:
    """Write `report.html` and `plots/*.png` into the folder of a run.

    Args:
        run_dir: folder of the run; created if it does not exist. Existing files are replaced, each atomically.
        summary: figures as `serving.core.metrics.summarize` returns them. The entry `config`, a mapping, is shown as
            the configuration of the run; values may be nested.
        records, steps: one per request, and one per denoising iteration.
        images: images or their files, with captions; the first 96 are embedded, at most 256 px wide and high. An
            unreadable file is replaced by its name.
        more: further plots over the whole width, which come first: PNG and description, by name.

    Returns:
        The path of `report.html`.

    Raises:
        OSError: a file cannot be written.
    """
    data = RunData.of(summary.get("duration"), records, steps)
    further = more or {}
    plots = {name: png for name, (png, _) in further.items()} | draw_all(data)
    for name, png in plots.items():
        write_bytes(run_dir / "plots" / f"{name}.png", png)
    config = summary.get("config") or {}
    problems = [record for record in data.records if record.status != "completed"]
    counts = Counter(record.status for record in problems)
    text = render(
        "run.html",
        title=f"Serve run of {summary.get('model', 'a model')}",
        facts=[summary.get("dataset"), config.get("system") or config.get("policy"), f"{len(data.records)} requests"],
        data=data,
        tiles=_tiles(summary, data),
        plots=plots_of(
            plots,
            {name: alt for name, (_, alt) in PLOTS.items()} | {name: alt for name, (_, alt) in further.items()},
            WIDE_PLOTS | set(further),
        ),
        per_resolution=resolution_table(summary.get("per_resolution") or {}),
        problems=problems,
        problem_counts=", ".join(f"{count} {status}" for status, count in counts.items()),
        max_problems=MAX_PROBLEMS,
        images=images,
        max_images=MAX_IMAGES,
        config=[(key, plain(value)) for key, value in config.items()],
        figures=[
            (key, figure(key, value)) for key, value in summary.items() if key not in ("config", "per_resolution")
        ],
    )
    path = run_dir / "report.html"
    write_text(path, text)
    return path


def _tiles(summary: Mapping[str, Any], data: RunData) -> list[tuple[str, str, str]]:
    """Return label, value and small print of every tile."""
    attainment, scale = summary.get("slo_attainment_rate"), summary.get("slo_scale")
    met = f"{summary.get('slo_met_success')} of {len(data.judged)} in time"
    if doubtful := summary.get("standalone_times_served"):
        met += "; " + slo_doubt(doubtful)

    def latency(name: str, key: str, p95: str) -> tuple[str, str, str]:
        return name, seconds(summary.get(key)), f"p95 {seconds(summary.get(p95))}"

    return [
        (
            "SLO attainment" if scale is None else f"SLO attainment ({scale:g}x)",
            share(attainment),
            "no request had an SLO" if attainment is None else met,
        ),
        ("Completed", str(len(data.completed)), f"of {len(data.records)}"),
        ("Throughput", number(summary.get("throughput_qps"), "/s"), "images"),
        ("Goodput", number(summary.get("goodput_qps"), "/s"), "images within the SLO"),
        latency("Median latency", "latency_p50", "latency_p95"),
        latency("Mean queueing", "queueing_mean", "queueing_p95"),
    ]
