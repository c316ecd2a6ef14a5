"""`psctl bench cache`: how much time the patch cache saves, and what it costs in quality."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..data.errors import UsageError
from ..data.files import require_places, write_bytes, write_json
from ..data.resolution import parse_list
from ..data.workspace import DEFAULT_WORKSPACE, Workspace
from ..profiling.machine import describe
from .options import (
    CachePatchSize,
    Device,
    DType,
    Json,
    MaxReuse,
    Model,
    Order,
    OutputFile,
    Quiet,
    Seed,
    WarmupSteps,
    WorkspaceRoot,
    numbers_of,
)
from .output import Output

if TYPE_CHECKING:
    from rich.console import RenderableType


def bench_cache(
    resolutions: Annotated[
        str | None,
        typer.Option("--resolutions", metavar="SIZE,...", help="Such as 128,192,128x256. Default: those of the model."),
    ] = None,
    combination: Annotated[
        str | None,
        typer.Option("--combination", metavar="N,N,...", help="Requests of each resolution. Default: 2 of each."),
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
    images are compared with those of the same engine without the cache. Table, plot and image grid go to the workspace.

    Examples:

        psctl profile blocks && psctl bench cache

        psctl bench cache --combination 0,0,4 --thresholds 0.01,0.1 --intervals "" --sums "" --image-thresholds ""

        psctl bench cache --model emoji-3 --rounds 8 --lpips --json --output-file cache.json
    """
    out = Output(json=json, quiet=quiet)
    from ..profiling.combinations import Combination, parse_combinations
    from ..serving.cache.options import CacheOptions
    from ..serving.loading import load_model, model_defaults
    from ..serving.stepper import EngineOptions

    base = CacheOptions("patch", 0.0, None, cache_patch_size, 3, max_reuse, warmup_steps)
    sizes = model_defaults(model).resolutions if resolutions is None else parse_list(resolutions)
    batch = Combination(sizes, (2,) * len(sizes))
    if combination is not None:
        batch = parse_combinations(combination, sizes)[0]
    patch_limits = numbers_of("--thresholds", thresholds)
    image_limits, sum_limits = numbers_of("--image-thresholds", image_thresholds), numbers_of("--sums", sums)
    steps_between = [int(number) for number in numbers_of("--intervals", intervals)]
    require_places(workspace, file=output_file)
    with out.status(f"Loading {model} ..."):
        served = load_model(model, device, dtype, EngineOptions(order=order))
    from ..eval.cache_bench import CacheBenchSettings, run_cache_bench, settings_of
    from ..eval.cache_plots import plot_cache_bench, sheet_of
    from ..eval.clip import load_clip
    from ..eval.lpips import load_lpips
    from ..profiling.machine import circumstances

    place = Workspace(workspace).for_model(model, str(served.device))
    profile = place.root / "tables" / "blocks.parquet" if table is None else table.expanduser()
    with out.status("Training predictors ..."):
        sides = settings_of(
            served,
            profile,
            base,
            thresholds=patch_limits,
            image_thresholds=image_limits,
            intervals=steps_between,
            sums=sum_limits,
            seed=seed,
        )
    if not sides:
        raise UsageError("there is nothing to measure: give --thresholds, --image-thresholds, --intervals or --sums")
    settings = CacheBenchSettings(rounds, num_inference_steps, seed)
    with out.progress() as progress:
        task = progress.add_task("batches", total=(len(sides) + 1) * (rounds + 1))

        def advance(label: str) -> None:
            progress.update(task, description=label)
            progress.advance(task)

        result, images = run_cache_bench(
            served,
            batch,
            sides,
            place,
            settings,
            clip=None if clip == "none" else load_clip(clip, served.device),
            lpips=load_lpips(device=served.device) if with_lpips else None,
            on_batch=advance,
        )
    run_dir = place.new_run("bench")
    result = {
        **circumstances(served),
        "batch": batch.label,
        "combination": batch.by_resolution,
        **result,
        "clip_judge": clip,
        "run_dir": str(run_dir),
    }
    write_json(run_dir / "cache.json", result)
    write_bytes(run_dir / "cache.png", plot_cache_bench(result))
    write_bytes(run_dir / "cache-images.png", sheet_of(images, batch.num_requests))
    if output_file is not None:
        write_json(output_file.expanduser(), result)
    out.data(result, table=lambda: _table(result))
    out.note(f"Results, plot and images: {run_dir}")


def _table(result: dict[str, Any]) -> "RenderableType":
    from rich.table import Table

    table = Table(
        title=f"{result['batch']}, {result['settings']['num_inference_steps']} steps: {describe(result)}",
        title_justify="left",
        caption="efficiency: time saved over computation saved; quality against the same engine without cache",
        caption_justify="left",
    )
    table.add_column("cache")
    names = ("per image", "speed-up", "saved", "efficiency", "overhead", "SSIM", "PSNR", "LPIPS", "CLIP", "change")
    for name in names:
        table.add_column(name, justify="right")
    qualities = (("ssim", 3), ("psnr_db", 1), ("lpips", 3), ("clip", 1))
    for row in result["rows"]:
        change = row.get("clip_change")
        table.add_row(
            row["label"],
            f"{row['image_ms']:.0f} ms",
            f"{row['speedup']:.2f}x",
            *(_share(row.get(key)) for key in ("saved_computation", "efficiency", "cache_overhead_share")),
            *(_figure(row.get(key), digits) for key, digits in qualities),
            "-" if change is None else f"{change['mean']:+.2f}",
        )
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
