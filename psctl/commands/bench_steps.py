"""`psctl bench steps`: how long one denoising step takes, and where its time goes."""

from pathlib import Path
from typing import Annotated

import typer

from ...data.errors import UsageError
from ...data.files import require_places, write_json
from ...data.resolution import parse_list
from ...data.workspace import DEFAULT_WORKSPACE, Workspace
from ..options.common import Device, DType, Json, Model, OutputFile, Quiet, Resolutions, Seed, WorkspaceRoot
from ..options.groups import PATCH_FLAGS, PatchFlags, with_option_groups
from ..output import Output


@with_option_groups
def bench_steps(
    resolutions: Resolutions = None,
    combinations: Annotated[
        str | None,
        typer.Option(
            "--combinations",
            metavar="N,N,...;...",
            help='Requests of each resolution, in their order, as "1,1,1;2,2,2". Default: about 20 of all kinds.',
        ),
    ] = None,
    random: Annotated[
        int | None, typer.Option("--random", help="Measure this many random combinations of up to 16 requests.", min=1)
    ] = None,
    breakdown: Annotated[
        bool, typer.Option("--breakdown", help="Show where the time of a step goes. Default: for two of each size.")
    ] = False,
    repeats: Annotated[int, typer.Option("--repeats", help="Timings of each side; the median counts.", min=1)] = 15,
    warmup: Annotated[int, typer.Option("--warmup", help="Rounds before them.", min=1)] = 3,
    seed: Seed = 0,
    output_file: OutputFile = None,
    model: Model = "emoji-xl",
    device: Device = "auto",
    dtype: DType = "auto",
    patching: PatchFlags = PATCH_FLAGS,
    workspace: WorkspaceRoot = Path(DEFAULT_WORKSPACE),
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Time one denoising step of mixed batches: patched against plain diffusers.

    Plain diffusers takes the same requests one by one, and in batches of one resolution. The sides take turns, guidance
    and sampler are included. Result and plot go to the workspace. Ctrl-C ends the run early and keeps what is measured.

    Examples:

        psctl bench steps

        psctl bench steps --resolutions 128,256 --combinations "1,1;4,4;8,1" --repeats 30

        psctl bench steps --model stabilityai/stable-diffusion-xl-base-1.0 --device cuda --random 50 --json

        psctl bench steps --breakdown --combinations "1,1,1;4,4,4"
    """
    out = Output(json=json, quiet=quiet)
    # Everything that can be wrong is looked at before torch is imported and the model loaded.
    from ...profiling.steps.combinations import (
        Combination,
        default_combinations,
        parse_combinations,
        random_combinations,
    )
    from ...serving.models.loading import load_model, model_defaults

    options = patching.to_options()
    if breakdown and (options.compile or options.cuda_graphs):
        raise UsageError("--breakdown times single modules, which run as one with --compile and --cuda-graphs")
    sizes = model_defaults(model).resolutions if resolutions is None else parse_list(resolutions)
    if combinations is not None and random is not None:
        raise UsageError("--combinations and --random both say what to measure; give one of them")
    if combinations is not None:
        chosen = parse_combinations(combinations, sizes)
    elif random is not None:
        chosen = random_combinations(sizes, random, seed)
    else:
        chosen = (Combination(sizes, (2,) * len(sizes)),) if breakdown else default_combinations(sizes)
    require_places(workspace, file=output_file)

    with out.status(f"Loading {model} ..."):
        served = load_model(model, device, dtype, options)
    from ...profiling.report.table import to_rich
    from ...profiling.report.tables import breakdown_tables, step_tables
    from ...profiling.steps.bench import STEPS, BenchSettings, run_bench
    from ...profiling.steps.breakdown import BREAKDOWN

    with out.progress() as progress:
        task = progress.add_task("combinations", total=len(chosen))
        outcome = run_bench(
            BREAKDOWN if breakdown else STEPS,
            served,
            chosen,
            Workspace(workspace).for_model(model, str(served.device)),
            BenchSettings(repeats, warmup, seed),
            on_start=lambda combination: progress.update(task, description=combination.label),
            on_row=lambda: progress.advance(task),
        )
    if output_file is not None:
        write_json(output_file.expanduser(), outcome.result)
    tables = breakdown_tables if breakdown else step_tables
    out.data(outcome.result, table=lambda: to_rich(tables(outcome.result)))
    out.note(f"Results and plot: {outcome.run_dir}")
    if outcome.was_interrupted:
        raise KeyboardInterrupt
