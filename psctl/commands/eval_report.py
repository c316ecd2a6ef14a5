"""`psctl eval report`: tables of image quality as in papers, with pairs of images."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..flags import flag
from ..options.target import WHERE, Target
from ..output import Output

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...eval.report.tables import ReportTable

_FOLDER = "eval-report"


def eval_report(
    *,
    results: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RESULT",
            help="Runs or result files of eval and eval compare. Default: the newest in the workspace.",
            show_default=False,
        ),
    ] = None,
    output_dir: Annotated[
        Path | None,
        flag("--output-dir -o", "Folder of the report. Default: eval-report, in the workspace.", file_okay=False),
    ] = None,
    num_pairs: Annotated[int, flag("--num-pairs", "Number of image pairs per configuration.", min=0)] = 12,
    target: Annotated[Target, WHERE.only("workspace")],
    out: Output,
) -> None:
    """Report CLIP score, FID, LPIPS and PSNR of the original and of ours, for each model and data set.

    Writes report.md, report.json and report.html, which embeds its pictures. A missing value is shown as a dash, with
    the command that measures it.

    Examples:

        psctl eval compare --model emoji-xl && psctl eval report
        psctl eval report psctl-workspace/emoji-xl/cpu/runs/compare-20260131T094500Z -o quality
        psctl eval report xl-compare.json sd3-compare.json --json
    """
    root = target.root.root
    with out.status("Reading results ..."):
        from ...eval.report.render import write_quality_report
    with out.phases() as start:
        report = write_quality_report(
            results or [],
            output_dir or root / _FOLDER,
            workspace_root=root,
            num_pairs=num_pairs,
            on_warning=out.warn,
            start_phase=start,
        )
    out.data(report.content | {"files": report.files}, table=lambda: _tables(report.tables))
    out.note(f"Report: {report.files['html']}")


def _tables(tables: "list[ReportTable]") -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for table in tables:
        parts.append(table.to_table(title=table.title).to_rich())
        parts += [Text(f"{what} {command}") for what, command in table.not_measured]
    return Group(*parts)
