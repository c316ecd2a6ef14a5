"""`psctl eval fid|kid|clip|lpips|psnr|ssim|all`: the quality of images that a model draws, or of folders of images."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...data.errors import UsageError
from ...data.files import require_places, write_json
from ...data.resolution import Resolution
from ...eval.options import METRICS, EvalOptions, open_folders, plan_eval
from ..flags import flag, given_flags
from ..options.common import OutputFile
from ..options.groups import DRAW, ENGINE, MODEL, DrawingEngineFlags, JudgeFlags
from ..options.replicas import REPLICAS, ReplicaFlags
from ..options.target import Target
from ..output import Output
from .http_server import recipe_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

    from ...eval.result_files import EvalResults
    from ...eval.results import MetricResult
    from ...eval.sets.drawers import Drawer
    from ...profiling.report.table import Table
    from ...serving.options import EngineOptions

_WHAT = {
    "fid": "Frechet Inception distance to reference images",
    "kid": "Kernel Inception distance to reference images",
    "clip": "CLIP score: how well images fit their prompts",
    "lpips": "Perceptual distance of each image to its reference",
    "psnr": "Peak signal-to-noise ratio of each image to its reference, in dB",
    "ssim": "Structural similarity of each image to its reference",
    "all": "All six quality metrics",
}


_DRAIN_S = 600.0
_DRAWN_ONLY = {
    *("--images", "--dtype"),
    *(name for each in (ENGINE, MODEL, REPLICAS, DRAW.without("max_bad", "seed")) for name in each.names()),
}
"""Options that determine which images are drawn, and how."""


def _command(metric: str) -> Callable[..., None]:
    """The commands differ in their metric only."""
    metrics = METRICS if metric == "all" else (metric,)

    def command(
        *,
        context: typer.Context,
        drawing: Annotated[EvalOptions, DRAW.fixing(metrics=metrics)],
        images: Annotated[
            Path | None,
            flag("--images", "Folder for the drawn images. Default: one in the workspace.", file_okay=False),
        ] = None,
        generated: Annotated[
            Path | None, flag("--generated", "Measure the images in this folder instead of drawing some.")
        ] = None,
        reference: Annotated[Path | None, flag("--reference", "Folder of reference images for --generated.")] = None,
        judging: JudgeFlags,
        output_file: OutputFile = None,
        engine: DrawingEngineFlags,
        replicas: ReplicaFlags,
        target: Target,
        out: Output,
    ) -> None:
        if generated is None and reference is not None:
            raise UsageError("--reference belongs to --generated; a model is compared with the images of --dataset")
        misplaced = [name for name in given_flags(context) if name in _DRAWN_ONLY]
        if generated is not None and misplaced:
            raise UsageError(f"{misplaced[0]} says how images are drawn, but with --generated nothing is drawn")
        require_places(target.workspace, file=output_file)
        root = target.root.root
        if generated is None:
            with out.status(f"Drawing {drawing.num_prompts} text-image pairs from {drawing.dataset} ..."):
                plan = plan_eval(drawing, target.defaults(), root)
        else:
            # Before anything is loaded.
            open_folders(drawing.metrics, generated, reference)
        with out.status("Loading ..."):
            from ...eval.measurer import Measurer
            from ...eval.run import evaluate_folders, evaluate_model
            from ...serving.models.placement import resolve_device

            device = resolve_device(target.device)
            judges = judging.to_judges(device)
            judges.check(drawing.metrics)
        if generated is not None:
            place = target.root.for_model(generated.resolve().name or "images", str(device))
            with out.phases() as start:
                measurer = Measurer.of(drawing, judges, root, start)
                outcome = evaluate_folders(generated, reference, drawing, measurer, place)
        else:
            place = target.root.for_model(target.model, str(device))
            sizes = sorted({Resolution(item.width, item.height) for item in plan.items})
            drawer = _drawer(drawing, sizes, engine, replicas, target, out)
            with out.phases() as start:
                measurer = Measurer.of(drawing, judges, root, start)
                outcome = evaluate_model(drawer, plan, drawing, measurer, place, images_dir=images)
        results = outcome.results
        content = {name: value for name, value in results.to_json().items() if name != "per_image"}
        if output_file is not None:
            write_json(output_file, results.to_json())
        out.data(
            content | {"run_dir": outcome.run_dir, "images_dir": outcome.images_dir}, table=lambda: _tables(results)
        )
        for warning in results.warnings:
            out.warn(warning)
        out.note(f"Results: {outcome.run_dir}; images: {outcome.images_dir}")

    command.__doc__ = f"""{_WHAT[metric]}, with {"their" if metric == "all" else "its"} 95 % interval.

    Draws the captions of a data set with a model, through the engine as it serves, or takes folders of images. What was
    stopped continues where it was; features of images are kept by content.

    Examples:

        psctl eval {metric} --model emoji-xl --num-prompts 256
        psctl eval {metric} --dataset 'coco:~/coco?split=val2017' --num-prompts 5000 --model DIR --policy continuous
        psctl eval {metric} --dataset 'diffusiondb:~/diffusiondb?max_nsfw=0.3' --num-prompts 5000
        psctl eval {metric} --cache patch --cache-predictor cache.safetensors
        psctl eval {metric} --num-prompts 5000 --device cuda --num-replicas 8
        psctl eval {metric} --generated images --reference originals --json
    """
    return command


eval_fid, eval_kid, eval_clip, eval_lpips, eval_psnr, eval_ssim, eval_all = map(_command, _WHAT)


def _drawer(
    drawing: EvalOptions,
    sizes: "Sequence[Resolution]",
    engine: "EngineOptions",
    replicas: ReplicaFlags,
    target: Target,
    out: Output,
) -> "Drawer":
    """Return the drawer of images: the engine of this process, or replicas."""
    from ...eval.sets.drawers import EngineDrawer, ReplicaDrawer
    from ...serving.models.placement import resolve_device
    from ...serving.scheduling.systems import System

    takes_gpu = resolve_device(target.device).type == "cuda"
    plan = replicas.plan(takes_gpu=takes_gpu, max_ongoing=2 * drawing.max_batch_size, drain_s=_DRAIN_S)
    if plan is None:
        return EngineDrawer(target.load(out, engine)[0])
    system = System("eval", "as this evaluation asks", engine.engine, drawing.policy, engine.cache.mode)
    recipe = recipe_of(system, sizes, drawing.max_batch_size, engine, target, needs_standalone=False)
    out.note(f"Starting {plan.least} replicas ...")
    return ReplicaDrawer(recipe if takes_gpu else replace(recipe, threads=1), plan)


def _tables(results: "EvalResults") -> "RenderableType":
    from rich.console import Group

    parts: list[RenderableType] = [metric_table(list(results.metrics.values())).to_rich()]
    if results.cache_use is not None:
        parts.append(cache_line(results.settings["cache"]["mode"], results.cache_use))
    return Group(*parts)


def cache_line(mode: str, use: "Mapping[str, Any]") -> str:
    """Return a line about the savings of a cache; `use` is the result of `CacheUse.describe`."""
    return f"cache {mode}: {use['saved_computation']:.1%} of computation saved ({use['num_images']} images)"


def metric_table(results: "list[MetricResult]", title: str = "") -> "Table":
    """Return the table of metrics for the terminal."""
    from ...profiling.report.table import Table

    rows = []
    for each in results:
        unit = f" {each.unit}" if each.unit else ""
        value, interval = f"{each.value:.4g}{unit}", interval_text(each.low, each.high)
        rows.append((each.name, value, interval, str(each.n), each.direction))
        endless: Any = each.details.get("fid_infinity")
        if endless is not None:
            ends = (each.details.get("fid_infinity_low"), each.details.get("fid_infinity_high"))
            rows.append(("  with infinitely many images", f"{endless:.4g}", interval_text(*ends), "", ""))
        elif (missing := each.details.get("fid_infinity_missing")) is not None:
            rows.append(("  with infinitely many images", "unknown", str(missing), "", ""))
    return Table(title, ("metric", "value", "95 % interval", "n", "better"), rows)


def interval_text(low: float | None, high: float | None) -> str:
    """Return the text of an interval, or a note that it is not known."""
    return "unknown" if low is None or high is None else f"{low:.4g} to {high:.4g}"
