"""`psctl bench cache`: how much time the patch cache saves, and what it costs in quality."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...data.errors import UsageError
from ...data.files import require_places, write_json
from ...data.resolution import parse_list
from ...data.workspace import DEFAULT_WORKSPACE, Workspace
from ...profiling.machine import describe
from ..options.common import (
    CachePatchSize,
    Device,
    DType,
    Json,
    MaxReuse,
    Model,
    Order,
    OutputFile,
    Quiet,
    Resolutions,
    Seed,
    WarmupSteps,
    WorkspaceRoot,
    numbers_of,
)
from ..output import Output

if TYPE_CHECKING:
    from rich.console import RenderableType


def bench_cache(
    resolutions: Resolutions = None,
    combinations: Annotated[
        str | None,
        typer.Option(
            "--combinations", metavar="N,N,...;...", help="Batches: requests of each resolution. Default: 2 of each."
        ),
    ] = None,
    thresholds: Annotated[
        str, typer.Option("--thresholds", metavar="X,...", help="Of predictors that decide patch by patch.")
    ] = "0.003,0.01,0.03,0.1,0.3",
    image_thresholds: Annotated[
        str, typer.Option("--image-thresholds", metavar="X,...", help="Of predictors with --cache image.")
    ] = "0.03,0.1,0.3",
    intervals: Annotated[str, typer.Option("--intervals", metavar="N,...", help="Of fixed-interval reuse.")] = "2,3,4",
    sums: Annotated[
        str, typer.Option("--sums", metavar="X,...", help="Of accumulated input changes.")
    ] = "0.1,0.2,0.3,0.4",
    num_inference_steps: Annotated[
        int, typer.Option("--num-inference-steps", help="Denoising steps of every request.", min=2)
    ] = 50,
    rounds: Annotated[int, typer.Option("--rounds", help="Batches that each side serves.", min=1)] = 4,
    table: Annotated[
        Path | None,
        typer.Option("--table", help="Block profile to train on. Default: the workspace's.", dir_okay=False),
    ] = None,
    clip: Annotated[str, typer.Option("--clip", help="Judge of the images; none leaves it out.")] = "emoji-clip",
    with_lpips: Annotated[bool, typer.Option("--lpips", help="Measure LPIPS, too; its weights must be there.")] = False,
    fid: Annotated[
        str | None,
        typer.Option(
            "--fid", metavar="DATASET", help="Measure FID, too, against images of this set: as --dataset of psctl eval."
        ),
    ] = None,
    num_real: Annotated[int, typer.Option("--num-real", help="Real images for FID.", min=2)] = 256,
    output_file: OutputFile = None,
    max_reuse: MaxReuse = 4,
    warmup_steps: WarmupSteps = 3,
    cache_patch_size: CachePatchSize = 8,
    seed: Seed = 0,
    model: Model = "emoji-xl",
    device: Device = "auto",
    dtype: DType = "auto",
    order: Order = "auto",
    workspace: WorkspaceRoot = Path(DEFAULT_WORKSPACE),
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure quality against time of the patch cache, and of three baselines.

    Predictors are trained on the block profile of the workspace, one per threshold. Every side serves the same batches;
    images are compared with those of the same engine without the cache. Table, plots and image grid go to the
    workspace. Ctrl-C keeps the rounds that all sides have finished.

    Examples:

        psctl profile blocks && psctl bench cache

        psctl bench cache --combinations "2,2,2;6,0,0;0,6,0;0,0,6" --intervals "" --sums ""

        psctl bench cache --model emoji-3 --rounds 8 --lpips --fid emoji --json --output-file cache.json
    """
    out = Output(json=json, quiet=quiet)
    from ...profiling.steps.combinations import Combination, parse_combinations
    from ...serving.cache.options import CacheOptions
    from ...serving.models.loading import load_model, model_defaults
    from ...serving.options import EngineOptions

    base = CacheOptions("patch", 0.0, None, cache_patch_size, 3, max_reuse, warmup_steps)
    sizes = model_defaults(model).resolutions if resolutions is None else parse_list(resolutions)
    batches: tuple[Combination, ...] = (Combination(sizes, (2,) * len(sizes)),)
    if combinations is not None:
        batches = parse_combinations(combinations, sizes)
    patch_limits = numbers_of("--thresholds", thresholds)
    image_limits = numbers_of("--image-thresholds", image_thresholds)
    steps_between = [int(number) for number in numbers_of("--intervals", intervals)]
    sum_limits = numbers_of("--sums", sums)
    if not (patch_limits or image_limits or steps_between or sum_limits):
        raise UsageError("there is nothing to measure: give --thresholds, --image-thresholds, --intervals or --sums")
    require_places(workspace, file=output_file)
    with out.status(f"Loading {model} ..."):
        served = load_model(model, device, dtype, EngineOptions(order=order))
    from ...eval.cache.bench import CacheBenchSettings, run_cache_bench
    from ...eval.cache.quality import QualityOptions
    from ...eval.cache.sides import settings_of
    from ...eval.metrics.clip import DEFAULT_CLIP
    from ...eval.metrics.judges import Judges

    settings = CacheBenchSettings(rounds, num_inference_steps, seed)
    quality = QualityOptions(clip != "none", with_lpips, fid, num_real, seed)
    judges = Judges(DEFAULT_CLIP if clip == "none" else clip, device=served.device)
    quality.check(judges)
    place = Workspace(workspace).for_model(model, str(served.device))
    profile = place.root / "tables" / "blocks.parquet" if table is None else table.expanduser()
    with out.status("Training predictors ..."):
        cached = settings_of(
            served,
            profile,
            base,
            thresholds=patch_limits,
            image_thresholds=image_limits,
            intervals=steps_between,
            sums=sum_limits,
            seed=seed,
        )
    with out.progress() as progress:
        task = progress.add_task("batches", total=len(batches) * (len(cached) + 1) * (rounds + 1))

        def advance(label: str) -> None:
            progress.update(task, description=label)
            progress.advance(task)

        outcome = run_cache_bench(served, batches, cached, place, settings, quality, judges, on_batch=advance)
    if output_file is not None:
        write_json(output_file.expanduser(), outcome.result)
    out.data(outcome.result, table=lambda: _tables(outcome.result))
    out.note(f"Results, plots and images: {outcome.run_dir}")
    if outcome.was_interrupted:
        raise KeyboardInterrupt


