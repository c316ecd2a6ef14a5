"""One quality report from end to end: read results, make the tables, choose pictures, write three files."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...data.errors import UsageError
from ...data.files import write_json, write_text
from .pairs import choose_pairs
from .sides import find_results, gather
from .tables import ReportTable, tables_of

REPORT_NAME = "report"


@dataclass(frozen=True, slots=True)
class Report:
    """What was written.

    Attributes:
        tables: the three tables.
        content: of `report.json`.
        files: paths by format: markdown, json, html.
    """

    tables: list[ReportTable]
    content: dict[str, Any]
    files: dict[str, Path]


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
        output_dir: where the files go; made if it does not exist.
        workspace_root: of the workspace.
        num_pairs: image pairs of each of our sides.
        on_warning: told what a reader must know; the report says it, too.
        start_phase: shows progress.

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
        raise UsageError(f"{workspace_root}: none of its {len(found)} results can stand in a report")
    tables = tables_of(subjects)
    content_of_html = [
        (subject, side, *choose_pairs(subject, side, num_pairs)) for subject in subjects for side in subject.ours
    ]
    from .render import to_html, to_json, to_markdown

    files = {kind: output_dir / f"{REPORT_NAME}.{suffix}" for kind, suffix in _SUFFIXES.items()}
    content = to_json(subjects, tables, warnings)
    write_json(files["json"], content)
    write_text(files["markdown"], to_markdown(subjects, tables, warnings))
    advance = start_phase("image pairs", sum(len(each[2]) for each in content_of_html))
    write_text(files["html"], to_html(subjects, tables, warnings, content_of_html, on_pair=lambda: advance(1)))
    return Report(tables, content, files)


_SUFFIXES = {"markdown": "md", "json": "json", "html": "html"}
