"""Tables of `psctl eval report`: CLIP score and FID as in PatchedServe's tables 1 and 2, and image quality as in
DistriFusion's table 1. A dash stands for a figure that was not measured; the command that measures it is given below.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...profiling.report.table import Cell, Table
from ...serving.options import PATCH_OPTIONS
from ..compare.comparison import FID_TO_FIRST
from ..results import MetricResult
from .gather import ORIGINAL, OURS, ReportedSide, Subject

DASH = "\N{EN DASH}"
_UP, _DOWN = "\N{UPWARDS ARROW}", "\N{DOWNWARDS ARROW}"  # whether more or less is better
_COMPARED = {
    "model": "model",
    "dataset": "data set",
    "method": "method",
    "original": ORIGINAL.lower(),
    "ours": "ours",
    "difference": "ours - original",
}
_QUALITY = {
    "psnr_original": ("PSNR w/ Orig.", _UP),
    "lpips_original": ("LPIPS w/ Orig.", _DOWN),
    "lpips_truth": ("LPIPS w/ G.T.", _DOWN),
    "fid_original": ("FID w/ Orig.", _DOWN),
    "fid_truth": ("FID w/ G.T.", _DOWN),
}


@dataclass(frozen=True, slots=True)
class MetricNetwork:
    """Network behind a metric, with its weights."""

    name: str
    weights_sha256: str


@dataclass(frozen=True, slots=True)
class ReportFigure:
    """A number in a table.

    Attributes:
        value: the number.
        low, high: 95 % interval, or None.
        n: number of images or pairs behind it.
        unit: "dB", "%" or "".
        judge: network behind the figure; None if it needs none.
        reference: name of the reference images, or None.
        source: file from which the figure was read.
        is_difference: whether it is shown with its sign.
    """

    value: float
    low: float | None
    high: float | None
    n: int
    unit: str = ""
    judge: MetricNetwork | None = None
    reference: str | None = None
    source: str = ""
    is_difference: bool = False

    def to_cell(self, mark: str) -> Cell:
        """Return a cell with the number and its unit, above its interval and N."""
        text = f"{self.value:{'+' if self.is_difference else ''}.4g} {self.unit}".strip()
        interval = () if self.low is None or self.high is None else (f"{self.low:.4g} to {self.high:.4g}",)
        return Cell(f"{100 * self.value:.1f} %" if self.unit == "%" else text, mark, (*interval, f"N {self.n}"))


@dataclass(frozen=True, slots=True)
class ReportTable:
    """One table.

    Attributes:
        key: name of the table in JSON.
        title: heading of the table.
        about: description of the table in a sentence or two.
        columns: headings by name.
        rows: text, figure or None by name of the column.
        missing: missing figures, by the command that measures them.
    """

    key: str
    title: str
    about: str
    columns: dict[str, str]
    rows: list[dict[str, str | ReportFigure | None]] = field(default_factory=list)
    missing: dict[str, list[str]] = field(default_factory=dict)

    @property
    def figures(self) -> list[ReportFigure]:
        """Figures of the table, in order."""
        return [cell for row in self.rows for cell in row.values() if isinstance(cell, ReportFigure)]

    @property
    def judges(self) -> list[MetricNetwork]:
        """Judges of the figures, in order."""
        return list(dict.fromkeys(figure.judge for figure in self.figures if figure.judge is not None))

    @property
    def references(self) -> list[str]:
        """Real images that figures were measured against."""
        return list(dict.fromkeys(figure.reference for figure in self.figures if figure.reference is not None))

    @property
    def not_measured(self) -> list[tuple[str, str]]:
        """Descriptions of missing figures, each with the command that measures them."""
        return [
            (f"not measured: {'; '.join(dict.fromkeys(what))}. Measure with:", command)
            for command, what in self.missing.items()
        ]

    def to_table(self, marks: Mapping[MetricNetwork, str] | None = None, *, title: str = "") -> Table:
        """Return the table for display, with the letters of the judges if given."""

        def cell(value: str | ReportFigure | None) -> str | Cell:
            if not isinstance(value, ReportFigure):
                return value or DASH
            return value.to_cell("" if marks is None or value.judge is None else marks[value.judge])

        num_words = sum(any(isinstance(row[name], str) for row in self.rows) for name in self.columns)
        rows = [[cell(row[name]) for name in self.columns] for row in self.rows]
        return Table(title, list(self.columns.values()), rows, num_words)


def tables_of(subjects: Sequence[Subject]) -> list[ReportTable]:
    """Return the three tables."""
    clip = ReportTable(
        "clip_score",
        f"CLIP score {_UP}",
        "How well images fit their prompts: PatchedServe's table 1.",
        _COMPARED,
    )
    fid = ReportTable(
        "fid",
        f"FID to real images {_DOWN}",
        "How far the images as a set are from real ones: PatchedServe's table 2.",
        _COMPARED,
    )
    for subject in subjects:
        judged = sorted({name for side in subject.sides for name in side.metrics if name.startswith("clip[")})
        _set_against(clip, subject, judged or ["clip[]"], "CLIP score")
        _set_against(fid, subject, ["fid"], "FID w/ G.T.")
    return [clip, fid, _quality(subjects)]


def _set_against(table: ReportTable, subject: Subject, metrics: Iterable[str], what: str) -> None:
    """Add rows with a metric of the original and of each of our sides, and the paired difference."""
    for name in metrics:
        for side in subject.ours or [None]:
            label = OURS if side is None else side.label
            original, ours = _figure(subject.original, name), _figure(side, name)
            difference = _difference(side, name)
            table.rows.append(
                {"model": subject.model, "dataset": subject.dataset, "method": label}
                | {"original": original, "ours": ours, "difference": difference}
            )
            lacking = [f"{what} of {who}" for figure, who in ((original, ORIGINAL), (ours, label)) if figure is None]
            if not lacking and difference is None:
                lacking = [f"paired difference in {what} of {label}"]
            _note_missing(table, subject, side, lacking)


def _quality(subjects: Sequence[Subject]) -> ReportTable:
    table = ReportTable(
        "quality",
        "PSNR, LPIPS and FID",
        "How far the images are from those of plain diffusers (w/ Orig.) and from real ones (w/ G.T.): the quality "
        "columns of DistriFusion's table 1.",
        {"model": "model", "dataset": "data set", "steps": "steps", "method": "method"}
        | {name: " ".join(heading) for name, heading in _QUALITY.items()}
        | {"saved": "computation saved"},
    )
    for subject in subjects:
        for side in [subject.original, *(subject.ours or [None])]:
            is_original = side is subject.original
            label = ORIGINAL if is_original else OURS if side is None else side.label
            figures = {
                "psnr_original": _figure(side, "psnr", to_original=True),
                "lpips_original": _figure(side, "lpips", to_original=True),
                "lpips_truth": _figure(side, "lpips"),
                "fid_original": _figure(side, FID_TO_FIRST, to_original=True),
                "fid_truth": _figure(side, "fid"),
            }
            steps = str(subject.sides[0].settings.get("num_inference_steps"))
            table.rows.append(
                {"model": subject.model, "dataset": subject.dataset, "steps": steps, "method": label}
                | figures
                | {"saved": _saved(side)}
            )
            # The original has no distance to itself.
            lacking = [
                _QUALITY[name][0]
                for name, figure in figures.items()
                if figure is None and not (is_original and name.endswith("_original"))
            ]
            partner = next(iter(subject.ours), None) if is_original else side
            _note_missing(table, subject, partner, [f"{', '.join(lacking)} of {label}"] if lacking else [])
    return table


def _note_missing(table: ReportTable, subject: Subject, side: ReportedSide | None, lacking: Iterable[str]) -> None:
    for what in lacking:
        table.missing.setdefault(measuring_command(subject, side), []).append(f"{what}, {subject}")


def _saved(side: ReportedSide | None) -> ReportFigure | None:
    if side is None or side.cache_use is None:
        return None
    use = side.cache_use
    return ReportFigure(use["saved_computation"], None, None, use["num_images"], "%", source=side.sources[0])


def _figure(side: ReportedSide | None, name: str, *, to_original: bool = False) -> ReportFigure | None:
    metric = None if side is None else (side.to_original if to_original else side.metrics).get(name)
    if side is None or metric is None:
        return None
    reference = None if to_original else metric.details.get("reference")
    return ReportFigure(
        metric.value,
        metric.low,
        metric.high,
        metric.n,
        metric.unit,
        judge_of(metric),
        None if reference is None else str(reference),
        side.sources[-1],
    )


def _difference(side: ReportedSide | None, name: str) -> ReportFigure | None:
    each = None if side is None else side.differences.get(name)
    if side is None or each is None:
        return None
    judge = judge_of(side.metrics[name]) if name in side.metrics else None
    return ReportFigure(
        each.difference, each.low, each.high, each.n, "", judge, source=side.sources[-1], is_difference=True
    )


def judge_of(metric: MetricResult) -> MetricNetwork | None:
    """Return the network behind a metric, or None for PSNR and SSIM, which need none."""
    checksum = metric.details.get("weights_sha256")
    if checksum is None:
        return None
    if metric.name.startswith("clip["):
        return MetricNetwork(f"CLIP {metric.name[5:-1]}", str(checksum))
    kind = "LPIPS, AlexNet v0.1" if metric.name == "lpips" else "Inception v3"
    weights = metric.details.get("weights")
    return MetricNetwork(kind if weights is None else f"{kind} ({weights})", str(checksum))


def measuring_command(subject: Subject, ours: ReportedSide | None) -> str:
    """Return the command that measures all metrics of the original and one of our sides; existing images are reused."""
    original = subject.original
    reference = ["--reference", "DIR"] if subject.dataset.startswith("captions:") else []
    if original is not None and ours is not None and original.images is not None and ours.images is not None:
        words = [str(original.images), str(ours.images), "--metrics", "all", *reference]
    else:
        words = [*_drawing_words((ours or original or subject.sides[0]).settings), *reference]
    return shlex.join(["psctl", "eval", "compare", *words])


def _drawing_words(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options that draw the same prompts again, or find the images that were drawn with them."""
    for name in ("model", "dataset", "num_prompts", "seed", "num_inference_steps", "guidance_scale", "policy", "dtype"):
        if settings.get(name) is not None:
            yield from (f"--{name.replace('_', '-')}", str(settings[name]))
    if settings.get("resolutions"):
        yield from ("--resolutions", ",".join(settings["resolutions"]))
    for name in PATCH_OPTIONS:
        if settings.get(name) is True:
            yield f"--{name.replace('_', '-')}"
        elif settings.get(name) not in (None, False, "auto"):
            yield from (f"--{name.replace('_', '-')}", str(settings[name]))
    cache = settings.get("cache")
    if not isinstance(cache, Mapping) or cache.get("mode", "off") == "off":
        return
    yield from ("--cache", cache["mode"])
    names = {"patch_size": "--cache-patch-size", "interval": "--cache-interval", "max_reuse": "--max-reuse"}
    for name, flag in (names | {"warmup_steps": "--warmup-steps", "memory_mb": "--cache-memory"}).items():
        if cache[name] is not None:
            yield from (flag, str(cache[name]))
    yield from ("--max-batch-size", str(settings.get("max_batch_size", 16)))
    if cache.get("threshold") is not None:
        yield from ("--cache-threshold", str(cache["threshold"]))
    elif cache.get("predictor") is not None:
        yield from ("--cache-predictor", "FILE")
