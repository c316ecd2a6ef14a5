"""The tables of `psctl eval report`: CLIP score and FID as PatchedServe's tables 1 and 2, and image quality as
DistriFusion's table 1 has it. What was not measured is a dash, with the command that measures it under the table.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..compare.comparison import FID_TO_FIRST
from ..compare.paired import PairedResult
from ..results import MetricResult
from .commands import measuring_command
from .sides import ORIGINAL, OURS, ReportedSide, Subject


@dataclass(frozen=True, slots=True)
class Judge:
    """Who measured: the network and its weights."""

    name: str
    weights_sha256: str


@dataclass(frozen=True, slots=True)
class Figure:
    """A number in a table.

    Attributes:
        value: the number.
        low, high: 95 % interval, or None.
        n: number of images or pairs behind it.
        unit: "dB", "%" or "".
        judge: None where no network is needed.
        reference: name of the images that it was measured against, or None.
        source: the file that it was read from.
        is_difference: shown with its sign.
    """

    value: float
    low: float | None
    high: float | None
    n: int
    unit: str = ""
    judge: Judge | None = None
    reference: str | None = None
    source: str = ""
    is_difference: bool = False

    @property
    def text(self) -> str:
        """The number with its unit."""
        if self.unit == "%":
            return f"{100 * self.value:.1f} %"
        return f"{self.value:{'+' if self.is_difference else ''}.4g} {self.unit}".strip()

    @property
    def interval(self) -> str:
        """Its interval, or "" where there is none."""
        return "" if self.low is None or self.high is None else f"{self.low:.4g} to {self.high:.4g}"


@dataclass(frozen=True, slots=True)
class Missing:
    """A cell without a figure.

    Attributes:
        is_by_nature: there is nothing to measure, such as the original against itself.
    """

    is_by_nature: bool = False


Cell = str | Figure | Missing


@dataclass(frozen=True, slots=True)
class ReportTable:
    """One table.

    Attributes:
        key: its name in JSON.
        title: its heading.
        about: what it shows, in a sentence or two.
        columns: headings by name.
        rows: cells by the name of the column; a column without a cell is empty.
        missing: for each command that measures what is missing, what that is.
    """

    key: str
    title: str
    about: str
    columns: dict[str, str]
    rows: list[dict[str, Cell]]
    missing: dict[str, list[str]]

    @property
    def judges(self) -> list[Judge]:
        """Of the figures, in their order."""
        figures = [cell for row in self.rows for cell in row.values() if isinstance(cell, Figure)]
        return list(dict.fromkeys(figure.judge for figure in figures if figure.judge is not None))

    @property
    def references(self) -> list[str]:
        """Real images that figures were measured against."""
        figures = [cell for row in self.rows for cell in row.values() if isinstance(cell, Figure)]
        return list(dict.fromkeys(figure.reference for figure in figures if figure.reference is not None))

    @property
    def not_measured(self) -> list[tuple[str, str]]:
        """For people: what is missing, and the command that measures it."""
        return [
            (f"not measured: {'; '.join(dict.fromkeys(what))}. Measure with:", command)
            for command, what in self.missing.items()
        ]


def tables_of(subjects: Sequence[Subject]) -> list[ReportTable]:
    """The three tables."""
    return [
        _original_against_ours(
            subjects,
            "clip_score",
            "CLIP score \N{UPWARDS ARROW}",
            "How well images fit their prompts: PatchedServe's table 1.",
            "CLIP score",
            is_clip=True,
        ),
        _original_against_ours(
            subjects,
            "fid",
            "FID to real images \N{DOWNWARDS ARROW}",
            "How far the images as a set are from real ones: PatchedServe's table 2.",
            "FID w/ G.T.",
            is_clip=False,
        ),
        _quality(subjects),
    ]


def _original_against_ours(
    subjects: Sequence[Subject], key: str, title: str, about: str, what: str, *, is_clip: bool
) -> ReportTable:
    columns = {
        "model": "model",
        "dataset": "data set",
        "method": "method",
        "original": ORIGINAL.lower(),
        "ours": "ours",
        "difference": "ours - original",
    }
    rows: list[dict[str, Cell]] = []
    missing: dict[str, list[str]] = {}
    for subject in subjects:
        names = sorted({name for side in subject.sides for name in side.metrics if name.startswith("clip[")})
        for name in (names or ["clip[]"]) if is_clip else ["fid"]:
            for side in subject.ours or [None]:
                row: dict[str, Cell] = {
                    "model": subject.model,
                    "dataset": subject.dataset,
                    "method": OURS if side is None else side.label,
                    "original": _figure(subject.original, name),
                    "ours": _figure(side, name),
                    "difference": Missing() if side is None else _difference(side, name),
                }
                rows.append(row)
                for where, who in (("original", ORIGINAL), ("ours", row["method"])):
                    if isinstance(row[where], Missing):
                        missing.setdefault(measuring_command(subject, side), []).append(
                            f"{what} of {_who(subject, str(who))}"
                        )
                if isinstance(row["difference"], Missing) and not any(
                    isinstance(row[where], Missing) for where in ("original", "ours")
                ):
                    missing.setdefault(measuring_command(subject, side), []).append(
                        f"paired difference in {what} of {_who(subject, str(row['method']))}"
                    )
    return ReportTable(key, title, about, columns, rows, missing)


_QUALITY = {
    "psnr_original": "PSNR w/ Orig.",
    "lpips_original": "LPIPS w/ Orig.",
    "lpips_truth": "LPIPS w/ G.T.",
    "fid_original": "FID w/ Orig.",
    "fid_truth": "FID w/ G.T.",
}
# Whether more or less is better.
_ARROWS = {"psnr": "\N{UPWARDS ARROW}", "lpips": "\N{DOWNWARDS ARROW}", "fid": "\N{DOWNWARDS ARROW}"}


def _quality(subjects: Sequence[Subject]) -> ReportTable:
    columns = {"model": "model", "dataset": "data set", "steps": "steps", "method": "method"}
    columns |= {name: f"{title} {_ARROWS[name.split('_')[0]]}" for name, title in _QUALITY.items()}
    columns["saved"] = "computation saved"
    rows: list[dict[str, Cell]] = []
    missing: dict[str, list[str]] = {}
    for subject in subjects:
        for side in [subject.original, *(subject.ours or [None])]:
            is_original = side is subject.original
            label = ORIGINAL if is_original else OURS if side is None else side.label
            steps = subject.sides[0].settings.get("num_inference_steps")
            own: Cell = Missing(is_by_nature=True)
            row: dict[str, Cell] = {
                "model": subject.model,
                "dataset": subject.dataset,
                "steps": str(steps),
                "method": label,
                # Against itself the original has nothing to show.
                "psnr_original": own if is_original else _figure(side, "psnr", to_original=True),
                "lpips_original": own if is_original else _figure(side, "lpips", to_original=True),
                "lpips_truth": _figure(side, "lpips"),
                "fid_original": own if is_original else _figure(side, FID_TO_FIRST, to_original=True),
                "fid_truth": _figure(side, "fid"),
                "saved": _saved(side),
            }
            rows.append(row)
            wanted = [_QUALITY[name] for name in _QUALITY if row[name] == Missing()]
            if wanted:
                partner = (subject.ours or [None])[0] if is_original else side
                text = f"{', '.join(wanted)} of {_who(subject, label)}"
                missing.setdefault(measuring_command(subject, partner), []).append(text)
    about = (
        "How far the images are from those of plain diffusers (w/ Orig.) and from real ones (w/ G.T.): the quality "
        "columns of DistriFusion's table 1."
    )
    return ReportTable("quality", "PSNR, LPIPS and FID", about, columns, rows, missing)


def _saved(side: ReportedSide | None) -> Cell:
    if side is None or side.cache_use is None:
        return Missing(is_by_nature=True)
    return Figure(
        side.cache_use["saved_computation"], None, None, side.cache_use["num_images"], "%", source=side.sources[0]
    )


def _figure(side: ReportedSide | None, name: str, *, to_original: bool = False) -> Cell:
    if side is None:
        return Missing()
    metric = (side.to_original if to_original else side.metrics).get(name)
    if metric is None:
        return Missing()
    reference = metric.details.get("reference") if not to_original else None
    return Figure(
        metric.value,
        metric.low,
        metric.high,
        metric.n,
        metric.unit,
        judge_of(metric),
        None if reference is None else str(reference),
        side.sources[-1],
    )


def _difference(side: ReportedSide, name: str) -> Cell:
    each: PairedResult | None = side.differences.get(name)
    if each is None:
        return Missing()
    judge = None if name not in side.metrics else judge_of(side.metrics[name])
    return Figure(each.difference, each.low, each.high, each.n, "", judge, source=side.sources[-1], is_difference=True)


def judge_of(metric: MetricResult) -> Judge | None:
    """The network behind a metric, or None for PSNR and SSIM, which need none."""
    checksum = metric.details.get("weights_sha256")
    if checksum is None:
        return None
    if metric.name.startswith("clip["):
        return Judge(f"CLIP {metric.name[5:-1]}", str(checksum))
    kind = "LPIPS, AlexNet v0.1" if metric.name == "lpips" else "Inception v3"
    weights = metric.details.get("weights")
    return Judge(kind if weights is None else f"{kind} ({weights})", str(checksum))


def _who(subject: Subject, label: str) -> str:
    return f"{label}, {subject.model} on {subject.dataset}"
