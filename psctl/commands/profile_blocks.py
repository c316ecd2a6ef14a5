"""`psctl profile blocks`: how much every block changes from step to step, which the cache predictor learns from."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...data.files import require_folder, write_bytes
from ...data.resolution import parse_list
from ...data.workspace import DEFAULT_WORKSPACE, Workspace
from ..options.common import (
    CachePatchSize,
    Device,
    DType,
    GuidanceScale,
    Json,
    Model,
    Order,
    Prompts,
    Quiet,
    Resolutions,
    Seed,
    WorkspaceRoot,
)
from ..output import Output

if TYPE_CHECKING:
    from rich.console import RenderableType


def profile_blocks(
    num_prompts: Annotated[
        int, typer.Option("--num-prompts", help="Requests to profile; the paper takes 1,000.", min=1)
    ] = 48,
    prompts: Prompts = None,
    resolutions: Resolutions = None,
    num_inference_steps: Annotated[
        int, typer.Option("--num-inference-steps", help="Denoising steps of every request.", min=2)
    ] = 50,
    guidance_scale: GuidanceScale = None,
    max_lag: Annotated[
        int, typer.Option("--max-lag", help="Compare a step with up to so many steps before it.", min=1, max=16)
    ] = 4,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Requests profiled together.", min=1)] = 6,
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
    """Record how much every block's input and output change from step to step, patch by patch.

    The table and a plot go to the workspace, where `psctl train-predictor cache` finds them. A profile that was
    interrupted goes on where it stopped when the same command is given again.

    Examples:

        psctl profile blocks

        psctl profile blocks --model emoji-3 --num-prompts 96 --num-inference-steps 30

        psctl profile blocks --resolutions 128,256 --max-lag 6 --json
    """
    out = Output(json=json, quiet=quiet)
    from ...data.prompts.captions import load_prompts
    from ...profiling.measure.blocks import BlockProfileSettings, run_block_profile
    from ...profiling.report.block_plots import plot_block_changes, summarize_block_changes
    from ...serving.cache.options import CacheOptions
    from ...serving.models.loading import load_model, model_defaults
    from ...serving.options import EngineOptions

    settings = BlockProfileSettings(num_prompts, batch_size, max_lag, seed)
    # The rule is replaced by one that never reuses; any that needs no predictor does here.
    cache = CacheOptions(mode="patch", threshold=0.0, patch_size=cache_patch_size)
    options = EngineOptions(order=order, cache=cache)
    defaults = model_defaults(model)
    sizes = defaults.resolutions if resolutions is None else parse_list(resolutions)
    texts = load_prompts(prompts)
    require_folder(workspace.expanduser())
    with out.status(f"Loading {model} ..."):
        served = load_model(model, device, dtype, options)
    place = Workspace(workspace).for_model(model, str(served.device))
    served.tune(sizes, place.tables)
    num_batches = -(-num_prompts // batch_size)
    with out.progress() as progress:
        task = progress.add_task("denoising steps", total=num_batches * num_inference_steps)
        table = run_block_profile(
            served,
            texts,
            sizes,
            place.tables,
            settings,
            num_inference_steps=num_inference_steps,
            guidance_scale=defaults.guidance_scale if guidance_scale is None else guidance_scale,
            on_step=lambda: progress.advance(task),
        )
    with out.status("Drawing ..."):
        result = summarize_block_changes(table)
        plot = table.with_suffix(".png")
        write_bytes(plot, plot_block_changes(result))
    result |= {"table": str(table), "plot": str(plot), "model": model}
    out.data(result, table=lambda: _table(result))
    out.note(f"Table: {table}, plot: {plot}")


def _table(result: dict[str, Any]) -> "RenderableType":
    """Share of patches that change little from one step to the next, by block and resolution."""
    from rich.table import Table

    threshold = result["table_threshold"]
    table = Table(
        title=f"{result['model']}: share of patches whose output changes by less than {threshold:g} in a step",
        title_justify="left",
        caption=f"mean squared change relative to the mean square; {result['num_rows']:,} rows",
        caption_justify="left",
    )
    table.add_column("block")
    sizes = list(result["by_block"])
    for size in sizes:
        table.add_column(size, justify="right")
    for block in result["blocks"]:
        table.add_row(block, *(f"{result['by_block'][size][block]:.0%}" for size in sizes))
    return table
