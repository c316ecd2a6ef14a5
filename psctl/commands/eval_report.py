"""`psctl eval report`: tables of image quality as papers have them, with image pairs side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...data.workspace import DEFAULT_WORKSPACE, Workspace
from ..options.common import Json, Quiet, WorkspaceRoot
from ..output import Output
from .eval import phases

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...eval.report.tables import ReportTable

_FOLDER = "eval-report"


def eval_report(
    results: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RESULT",
            help="Runs or result files of eval compare and eval. Default: the newest of the workspace.",
            show_default=False,
        ),
    ] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            "--output-dir", "-o", file_okay=False, help="Where it goes. Default: eval-report, in the workspace."
        ),
    ] = None,
    num_pairs: Annotated[int, typer.Option("--num-pairs", min=0, help="Image pairs of each configuration.")] = 12,
    workspace: WorkspaceRoot = Path(DEFAULT_WORKSPACE),
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Report image quality: original against ours, in CLIP score, FID, LPIPS and PSNR, for each model and data set.

    Writes report.md, report.json and report.html, which holds its pictures. What was not measured is a dash, with the
    command that measures it.

    Examples:

        psctl eval compare --model emoji-xl && psctl eval report

        psctl eval report psctl-workspace/emoji-xl/cpu/runs/compare-20260131T094500Z -o quality

        psctl eval report xl-compare.json sd3-compare.json --json
    """
    out = Output(json=json, quiet=quiet)
    root = Workspace(workspace).root
    target = root / _FOLDER if output_dir is None else output_dir.expanduser()
    with out.status("Reading results ..."):
        from ...eval.report.render import write_quality_report
    with phases(out) as start_phase:
        report = write_quality_report(
            [path.expanduser() for path in results or ()],
            target,
            workspace_root=root,
            num_pairs=num_pairs,
            on_warning=out.warn,
            start_phase=start_phase,
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
