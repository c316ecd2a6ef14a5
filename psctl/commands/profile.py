"""`psctl profile latency|blocks|edits`: measures training data of the predictors."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from ...data.errors import UsageError
from ...data.files import require_places, write_bytes
from ...data.resolution import parse_list
from ...serving.cache.options import CacheOptions
from ...serving.options import EngineOptions
from ..flags import flag, preset_flag
from ..options.common import GuidanceScale, OutputFile, Prompts, Resolutions, Seed
from ..options.groups import CACHE, ENGINE
from ..options.target import Target
from ..options.templates import KeepFlag, require_cells, require_keep
from ..output import Output

if TYPE_CHECKING:
    from ...profiling.measure.latency import LatencyOutcome


def profile_latency(
    *,
    quick: Annotated[
        bool,
        preset_flag(
            "--quick", "60 combinations twice: coarser, in about a minute on 2 cores.", combinations=60, repeats=2
        ),
    ] = False,
    combinations: Annotated[
        int, flag("--combinations", "Number of random combinations to measure; all if there are fewer.", min=1)
    ] = 300,
    resolutions: Resolutions = None,
    max_batch_size: Annotated[
        int, flag("--max-batch-size", "Number of requests in the largest combination.", min=1, max=256)
    ] = 16,
    repeats: Annotated[
        int, flag("--repeats", "Average number of visits per combination, each of two measurements.", min=1)
    ] = 5,
    one_resolution: Annotated[
        bool, flag("--one-resolution", "Only batches of one resolution, as --engine plain has them.")
    ] = False,
    seed: Seed = 0,
    output_file: OutputFile = None,
    remeasure: Annotated[
        bool, flag("--remeasure", "Start again instead of continuing the measurement in the workspace.")
    ] = False,
    engine: Annotated[EngineOptions, ENGINE.without("cache")],
    target: Target,
    out: Output,
) -> None:
    """Measure the step latency of combinations of resolutions, to train the latency predictor.

    The combinations include each resolution alone and in the largest batch. All are measured once in each of three
    rounds, so that drift of the machine affects them equally; further measurements go to the combinations with the
    largest spread. A table and a plot are written to the workspace. After Ctrl-C, the same command continues.

    Examples:

        psctl profile latency
        psctl profile latency --combinations 60 --repeats 3 --model emoji-3
        psctl profile latency --engine plain --one-resolution --combinations 24
        psctl profile latency --model stabilityai/stable-diffusion-xl-base-1.0 --device cuda --resolutions 512,768,1024
    """
    # Everything that can be wrong is looked at before torch is imported and the model loaded.
    from ...profiling.steps.combinations import count_combinations

    sizes = target.defaults().resolutions if resolutions is None else parse_list(resolutions)
    corners = len(sizes) * min(2, max_batch_size)
    if combinations < corners:
        raise UsageError(
            f"{combinations} combinations were asked for, but one request and the largest batch of each of "
            f"{len(sizes)} resolutions are {corners} already"
        )
    available = len(sizes) * max_batch_size if one_resolution else count_combinations(len(sizes), max_batch_size)
    if combinations > available:
        out.note(f"There are only {available} combinations of {len(sizes)} resolutions; measuring all of them.")
    require_places(target.workspace, file=output_file)

    served, place = target.load(out, engine)
    from ...profiling.measure.latency import LatencySettings
    from ...profiling.measure.latency import profile_latency as run_profile
    from ...profiling.report.tables import profile_table

    with out.phases() as start:
        phases = []
        outcome = run_profile(
            served,
            LatencySettings(sizes, combinations, max_batch_size, repeats, seed, one_resolution),
            place,
            remeasure=remeasure,
            on_start=lambda num_all, num_done: phases.append(start("visits", num_all, done=num_done)),
            on_visit=lambda: phases[0](),
        )
    result = _result(outcome)
    out.data(result, table=lambda: profile_table(result).to_rich(), file=output_file)
    if not outcome.num_visits:
        out.note("Everything was measured before; --remeasure starts over.")
    out.note(f"Table: {outcome.table_file}")
    out.note(f"Plot: {outcome.plot_file}")
    if outcome.was_interrupted:
        out.note("The same command continues from here.")
        raise KeyboardInterrupt


def _result(outcome: "LatencyOutcome") -> dict[str, Any]:
    """Return the content of `--json`: facts of the machine, the settings, and a row for every combination."""
    from ...data.tables.latency import noise_floor

    table = outcome.table
    assert table.circumstances is not None, "our own tables say what they were measured on"
    return {
        **table.circumstances.to_json(),
        "settings": dict(table.settings or {}),
        "table": str(outcome.table_file),
        "plot": str(outcome.plot_file),
        "is_complete": table.share_done == 1,
        "was_interrupted": outcome.was_interrupted,
        "noise_floor": noise_floor(table.rows),
        "rows": [
            {
                "combination": row.label,
                "resolutions": {str(resolution): count for resolution, count in row.counts.items()},
                "requests": row.num_requests,
                "repeats": len(row.samples_ms),
                "visits": len(row.visits_ms),
                "median_ms": row.median_ms,
                "p95_ms": row.p95_ms,
                "min_ms": min(row.samples_ms),
                "first_step_ms": row.first_step_median_ms,
            }
            for row in table.rows
        ],
    }


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
    num_prompts: Annotated[
        int, flag("--num-prompts", "Number of requests to profile; the paper uses 1,000.", min=1)
    ] = 48,
    prompts: Prompts = None,
    resolutions: Resolutions = None,
    num_inference_steps: Annotated[
        int, flag("--num-inference-steps", "Number of denoising steps of every request.", min=2)
    ] = 50,
    guidance_scale: GuidanceScale = None,
    max_lag: Annotated[
        int, flag("--max-lag", "Maximum distance in steps between the steps that are compared.", min=1, max=16)
    ] = 8,
    max_rows: Annotated[
        int,
        flag(
            "--max-rows",
            "Approximate maximum number of rows; longer profiles keep a random share of the patches.",
            min=1,
        ),
    ] = 4_000_000,
    batch_size: Annotated[int, flag("--batch-size", "Number of requests per batch.", min=1)] = 6,
    # The rule is replaced by one that never reuses; any that needs no predictor does here.
    cache: Annotated[CacheOptions, CACHE.only("patch_size").fixing(mode="patch", threshold=0.0)],
    seed: Seed = 0,
    engine: Annotated[EngineOptions, ENGINE.only("order")],
    target: Target,
    out: Output,
) -> None:
    """Record how much the inputs and outputs of blocks change between steps, for each patch.

    A table for `psctl train-predictor cache` and a plot are written to the workspace. After an interruption, the same
    command continues.

    Examples:

        psctl profile blocks
        psctl profile blocks --model emoji-3 --num-prompts 96 --num-inference-steps 30
        psctl profile blocks --resolutions 128,256 --max-lag 4 --json
    """
    from ...data.prompts.captions import load_prompts
    from ...profiling.measure.blocks import BlockProfileSettings, run_block_profile
    from ...profiling.report.block_plots import plot_block_changes, summarize_block_changes
    from ...profiling.report.tables import block_table

    settings = BlockProfileSettings(num_prompts, batch_size, max_lag, max_rows, seed)
    defaults = target.defaults()
    sizes = defaults.resolutions if resolutions is None else parse_list(resolutions)
    texts = load_prompts(prompts)
    require_places(target.workspace)
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


def profile_edits(
    *,
    quick: Annotated[
        bool, preset_flag("--quick", "24 batches, each once: coarser.", combinations=24, repeats=1)
    ] = False,
    combinations: Annotated[int, flag("--combinations", "Number of random batches of edits to measure.", min=1)] = 60,
    resolutions: Resolutions = None,
    max_batch_size: Annotated[
        int, flag("--max-batch-size", "Number of edits in the largest batch.", min=1, max=256)
    ] = 8,
    repeats: Annotated[int, flag("--repeats", "Number of visits per batch, each of two measurements.", min=1)] = 3,
    keep: KeepFlag = "all",
    seed: Seed = 0,
    output_file: OutputFile = None,
    engine: Annotated[EngineOptions, ENGINE.only("order", "patch_size", "strategy", "kernels")],
    target: Target,
    out: Output,
) -> None:
    """Measure edits that read records, for psctl simulate --edits and for routers.

    Batches of random sizes, with masks over random shares of the image, alternate with the same edits computed as a
    whole. Records are read from the workspace's disk. Lines are fitted to four fifths of the times, and their error on
    the other fifth is reported. The profile is written to the workspace. An interrupted run writes nothing.

    Examples:

        psctl profile edits
        psctl profile edits --quick --resolutions 128,256
        psctl profile edits --model emoji-3 --keep outputs --max-batch-size 4 --json
    """
    from ...profiling.report.tables import edit_profile_table

    sizes = target.defaults().resolutions if resolutions is None else parse_list(resolutions)
    require_cells(target.model, sizes, several=True)
    require_keep(target.model, keep)
    require_places(target.workspace, file=output_file)
    from ...profiling.measure.edits import EditProfileSettings, file_for
    from ...profiling.measure.edits import profile_edits as run_profile

    settings = EditProfileSettings(sizes, combinations, max_batch_size, repeats, seed, keep)
    served, place = target.load(out, engine)
    with out.phases() as start:
        profile = run_profile(served, settings, place, on_start=start)
    path = file_for(served, place, keep)
    profile.write(path)
    served.close()
    result = {**profile.to_json(), "profile": str(path)}
    out.data(result, table=lambda: edit_profile_table(result).to_rich(), file=output_file)
    out.note(f"Profile: {path}")