def _tables(result: dict[str, Any]) -> "RenderableType":
    from rich.console import Group

    return Group(*(_table(result, row) for row in result["rows"]))


def _table(result: dict[str, Any], row: dict[str, Any]) -> "RenderableType":
    from rich.table import Table

    table = Table(
        title=f"{row['label']}, {result['settings']['num_inference_steps']} steps: {describe(result)}",
        title_justify="left",
        caption="efficiency: time saved over computation saved; overhead: of a step without cache; quality against the "
        "same engine without cache",
        caption_justify="left",
    )
    table.add_column("cache")
    qualities = [("SSIM", "ssim", 3), ("PSNR", "psnr_db", 1), ("LPIPS", "lpips", 3), ("CLIP", "clip", 1)]
    qualities += [("FID", "fid", 1)]
    shown = [each for each in qualities if any(each[1] in side for side in row["sides"])]
    for name in ("per image", "speed-up", "saved", "efficiency", "overhead", *(name for name, _, _ in shown)):
        table.add_column(name, justify="right")
    for side in row["sides"]:
        change = side.get("clip_change")
        figures = [_figure(side.get(key), digits) for _, key, digits in shown]
        if change is not None:
            at = [key for _, key, _ in shown].index("clip")
            figures[at] += f" ({change['mean']:+.2f})"
        table.add_row(
            side["label"],
            f"{side['image_ms']:.0f} ms",
            f"{side['speedup']:.2f}x",
            *(_share(side.get(key)) for key in ("saved_computation", "efficiency", "cache_overhead_of_off")),
            *figures,
        )
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
