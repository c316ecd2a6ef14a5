"""One quality report from end to end: read results, build the tables, choose image pairs, write three files.

The report is Markdown, JSON, and one HTML file with embedded pictures.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ...data.errors import UsageError
from ...data.files import write_json, write_text
from ...profiling.report.page import image_tag, page
from ...profiling.report.table import markdown_text
from ..sets.generate import ImageItem, flat_settings, read_manifest
from ..sets.image_sets import require_same_prompts
from .gather import ReportedSide, Subject, find_results, gather
from .tables import MetricNetwork, ReportFigure, ReportTable, tables_of

REPORT_KIND = "psctl-eval-report"
VERSION = 1
TITLE = "Image quality"
_SUFFIXES = {"markdown": "md", "json": "json", "html": "html"}
_TEMPLATES = Path(__file__).with_name("templates")
_INTRO = (
    "Each figure comes with its 95 % interval and N, the number of images or pairs behind it; a letter names its "
    "judge. Original is plain diffusers; w/ Orig. is against its images, w/ G.T. against real ones (ground truth)."
)


@dataclass(frozen=True, slots=True)
class Report:
    """A report that was written.

    Attributes:
        tables: the three tables.
        content: content of `report.json`.
        files: paths by format: markdown, json, html.
    """

    tables: list[ReportTable]
    content: dict[str, Any]
    files: dict[str, Path]


@dataclass(frozen=True, slots=True)
class ImagePair:
    """The same prompt and seed drawn in two ways.

    Attributes:
        item: item that both images show.
        original, ours: image files.
        figures: distances between the two, by metric.
        is_extreme: whether the pair is shown because it differs most.
    """

    item: ImageItem
    original: Path
    ours: Path
    figures: dict[str, float]
    is_extreme: bool = False

    @property
    def facts(self) -> str:
        """Size, seed and figures as text."""
        units = {"psnr": " dB"}
        figures = (f"{name.upper()} {value:.3g}{units.get(name, '')}" for name, value in self.figures.items())
        known = f"{self.item.width}x{self.item.height}, seed {self.item.seed}"
        return "; ".join(filter(None, (known, ", ".join(figures))))


def write_quality_report(
    paths: Sequence[Path],
    output_dir: Path,
    *,
    workspace_root: Path,
    num_pairs: int = 12,
    on_warning: Callable[[str], None] = lambda message: None,
    start_phase: Callable[[str, int], Callable[[int], None]] = lambda what, total: lambda count: None,
) -> Report:
    """Write `report.md`, `report.json` and `report.html`.

    Args:
        paths: results of `psctl eval` and `psctl eval compare`; none for all of the workspace.
        output_dir: folder for the files; created if it does not exist.
        workspace_root: root of the workspace.
        num_pairs: number of image pairs of each of our sides.
        on_warning: called with each warning for readers, which the report also contains.
        start_phase: reports progress.

    Raises:
        UsageError: as `gather`, or there are no results, or none of the patch engine.
        OSError: a file cannot be written.
    """
    warnings: list[str] = []

    def warn(message: str) -> None:
        warnings.append(message)
        on_warning(message)

    found = list(paths) or find_results(workspace_root)
    if not found:
        raise UsageError(
            f"{workspace_root}: holds no results; make some with psctl eval compare --model MODEL, or name result files"
        )
    subjects = gather(found, on_warning=warn, is_strict=bool(paths))
    if not subjects:
        raise UsageError(f"{workspace_root}: none of its {len(found)} results can be reported")
    tables = tables_of(subjects)
    sections = [
        (f"{side.label}, {subject}", *choose_pairs(subject, side, num_pairs))
        for subject in subjects
        for side in subject.ours
    ]
    files = {kind: output_dir / f"report.{end}" for kind, end in _SUFFIXES.items()}
    content = to_json(subjects, tables, warnings)
    write_json(files["json"], content)
    advance = start_phase("image pairs", sum(len(pairs) for _, pairs, _ in sections))

    def counted(pairs: Sequence[ImagePair]) -> Iterator[ImagePair]:
        for pair in pairs:
            yield pair
            advance(1)

    marks = letters(tables)
    shown = {
        "title": TITLE,
        "intro": _INTRO,
        "subjects": subjects,
        "warnings": warnings,
        "tables": tables,
        "marks": marks,
        "notes": lambda table: _notes(table, marks),
        "sections": sections,
        "drawn": list(_how_drawn(subjects)),
        "counted": counted,
        "image": image_tag,
    }
    write_text(files["markdown"], _environment(is_html=False).get_template("report.md").render(shown))
    body = _environment(is_html=True).get_template("report.html").render(shown)
    css = (_TEMPLATES / "report.css").read_text(encoding="utf-8")
    write_text(files["html"], page(TITLE, [body], css=css))
    return Report(tables, content, files)


def choose_pairs(subject: Subject, side: ReportedSide, num_pairs: int) -> tuple[list[ImagePair], str | None]:
    """Choose image pairs of a side and its original.

    Two thirds of `num_pairs` are spread evenly over the prompts, so that they are not hand-picked. The others are the
    pairs that differ most, by LPIPS or else PSNR, if that was measured and they are not among the first.

    Returns:
        The pairs, and the reason if there are none.
    """
    original = subject.original
    if original is None:
        return [], "the original was not measured"
    if num_pairs == 0:
        return [], None
    if original.images is None or side.images is None:
        who = "the original's" if original.images is None else "its"
        return [], f"{who} images are not where they were drawn"
    try:
        manifests = read_manifest(original.images), read_manifest(side.images)
        require_same_prompts(*manifests)
    except UsageError as error:
        return [], str(error)
    items = manifests[0].items
    extremes = _most_different(side)[: num_pairs // 3]
    num_spread = min(num_pairs - len(extremes), len(items))
    spread = [items[i * len(items) // num_spread] for i in range(num_spread)]
    by_id = {item.id: item for item in items}
    chosen = dict.fromkeys([*spread, *(by_id[name] for name in extremes if name in by_id)])
    return [
        ImagePair(
            item,
            original.images / item.file,
            side.images / item.file,
            {name: values[item.id] for name, values in side.per_image.items() if item.id in values},
            item.id in extremes,
        )
        for item in chosen
    ], None


def _most_different(side: ReportedSide) -> list[str]:
    for name, is_larger_worse in (("lpips", True), ("psnr", False)):
        if values := side.per_image.get(name):
            return sorted(values, key=lambda key: values[key], reverse=is_larger_worse)
    return []


def to_json(subjects: Sequence[Subject], tables: Sequence[ReportTable], warnings: Sequence[str]) -> dict[str, Any]:
    """Return all that the tables show, and the settings of the images, as JSON."""
    shown = ("label", "settings", "cache_use", "sources")
    return {
        "kind": REPORT_KIND,
        "version": VERSION,
        "tables": {
            table.key: {
                "title": table.title,
                "columns": table.columns,
                "rows": [
                    {name: asdict(cell) if isinstance(cell, ReportFigure) else cell for name, cell in row.items()}
                    for row in table.rows
                ],
                "missing": [{"what": what, "command": command} for command, what in table.missing.items()],
            }
            for table in tables
        },
        "subjects": [
            {
                "model": subject.model,
                "dataset": subject.dataset,
                "sides": [{name: getattr(side, name) for name in shown} for side in subject.sides],
            }
            for subject in subjects
        ],
        "warnings": list(warnings),
    }


def letters(tables: Sequence[ReportTable]) -> dict[MetricNetwork, str]:
    """Return a letter for each judge of a report: a, b, ..., z, aa, ..."""
    judges = dict.fromkeys(judge for table in tables for judge in table.judges)
    return {judge: _letter(i) for i, judge in enumerate(judges)}


def _letter(number: int) -> str:
    return (_letter(number // 26 - 1) if number >= 26 else "") + chr(ord("a") + number % 26)


def _notes(table: ReportTable, marks: Mapping[MetricNetwork, str]) -> Iterator[tuple[str, str]]:
    """Yield the lines under a table, each with a command or "": judges, real images, and missing figures."""
    for judge in table.judges:
        yield f"{marks[judge]}: {judge.name}, weights SHA-256 {judge.weights_sha256[:16]}", ""
    if table.references:
        yield f"G.T.: {'; '.join(table.references)}", ""
    yield from table.not_measured


def _how_drawn(subjects: Sequence[Subject]) -> Iterator[str]:
    for subject in subjects:
        for side in subject.sides:
            flat = flat_settings(side.settings)
            hidden = ("model", "dataset", "generated", "reference")
            if flat.get("cache.mode", "off") == "off":
                hidden += tuple(name for name in flat if name.startswith("cache."))
            shown = {name: value for name, value in flat.items() if value is not None and name not in hidden}
            settings = ", ".join(f"{name} {_plain(value)}" for name, value in shown.items())
            yield f"{side.label}, {subject}: {settings}; read from {', '.join(side.sources)}"


def _plain(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _environment(*, is_html: bool) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=is_html,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.filters["md"] = markdown_text
    return environment
