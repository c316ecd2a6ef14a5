"""The report as one HTML file: no scripts, nothing from the network, all images inside it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
from PIL import Image

from ...data.files import write_bytes, write_text
from ...serving.core.request_state import RequestRecord
from .page import DASH, figure, header, image_tag, page, pairs
from .plots import PLOTS, WIDE_PLOTS, draw_all
from .run_data import RunData

MAX_IMAGES = 96
MAX_PROBLEMS = 200

# Figures in seconds and shares get their unit; all others are shown as they are.
_SECONDS = ("duration", "latency_", "queueing_")
_PER_SECOND = "_qps"


def write_report(
    run_dir: Path,
    summary: Mapping[str, Any],
    records: pd.DataFrame,
    steps: pd.DataFrame,
    *,
    images: Sequence[tuple[Path | Image.Image, str]] = (),
) -> Path:
    """Write `report.html` and `plots/*.png` (light colours) into the folder of a run.

    Args:
        run_dir: the run's folder; made if it does not exist.
        summary: figures as `serving.metrics.summarize` gives them. An entry `config`, a mapping, is shown as the
            configuration of the run; values may be nested.
        records: the records table, one row per request (`data.tables.RECORDS`).
        steps: the steps table, one row per denoising iteration (`data.tables.STEPS`).
        images: image or its file, with a caption; the first 96 are put into the page, at most 256 px wide and high.
            A file that cannot be read is named in its place.

    Returns:
        The path of `report.html`. Existing files are replaced, each atomically.

    Raises:
        OSError: a file cannot be written.
    """
    run_dir = Path(run_dir)
    data = RunData.of(summary.get("duration"), records, steps)
    plots = draw_all(data)
    for name, (light, _) in plots.items():
        write_bytes(run_dir / "plots" / f"{name}.png", light)
    path = run_dir / "report.html"
    write_text(path, _page(summary, data, plots, images))
    return path


def _page(
    summary: Mapping[str, Any],
    data: RunData,
    plots: Mapping[str, tuple[bytes, bytes]],
    images: Sequence[tuple[Path | Image.Image, str]],
) -> str:
    title = f"Serve run of {summary.get('model', 'a model')}"
    config = summary.get("config") or {}
    facts = [summary.get("dataset"), config.get("policy"), f"{len(data.records)} requests"]
    body = [
        header(title, facts),
        _notes(data),
        _tiles(summary, data),
        _plots(plots),
        _per_resolution(summary.get("per_resolution") or {}),
        _problems(data.records),
        _images(images),
        _details(summary, config),
        "<footer>Times count from the start of the trace. Made by psctl.</footer>",
    ]
    return page(title, body)


def _notes(data: RunData) -> str:
    if not data.records:
        return '<p class="note">This run had no requests.</p>'
    if not data.completed:
        return '<p class="note">No request was completed, so there is no latency to show. The reasons stand below.</p>'
    return ""


def _tiles(summary: Mapping[str, Any], data: RunData) -> str:
    total = len(data.records)
    attainment = summary.get("slo_attainment_rate")
    met = f"{summary.get('slo_met_success')} of {len(data.judged)} in time"
    scale = summary.get("slo_scale")
    name = "SLO attainment" if scale is None else f"SLO attainment ({scale:g}x)"
    tiles = [
        (name, _share(attainment), met if attainment is not None else "no request had an SLO"),
        ("Completed", str(len(data.completed)), f"of {total}"),
        ("Throughput", _rate(summary.get("throughput_qps")), "images"),
        ("Goodput", _rate(summary.get("goodput_qps")), "images within the SLO"),
        ("Median latency", _seconds(summary.get("latency_p50")), f"p95 {_seconds(summary.get('latency_p95'))}"),
        ("Mean queueing", _seconds(summary.get("queueing_mean")), f"p95 {_seconds(summary.get('queueing_p95'))}"),
    ]
    inner = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}<br><small>{escape(more)}</small></dd></div>"
        for label, value, more in tiles
    )
    return f'<dl class="tiles">{inner}</dl>'


def _plots(plots: Mapping[str, tuple[bytes, bytes]]) -> str:
    if not plots:
        return ""
    figures = [figure(light, dark, PLOTS[name][1], is_wide=name in WIDE_PLOTS) for name, (light, dark) in plots.items()]
    return f'<h2>What happened</h2><section class="plots">{"".join(figures)}</section>'


def _per_resolution(rows: Mapping[str, Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    columns = ("requests", "completed", "SLO attainment", "mean latency", "p95 latency", "mean queueing")
    head = "".join(f'<th class="number">{name}</th>' for name in columns)
    body = []
    for name, row in rows.items():
        rate = row.get("slo_attainment_rate")
        cells = [
            str(row.get("requests", DASH)),
            str(row.get("completed", DASH)),
            _share(rate),
            *(_seconds(row.get(key)) for key in ("latency_mean", "latency_p95", "queueing_mean")),
        ]
        body.append(
            f"<tr><th>{escape(name)}</th>{''.join(f'<td class=number>{escape(cell)}</td>' for cell in cells)}</tr>"
        )
    return (
        '<h2>By resolution</h2><div class="scroll"><table><thead><tr><th>resolution (px)</th>'
        f"{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _problems(records: Sequence[RequestRecord]) -> str:
    problems = [record for record in records if record.status != "completed"]
    if not problems:
        return ""
    counts = ", ".join(f"{count} {status}" for status, count in Counter(record.status for record in problems).items())
    body = [
        f'<tr><td class="number">{row.request_id}</td><td class="bad">{escape(row.status)}</td>'
        f"<td>{escape(row.reason or DASH)}</td><td>{escape(str(row.resolution))}</td>"
        f'<td class="number">{_seconds(row.arrival_s)}</td><td class="number">{_seconds(row.finish_s)}</td>'
        f"<td>{escape(row.prompt)}</td></tr>"
        for row in problems[:MAX_PROBLEMS]
    ]
    left_out = len(problems) - len(body)
    more = f"<tr><td colspan=7>and {left_out} more: see the records table</td></tr>" if left_out > 0 else ""
    return (
        f"<h2>Requests without an image <small>{escape(counts)}</small></h2>"
        '<div class="scroll"><table><thead><tr><th class="number">request</th><th>status</th><th>reason</th>'
        '<th>resolution</th><th class="number">arrived</th><th class="number">ended</th><th>prompt</th></tr></thead>'
        f"<tbody>{''.join(body)}{more}</tbody></table></div>"
    )


def _images(images: Sequence[tuple[Path | Image.Image, str]]) -> str:
    if not images:
        return ""
    shown = images[:MAX_IMAGES]
    count = f"{len(shown)} of {len(images)}" if len(images) > len(shown) else str(len(images))
    figures = "".join(
        f'<figure><div class="frame">{image_tag(source)}</div><figcaption>{escape(caption)}</figcaption></figure>'
        for source, caption in shown
    )
    return f'<h2>Images <small>{count}</small></h2><section class="images">{figures}</section>'


def _details(summary: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    figures = [(key, _figure(key, value)) for key, value in summary.items() if key not in ("config", "per_resolution")]
    tables = []
    if config:
        tables.append(("Configuration", [(key, _plain(value)) for key, value in config.items()]))
    tables.append(("All figures", figures))
    return (
        '<div class="columns">'
        + "".join(f"<div><h2>{name}</h2>{pairs(rows)}</div>" for name, rows in tables)
        + "</div>"
    )


def _figure(key: str, value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if key.endswith(_PER_SECOND):
            return _rate(value)
        if key.endswith("_rate"):
            return _share(value)
        if key.startswith(_SECONDS):
            return _seconds(value)
    return _plain(value)


def _plain(value: Any) -> str:
    if value is None:
        return DASH
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_plain(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_plain(item) for item in value)
    return str(value)


def _share(value: float | None) -> str:
    return DASH if value is None else f"{value:.1%}"


def _seconds(value: float | None) -> str:
    if value is None:
        return DASH
    return f"{value * 1e3:.0f} ms" if 0 < value < 1 else f"{value:.2f} s"


def _rate(value: float | None) -> str:
    return DASH if value is None else f"{value:.3g} /s"
