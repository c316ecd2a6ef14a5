"""`psctl profile blocks`: how much every block changes from step to step, which the cache predictor learns from."""

from dataclasses import replace
from typing import Annotated

from ...data.files import require_folder, write_bytes
from ...data.resolution import parse_list
from ...serving.cache.options import CacheOptions
from ...serving.options import EngineOptions
from ..flags import flag, preset_flag
from ..options.common import GuidanceScale, Prompts, Resolutions, Seed
from ..options.groups import CACHE, ENGINE
from ..options.target import Target
from ..output import Output


def profile_blocks(
    *,
    quick: Annotated[
        bool,
        preset_flag(
            "--quick",
            "12 requests of 20 steps: coarser, within a minute on 2 cores.",
            num_prompts=12,
            num_inference_steps=20,
        ),
    ] = False,
    num_prompts: Annotated[int, flag("--num-prompts", "Requests to profile; the paper takes 1,000.", min=1)] = 48,
    prompts: Prompts = None,
    resolutions: Resolutions = None,
    num_inference_steps: Annotated[int, flag("--num-inference-steps", "Denoising steps of every request.", min=2)] = 50,
    guidance_scale: GuidanceScale = None,
    max_lag: Annotated[int, flag("--max-lag", "Compare a step with up to so many steps before it.", min=1, max=16)] = 4,
    batch_size: Annotated[int, flag("--batch-size", "Requests profiled together.", min=1)] = 6,
    # The rule is replaced by one that never reuses; any that needs no predictor does here.
    cache: Annotated[CacheOptions, CACHE.only("patch_size").fixing(mode="patch", threshold=0.0)],
    seed: Seed = 0,
    engine: Annotated[EngineOptions, ENGINE.only("order")],
    target: Target,
    out: Output,
) -> None:
    """Record how much every block's input and output change from step to step, patch by patch.

    The table and a plot go to the workspace, where `psctl train-predictor cache` finds them. A profile that was
    interrupted continues where it stopped when the same command is given again.

    Examples:

        psctl profile blocks
        psctl profile blocks --model emoji-3 --num-prompts 96 --num-inference-steps 30
        psctl profile blocks --resolutions 128,256 --max-lag 6 --json
    """
    from ...data.prompts.captions import load_prompts
    from ...profiling.measure.blocks import BlockProfileSettings, run_block_profile
    from ...profiling.report.block_plots import plot_block_changes, summarize_block_changes
    from ...profiling.report.tables import block_table

    settings = BlockProfileSettings(num_prompts, batch_size, max_lag, seed)
    defaults = target.defaults()
    sizes = defaults.resolutions if resolutions is None else parse_list(resolutions)
    texts = load_prompts(prompts)
    require_folder(target.workspace)
    served, place = target.load(out, replace(engine, cache=cache))
    served.tune(sizes, place.tables)
    with out.phases() as start:
        table = run_block_profile(
            served,
            texts,
            sizes,
            place.tables,
            settings,
            num_inference_steps=num_inference_steps,
            guidance_scale=defaults.guidance_scale if guidance_scale is None else guidance_scale,
            on_step=start("denoising steps", -(-num_prompts // batch_size) * num_inference_steps),
        )
    with out.status("Drawing ..."):
        result = summarize_block_changes(table)
        plot = table.with_suffix(".png")
        write_bytes(plot, plot_block_changes(result))
    result |= {"table": str(table), "plot": str(plot), "model": target.model}
    out.data(result, table=lambda: block_table(result).to_rich())
    out.note(f"Table: {table}, plot: {plot}")
