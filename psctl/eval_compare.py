"""`psctl eval compare`: two configurations, the same prompts and seeds."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..data.files import require_places
from ..data.workspace import DEFAULT_WORKSPACE, Workspace
from .eval import ClipModel, FidWeights, LpipsWeights, MaxBad, _phases, interval_text, metric_table
from .options import Device, Json, Quiet, Seed, WorkspaceRoot
from .output import Output

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..eval.compare_run import Comparison


def eval_compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="Images drawn by eval, or its result: the original.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="The same of the other configuration.")],
    metrics: Annotated[
        str, typer.Option("--metrics", help="Of images: some of psnr,ssim,lpips,clip,fid.")
    ] = "psnr,ssim,lpips,clip",
    reference: Annotated[Path | None, typer.Option("--reference", help="Folder of real images, for fid.")] = None,
    clip_model: ClipModel = "emoji-clip",
    fid_weights: FidWeights = None,
    lpips_weights: LpipsWeights = None,
    max_bad: MaxBad = 0,
    output_file: Annotated[
        Path | None, typer.Option("--output-file", dir_okay=False, help="Write the comparison as JSON, for psctl gate.")
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    workspace: WorkspaceRoot = Path(DEFAULT_WORKSPACE),
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare two configurations pair by pair: mean difference with its interval, and win rate of the second.

    A and B must have been drawn for the same prompts, seeds and sizes.

    Examples:

        psctl eval compare plain-images patched-images

        psctl eval compare runs/eval-A runs/eval-B --json

        psctl eval compare A B --metrics lpips,fid --reference coco/val2014 --output-file compare.json
    """
    out = Output(json=json, quiet=quiet)
    require_places(file=output_file)
    with out.status("Loading ..."):
        from ..eval.compare_run import compare
        from ..eval.eval_options import FEATURES_DIR
        from ..eval.judges import Judges
        from ..serving.loading import resolve_device

        judges = Judges(clip_model, fid_weights, lpips_weights, resolve_device(device))
    with _phases(out) as start_phase:
        comparison = compare(
            first,
            second,
            tuple(name.strip() for name in metrics.split(",")),
            judges,
            reference=reference,
            seed=seed,
            max_bad=max_bad,
            features_dir=Workspace(workspace).root / FEATURES_DIR,
            start_phase=start_phase,
        )
    if output_file is not None:
        comparison.save(output_file.expanduser())
    out.data(comparison.to_json(), table=lambda: _tables(comparison))
    for warning in comparison.warnings:
        out.warn(warning)


def _tables(comparison: "Comparison") -> "RenderableType":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = [
        Text(f"{name}: {values[0]} -> {values[1]}") for name, values in comparison.changed.items()
    ]
    if comparison.metrics:
        distances = metric_table(list(comparison.metrics.values()))
        distances.title, distances.title_justify = "B's images against A's", "left"
        parts.append(distances)
    if comparison.differences:
        table = Table(title="B - A", title_justify="left")
        for name in ("metric", "A", "B", "difference", "95 % interval", "B wins", "n", "better"):
            table.add_column(name, justify="left" if name in ("metric", "better") else "right")
        for each in comparison.differences.values():
            table.add_row(
                Text(each.name),
                f"{each.first:.4g}",
                f"{each.second:.4g}",
                f"{each.difference:+.4g}",
                interval_text(each.low, each.high),
                "-" if each.win_rate is None else f"{each.win_rate:.0%}",
                str(each.n),
                each.direction,
            )
        parts.append(table)
    return Group(*parts)
