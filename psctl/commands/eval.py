"""`psctl eval fid|kid|clip|lpips|psnr|ssim|all`: the quality of images that a model draws, or of folders of images."""

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...data.errors import UsageError
from ...data.files import require_places, write_json
from ...data.workspace import DEFAULT_WORKSPACE, Workspace
from ..options.common import Device, DType, EngineChoice, Json, Model, OutputFile, Quiet, Seed, WorkspaceRoot
from ..options.eval import DRAW_FLAGS, JUDGE_FLAGS, DrawFlags, JudgeFlags
from ..options.groups import CACHE_FLAGS, PATCH_FLAGS, CacheFlags, PatchFlags, with_option_groups
from ..output import Output

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.console import RenderableType
    from rich.table import Table

    from ...eval.result_files import EvalResults
    from ...eval.results import MetricResult

_WHAT = {
    "fid": "Frechet Inception distance to reference images",
    "kid": "Kernel Inception distance to reference images",
    "clip": "CLIP score: how well images fit their prompts",
    "lpips": "Perceptual distance of each image to its reference",
    "psnr": "Peak signal-to-noise ratio of each image to its reference, in dB",
    "ssim": "Structural similarity of each image to its reference",
    "all": "All six quality metrics",
}


def _command(metric: str) -> Callable[..., None]:
    """The commands differ in their metric only."""

    def command(
        drawing: DrawFlags = DRAW_FLAGS,
        images: Annotated[
            Path | None,
            typer.Option("--images", file_okay=False, help="Folder of the drawn images. Default: in the workspace."),
        ] = None,
        generated: Annotated[
            Path | None, typer.Option("--generated", help="Measure this folder of images; draw nothing.")
        ] = None,
        reference: Annotated[
            Path | None, typer.Option("--reference", help="Folder to compare --generated with.")
        ] = None,
        judging: JudgeFlags = JUDGE_FLAGS,
        output_file: OutputFile = None,
        seed: Seed = 0,
        model: Model = "emoji-xl",
        device: Device = "auto",
        dtype: DType = "auto",
        engine: EngineChoice = "patched",
        patching: PatchFlags = PATCH_FLAGS,
        caching: CacheFlags = CACHE_FLAGS,
        workspace: WorkspaceRoot = Path(DEFAULT_WORKSPACE),
        json: Json = False,
        quiet: Quiet = False,
    ) -> None:
        out = Output(json=json, quiet=quiet)
        from ...eval.options import METRICS, plan_eval
        from ...serving.models.loading import load_model, model_defaults, resolve_device

        options = drawing.to_options(METRICS if metric == "all" else (metric,), seed)
        engine_options = patching.to_options(engine, caching)
        root = Workspace(workspace)
        if generated is None and reference is not None:
            raise UsageError("--reference belongs to --generated; a model is compared with the images of --dataset")
        if generated is not None and images is not None:
            raise UsageError("--images says where drawn images go, but with --generated nothing is drawn")
        if generated is not None and engine_options.cache.is_on:
            raise UsageError("--cache says how images are drawn, but with --generated nothing is drawn")
        require_places(workspace, file=output_file)
        if generated is None:
            with out.status(f"Drawing {options.num_prompts} text-image pairs from {options.dataset} ..."):
                plan = plan_eval(options, model_defaults(model), root.root)
        with out.status("Loading ..."):
            from ...eval.run import evaluate_folders, evaluate_model

            target = resolve_device(device)
            judges = judging.to_judges(target)
            judges.check(options.metrics)
        if generated is not None:
            name = generated.resolve().name or "images"
            with phases(out) as start_phase:
                outcome = evaluate_folders(
                    generated,
                    reference,
                    options,
                    judges,
                    root.for_model(name, str(target)),
                    shared_root=root.root,
                    start_phase=start_phase,
                )
        else:
            with out.status(f"Loading {model} ..."):
                served = load_model(model, device, dtype, engine_options, workspace=root)
            with phases(out) as start_phase:
                outcome = evaluate_model(
                    served,
                    plan,
                    options,
                    judges,
                    root.for_model(model, str(served.device)),
                    shared_root=root.root,
                    images_dir=images,
                    start_phase=start_phase,
                )
        results = outcome.results
        content = {name: value for name, value in results.to_json().items() if name != "per_image"}
        if output_file is not None:
            write_json(output_file.expanduser(), results.to_json())
        out.data(
            content | {"run_dir": outcome.run_dir, "images_dir": outcome.images_dir},
            table=lambda: _tables(results),
        )
        for warning in results.warnings:
            out.warn(warning)
        out.note(f"Results: {outcome.run_dir}; images: {outcome.images_dir}")

    command.__doc__ = f"""{_WHAT[metric]}, with {"their" if metric == "all" else "its"} 95 % interval.

    Draws the captions of a data set with a model, through the engine as it serves, or takes folders of images. What is
    stopped goes on where it was; features of images are kept by content.

    Examples:

        psctl eval {metric} --model emoji-xl --num-prompts 256

        psctl eval {metric} --dataset 'coco:~/coco?split=val2017' --num-prompts 5000 --model DIR --policy continuous

        psctl eval {metric} --dataset 'diffusiondb:~/diffusiondb?max_nsfw=0.3' --num-prompts 5000

        psctl eval {metric} --cache patch --cache-predictor cache.safetensors

        psctl eval {metric} --generated images --reference originals --json
    """
    return with_option_groups(command)


eval_fid, eval_kid, eval_clip, eval_lpips, eval_psnr, eval_ssim, eval_all = map(_command, _WHAT)


@contextmanager
def phases(out: Output) -> "Iterator[Callable[[str, int], Callable[[int], None]]]":
    """Progress bars that appear one after the other, each when its phase begins."""
    with out.progress() as progress:

        def start(what: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(what, total=total)
            return lambda count: progress.advance(task, count)

        yield start


def _tables(results: "EvalResults") -> "RenderableType":
    from rich.console import Group

    parts: list[RenderableType] = [metric_table(list(results.metrics.values()))]
    if results.cache_use is not None:
        parts.append(cache_line(results.settings["cache"]["mode"], results.cache_use))
    return Group(*parts)


def cache_line(mode: str, use: "Mapping[str, Any]") -> str:
    """What a cache saved, for people; `use` as `CacheUse.describe` gives it."""
    return f"cache {mode}: {use['saved_computation']:.1%} of computation saved ({use['num_images']} images)"


def metric_table(results: "list[MetricResult]") -> "Table":
    """What people see of metrics."""
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for name in ("metric", "value", "95 % interval", "n", "better"):
        table.add_column(name, justify="left" if name in ("metric", "better") else "right")
    for each in results:
        unit = f" {each.unit}" if each.unit else ""
        # Text, because the judge stands in brackets, which a plain string would give to rich as a style.
        table.add_row(
            Text(each.name), f"{each.value:.4g}{unit}", interval_text(each.low, each.high), str(each.n), each.direction
        )
        endless: Any = each.details.get("fid_infinity")
        if endless is not None:
            ends = (each.details.get("fid_infinity_low"), each.details.get("fid_infinity_high"))
            table.add_row(Text("  with infinitely many images"), f"{endless:.4g}", interval_text(*ends), "", "")
        elif (missing := each.details.get("fid_infinity_missing")) is not None:
            table.add_row(Text("  with infinitely many images"), "unknown", Text(str(missing)), "", "")
    return table


def interval_text(low: float | None, high: float | None) -> str:
    """An interval, or that it is not known."""
    return "unknown" if low is None or high is None else f"{low:.4g} to {high:.4g}"
