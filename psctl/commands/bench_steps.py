"""`psctl bench steps`: how long one denoising step takes, and where its time goes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...data.errors import UsageError
from ...data.files import require_places, write_json
from ...data.resolution import parse_list
from ...data.workspace import DEFAULT_WORKSPACE, Workspace
from ...profiling.machine import describe
from ..options.common import Device, DType, Json, Model, OutputFile, Quiet, Resolutions, Seed, WorkspaceRoot
from ..options.groups import PATCH_FLAGS, PatchFlags, with_option_groups
from ..output import Output

if TYPE_CHECKING:
    from rich.console import RenderableType


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
    from ...profiling.steps.bench import BenchSettings, run_step_bench
    from ...profiling.steps.breakdown import run_breakdown

    run = run_breakdown if breakdown else run_step_bench
    with out.progress() as progress:
        task = progress.add_task("combinations", total=len(chosen))
        outcome = run(
            served,
            chosen,
            Workspace(workspace).for_model(model, str(served.device)),
            BenchSettings(repeats, warmup, seed),
            on_start=lambda combination: progress.update(task, description=combination.label),
            on_row=lambda: progress.advance(task),
        )
    if output_file is not None:
        write_json(output_file.expanduser(), outcome.result)
    out.data(outcome.result, table=lambda: (breakdown_tables if breakdown else step_table)(outcome.result))
    out.note(f"Results and plot: {outcome.run_dir}")
    if outcome.was_interrupted:
        raise KeyboardInterrupt


def step_table(result: dict[str, Any]) -> "RenderableType":
    """What people see of `steps.json`: a row for every combination, and what they say together."""
    from rich.console import Group
    from rich.table import Table

    table = Table(title=describe(result), title_justify="left", caption=_caption(result), caption_justify="left")
    table.add_column("requests")
    for name in (
        "one by one",
        "same resolution",
        "patched",
        "p10 to p90",
        "of peak",
        "vs one by one",
        "vs same resolution",
    ):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        # In the default memory format unless it says otherwise.
        note = " cl" if row["same_resolution_format"] == "channels-last" else ""
        table.add_row(
            row["label"],
            _ms(row["one_by_one_ms"]),
            _ms(row["same_resolution_ms"]) + note,
            _ms(row["patched_ms"]),
            f"{_plain(row['patched_p10_ms'])} to {_ms(row['patched_p90_ms'])}",
            f"{row['patched_share_of_peak']:.0%}",
            f"{row['ratio_one_by_one']:.2f}x",
            f"{row['ratio_same_resolution']:.2f}x",
        )
    whole = Table(title="patched is so many times as fast as", title_justify="left")
    for name in ("", "one by one", "same resolution"):
        whole.add_column(name, justify="right" if name else "left")
    for label, key in (("mixed, geometric mean", "mean_ratio_{}_mixed"), ("all, minimum", "min_ratio_{}")):
        ratios = [result[key.format(side)] for side in ("one_by_one", "same_resolution")]
        whole.add_row(label, *("-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios))
    return Group(table, whole)


def breakdown_tables(result: dict[str, Any]) -> "RenderableType":
    """What people see of `breakdown.json`: a table for every combination."""
    from rich.console import Group
    from rich.table import Table

    tables = []
    for row in result["rows"]:
        patched, plain = row["sides"]["patched"], row["sides"]["same_resolution"]
        table = Table(title=f"{row['label']}: {describe(result)}", title_justify="left")
        table.add_column("where a step's time goes")
        for name in ("patched", "", "same resolution", ""):
            table.add_column(name, justify="right")
        for category in result["categories"]:
            cells: list[str] = []
            for side in (patched, plain):
                cells += [_ms(side["ms"][category]), f"{side['ms'][category] / side['step_ms']:.0%}"]
            table.add_row(category.replace("_", "-"), *cells, end_section=category == "host")
        table.add_row("step", _ms(patched["step_ms"]), "", _ms(plain["step_ms"]), "")
        tables.append(table)
    return Group(*tables)


def _caption(result: dict[str, Any]) -> str:
    sizes = ", ".join(f"{letter} {size}" for letter, size in result["letters"].items())
    parts = [sizes] if sizes else []
    if any(row["same_resolution_format"] == "channels-last" for row in result["rows"]):
        parts.append("cl: faster in channels-last memory format")
    parts.append(f"of peak: share of {result['matrix_peak_gflops']:.0f} GFLOP/s, measured in large products")
    if result["is_plain_for_one_resolution"]:
        parts.append("patched hands batches of one resolution to plain diffusers")
    return "; ".join(parts)


def _ms(value: float) -> str:
    return f"{_plain(value)} ms"


def _plain(value: float) -> str:
    """Three digits, and no exponent for long times."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
