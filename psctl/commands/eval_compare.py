"""`psctl eval compare`: two configurations, the same prompts and seeds."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...data.errors import UsageError
from ...data.files import require_places
from ...data.workspace import DEFAULT_WORKSPACE, Workspace
from ..options.common import Device, DType, Json, Model, OutputFile, Quiet, Seed, WorkspaceRoot
from ..options.eval import DRAW_FLAGS, JUDGE_FLAGS, DrawFlags, JudgeFlags
from ..options.groups import CACHE_FLAGS, PATCH_FLAGS, CacheFlags, PatchFlags, with_option_groups
from ..output import Output
from .eval import cache_line, interval_text, metric_table, phases

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...eval.compare.comparison import Comparison
    from ...eval.options import EvalOptions
    from ...serving.options import EngineOptions

_KIND = "compare"


@with_option_groups
def eval_compare(
    first: Annotated[
        Path | None, typer.Argument(metavar="A", help="Images drawn by eval, or its result: the original.")
    ] = None,
    second: Annotated[Path | None, typer.Argument(metavar="B", help="The same of the other configuration.")] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics",
            help="Of images: all, or some of psnr,ssim,lpips,clip,fid. Default: all; of A and B without fid.",
        ),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option("--reference", help="Folder of real images, for fid. Default: those of the data set drawn."),
    ] = None,
    drawing: DrawFlags = DRAW_FLAGS,
    judging: JudgeFlags = JUDGE_FLAGS,
    output_file: OutputFile = None,
    seed: Seed = 0,
    model: Model = "emoji-xl",
    device: Device = "auto",
    dtype: DType = "auto",
    patching: PatchFlags = PATCH_FLAGS,
    caching: CacheFlags = CACHE_FLAGS,
    workspace: WorkspaceRoot = Path(DEFAULT_WORKSPACE),
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare two configurations pair by pair: mean difference with its interval, and win rate of the second.

    A and B must have been drawn for the same prompts, seeds and sizes. Without them, both are drawn: A by plain
    diffusers, B by the patch engine with the cache that is asked for. What is stopped goes on where it was.

    Examples:

        psctl eval compare --model emoji-xl --cache patch --cache-threshold 0.05

        psctl eval compare plain-images patched-images --metrics all

        psctl eval compare A B --metrics lpips,fid --reference coco/val2014 --output-file compare.json
    """
    out = Output(json=json, quiet=quiet)
    from ...eval.options import FEATURES_DIR, SAMPLES_DIR
    from ...serving.options import EngineOptions

    patched = patching.to_options(cache=caching)
    if (first is None) != (second is None):
        raise UsageError("give two sides to compare, A and B, or none to have both drawn")
    if first is not None and patched.cache.is_on:
        raise UsageError("--cache says how images are drawn, but with A and B nothing is drawn")
    root = Workspace(workspace)
    require_places(workspace, file=output_file)
    with out.status("Loading ..."):
        from ...eval.compare.run import COMPARE_METRICS, USUAL_METRICS, check_metrics, compare
        from ...eval.result_files import COMPARE_FILE
        from ...serving.models.loading import resolve_device

        judges = judging.to_judges(resolve_device(device))
    wanted = USUAL_METRICS if metrics is None else tuple(name.strip() for name in metrics.split(","))
    if wanted == ("all",) or (metrics is None and first is None):
        wanted = COMPARE_METRICS
    check_metrics(wanted)
    if first is None or second is None:
        # Of the data set only FID needs the images.
        needed = ("fid",) if "fid" in wanted and reference is None else ("clip",)
        options = drawing.to_options(needed, seed)
        judges.check(wanted)
        first, second = _draw(out, options, (EngineOptions("plain"), patched), model, device, dtype, root)
    with phases(out) as start_phase:
        comparison = compare(
            first,
            second,
            wanted,
            judges,
            reference=reference,
            seed=seed,
            max_bad=drawing.max_bad,
            features_dir=root.root / FEATURES_DIR,
            samples_dir=root.root / SAMPLES_DIR,
            start_phase=start_phase,
        )
    settings = comparison.second.settings
    place = root.for_model(str(settings.get("model", second.resolve().name)), str(settings.get("device", "cpu")))
    run_dir = place.new_run(_KIND)
    comparison.save(run_dir / COMPARE_FILE)
    if output_file is not None:
        comparison.save(output_file.expanduser())
    content = {name: value for name, value in comparison.to_json().items() if name != "per_image"}
    out.data(content | {"run_dir": run_dir}, table=lambda: _tables(comparison))
    for warning in comparison.warnings:
        out.warn(warning)
    out.note(f"Results: {run_dir}; tables and pictures: psctl eval report {run_dir}")


def _draw(
    out: Output,
    options: "EvalOptions",
    engines: "tuple[EngineOptions, EngineOptions]",
    model: str,
    device: str,
    dtype: Any,
    root: Workspace,
) -> tuple[Path, Path]:
    """Draw the same prompts through two engines, one after the other; returns the folders of images."""
    from ...eval.options import plan_eval
    from ...eval.run import draw_set
    from ...serving.models.loading import load_model, model_defaults

    with out.status(f"Drawing {options.num_prompts} text-image pairs from {options.dataset} ..."):
        plan = plan_eval(options, model_defaults(model), root.root)
    folders = []
    for engine in engines:
        with out.status(f"Loading {model}, {engine.engine} engine ..."):
            served = load_model(model, device, dtype, engine, workspace=root)
        with phases(out) as start_phase:
            drawn = draw_set(
                served,
                plan,
                options,
                root.for_model(model, str(served.device)),
                start_phase=start_phase,
                what=f"denoising steps, {engine.engine} engine",
            )
        for reason in drawn.failed:
            out.warn(f"image failed: {reason}")
        folders.append(drawn.folder)
        # One model at a time on the device.
        del served
    return folders[0], folders[1]


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
    for name, side in (("A", comparison.first), ("B", comparison.second)):
        if side.cache_use is not None:
            parts.append(Text(f"{name}: {cache_line(side.settings['cache']['mode'], side.cache_use)}"))
    return Group(*parts)
