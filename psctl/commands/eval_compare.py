"""`psctl eval compare`: compares two configurations on the same prompts and seeds."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...data.errors import UsageError
from ...data.files import require_places
from ...eval.options import EvalOptions, plan_eval
from ...serving.options import EngineOptions
from ..flags import flag
from ..options.common import OutputFile
from ..options.groups import DRAW, ENGINE, JudgeFlags
from ..options.target import Target
from ..output import Output
from .eval import cache_line, interval_text, metric_table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...eval.compare.comparison import Comparison

_KIND = "compare"


def eval_compare(
    *,
    first: Annotated[
        Path | None, typer.Argument(metavar="A", help="The original: images drawn by eval, or a result of eval.")
    ] = None,
    second: Annotated[Path | None, typer.Argument(metavar="B", help="The same for the other configuration.")] = None,
    metrics: Annotated[
        str | None,
        flag("--metrics", "Metrics: all, or some of psnr,ssim,lpips,clip,fid. Default: all, but with A and B no fid."),
    ] = None,
    reference: Annotated[
        Path | None, flag("--reference", "Folder of real images, for fid. Default: those of the data set.")
    ] = None,
    drawing: Annotated[EvalOptions, DRAW.fixing(metrics=("clip",))],
    judging: JudgeFlags,
    output_file: OutputFile = None,
    patched: Annotated[EngineOptions, ENGINE.without("engine")],
    target: Target,
    out: Output,
) -> None:
    """Compare the images of two configurations in pairs: mean difference with its interval, and win rate of the second.

    A and B must have been drawn for the same prompts, seeds and sizes. Without A and B, both are drawn: A by plain
    diffusers, B by the patch engine with the requested cache. An interrupted run continues where it stopped.

    Examples:

        psctl eval compare --model emoji-xl --cache patch --cache-threshold 0.05
        psctl eval compare plain-images patched-images --metrics all
        psctl eval compare A B --metrics lpips,fid --reference coco/val2014 --output-file compare.json
    """

    if (first is None) != (second is None):
        raise UsageError("give two sides to compare, A and B, or none to have both drawn")
    if first is not None and patched.cache.is_on:
        raise UsageError("--cache says how images are drawn, but with A and B nothing is drawn")
    root = target.root
    require_places(target.workspace, file=output_file)
    with out.status("Loading ..."):
        from ...eval.compare.run import COMPARE_METRICS, USUAL_METRICS, check_metrics, compare
        from ...eval.measurer import Measurer
        from ...eval.result_files import COMPARE_FILE
        from ...serving.models.placement import resolve_device

        judges = judging.to_judges(resolve_device(target.device))
    wanted = USUAL_METRICS if metrics is None else tuple(name.strip() for name in metrics.split(","))
    if wanted == ("all",) or (metrics is None and first is None):
        wanted = COMPARE_METRICS
    check_metrics(wanted)
    if first is None or second is None:
        # Of the data set only FID needs the images.
        needed = ("fid",) if "fid" in wanted and reference is None else ("clip",)
        judges.check(wanted)
        first, second = _draw(out, replace(drawing, metrics=needed), (EngineOptions("plain"), patched), target)
    with out.phases() as start:
        measurer = Measurer.of(drawing, judges, root.root, start)
        comparison = compare(first, second, wanted, measurer, reference=reference)
    settings = comparison.second.settings
    place = root.for_model(str(settings.get("model", second.resolve().name)), str(settings.get("device", "cpu")))
    run_dir = place.new_run(_KIND)
    comparison.save(run_dir / COMPARE_FILE)
    if output_file is not None:
        comparison.save(output_file)
    content = {name: value for name, value in comparison.to_json().items() if name != "per_image"}
    out.data(content | {"run_dir": run_dir}, table=lambda: _tables(comparison))
    for warning in comparison.warnings:
        out.warn(warning)
    out.note(f"Results: {run_dir}; tables and pictures: psctl eval report {run_dir}")


def _draw(
    out: Output, options: EvalOptions, engines: tuple[EngineOptions, EngineOptions], target: Target
) -> tuple[Path, Path]:
    """Draw the same prompts through two engines, one after the other; returns the folders of images."""
    from ...eval.run import draw_set
    from ...eval.sets.drawers import EngineDrawer

    with out.status(f"Drawing {options.num_prompts} text-image pairs from {options.dataset} ..."):
        plan = plan_eval(options, target.defaults(), target.root.root)
    folders = []
    for engine in engines:
        served, place = target.load(out, engine)
        with out.phases() as start:
            what = f"denoising steps, {engine.engine} engine"
            drawn = draw_set(EngineDrawer(served), plan, options, place, start_phase=start, what=what)
        for reason in drawn.failed:
            out.warn(f"image failed: {reason}")
        folders.append(drawn.folder)
        # One model at a time on the device.
        del served
    return folders[0], folders[1]


def _tables(comparison: "Comparison") -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    from ...profiling.report.table import Table

    parts: list[RenderableType] = [
        Text(f"{name}: {values[0]} -> {values[1]}") for name, values in comparison.changed.items()
    ]
    if comparison.metrics:
        parts.append(metric_table(list(comparison.metrics.values()), "B's images against A's").to_rich())
    if comparison.differences:
        columns = ("metric", "A", "B", "difference", "95 % interval", "B wins", "n", "better")
        rows = [
            (
                each.name,
                f"{each.first:.4g}",
                f"{each.second:.4g}",
                f"{each.difference:+.4g}",
                interval_text(each.low, each.high),
                "-" if each.win_rate is None else f"{each.win_rate:.0%}",
                str(each.n),
                each.direction,
            )
            for each in comparison.differences.values()
        ]
        parts.append(Table("B - A", columns, rows).to_rich())
    for name, side in (("A", comparison.first), ("B", comparison.second)):
        if side.cache_use is not None:
            parts.append(Text(f"{name}: {cache_line(side.settings['cache']['mode'], side.cache_use)}"))
    return Group(*parts)
