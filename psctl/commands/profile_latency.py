"""`psctl profile latency`: how long one denoising step takes, for many combinations of resolutions."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...data.errors import UsageError
from ...data.files import require_places, write_json
from ...data.resolution import parse_list
from ...data.workspace import DEFAULT_WORKSPACE, Workspace
from ..options.common import (
    Device,
    DType,
    EngineChoice,
    Json,
    Model,
    OutputFile,
    Quiet,
    Resolutions,
    Seed,
    WorkspaceRoot,
)
from ..options.groups import PATCH_FLAGS, PatchFlags, with_option_groups
from ..output import Output

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...profiling.measure.latency import LatencyOutcome


@with_option_groups
def profile_latency(
    combinations: Annotated[
        int,
        typer.Option("--combinations", help="Random combinations to measure, or all if there are not so many.", min=1),
    ] = 300,
    resolutions: Resolutions = None,
    max_batch_size: Annotated[
        int, typer.Option("--max-batch-size", help="Requests of the largest combination.", min=1, max=256)
    ] = 16,
    repeats: Annotated[
        int, typer.Option("--repeats", help="Rounds over all combinations, of three timings each.", min=1)
    ] = 5,
    one_resolution: Annotated[
        bool,
        typer.Option("--one-resolution", help="Only batches of one resolution: the passes of --engine plain."),
    ] = False,
    seed: Seed = 0,
    output_file: OutputFile = None,
    remeasure: Annotated[
        bool, typer.Option("--remeasure", help="Begin anew instead of going on from what the workspace holds.")
    ] = False,
    model: Model = "emoji-xl",
    device: Device = "auto",
    dtype: DType = "auto",
    engine: EngineChoice = "patched",
    patching: PatchFlags = PATCH_FLAGS,
    workspace: WorkspaceRoot = Path(DEFAULT_WORKSPACE),
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure the step latency of many combinations of resolutions, for the latency predictor.

    Every resolution alone and in the largest batch is among them. Rounds visit all combinations by turns, so that drift
    of the machine meets all alike. Table and plot go to the workspace. Ctrl-C ends the run early; the same command goes
    on from there.

    Examples:

        psctl profile latency

        psctl profile latency --combinations 60 --repeats 3 --model emoji-3

        psctl profile latency --engine plain --one-resolution --combinations 24

        psctl profile latency --model stabilityai/stable-diffusion-xl-base-1.0 --device cuda --resolutions 512,768,1024
    """
    out = Output(json=json, quiet=quiet)
    # Everything that can be wrong is looked at before torch is imported and the model loaded.
    from ...profiling.steps.combinations import count_combinations
    from ...serving.models.loading import load_model, model_defaults

    options = patching.to_options(engine)
    sizes = model_defaults(model).resolutions if resolutions is None else parse_list(resolutions)
    corners = len(sizes) * min(2, max_batch_size)
    if combinations < corners:
        raise UsageError(
            f"{combinations} combinations were asked for, but one request and the largest batch of each of "
            f"{len(sizes)} resolutions are {corners} already"
        )
    available = len(sizes) * max_batch_size if one_resolution else count_combinations(len(sizes), max_batch_size)
    if combinations > available:
        out.note(f"There are only {available} combinations of {len(sizes)} resolutions; measuring all of them.")
    require_places(workspace, file=output_file)

    with out.status(f"Loading {model} ..."):
        served = load_model(model, device, dtype, options)
    from ...profiling.measure.latency import LatencySettings
    from ...profiling.measure.latency import profile_latency as run_profile

    with out.progress() as progress:
        task = progress.add_task("visits", total=None)

        def on_start(num_all: int, num_done: int) -> None:
            if num_done:
                out.note(f"Going on after {num_done} of {num_all} visits that were made before.")
            progress.update(task, total=num_all, completed=num_done)

        outcome = run_profile(
            served,
            LatencySettings(sizes, combinations, max_batch_size, repeats, seed, one_resolution),
            Workspace(workspace).for_model(model, str(served.device)),
            remeasure=remeasure,
            on_start=on_start,
            on_visit=lambda: progress.advance(task),
        )
    result = _result(outcome)
    if output_file is not None:
        write_json(output_file.expanduser(), result)
    out.data(result, table=lambda: _table(result))
    if not outcome.num_visits:
        out.note("Everything was measured before; --remeasure begins anew.")
    out.note(f"Table: {outcome.table_file}")
    out.note(f"Plot: {outcome.plot_file}")
    if outcome.was_interrupted:
        out.note("The same command goes on from here.")
        raise KeyboardInterrupt


def _result(outcome: "LatencyOutcome") -> dict[str, Any]:
    """What `--json` prints: what was measured on, the settings, and a row for every combination."""
    from dataclasses import asdict

    table = outcome.table
    assert table.circumstances is not None, "our own tables say what they were measured on"
    return {
        **asdict(table.circumstances),
        "settings": dict(table.settings or {}),
        "table": str(outcome.table_file),
        "plot": str(outcome.plot_file),
        "is_complete": table.share_done == 1,
        "was_interrupted": outcome.was_interrupted,
        "rows": [
            {
                "combination": row.label,
                "resolutions": {str(resolution): count for resolution, count in row.counts.items()},
                "requests": row.num_requests,
                "repeats": len(row.samples_ms),
                "median_ms": row.median_ms,
                "p95_ms": row.p95_ms,
                "min_ms": min(row.samples_ms),
                "first_step_ms": row.first_step_median_ms,
            }
            for row in table.rows
        ],
    }


def _table(result: dict[str, Any]) -> "RenderableType":
    """What people see: how far the combinations of every batch size lie apart."""
    from rich.table import Table

    from ...profiling.machine import describe

    table = Table(title=describe(result), title_justify="left")
    for name in ("requests", "combinations", "fastest", "median", "slowest", "slowest / fastest"):
        table.add_column(name, justify="right")
    by_size: dict[int, list[float]] = {}
    for row in result["rows"]:
        by_size.setdefault(row["requests"], []).append(row["median_ms"])
    for size, times in sorted(by_size.items()):
        times.sort()
        cells = (times[0], times[len(times) // 2], times[-1])
        table.add_row(str(size), str(len(times)), *(f"{ms:.3g} ms" for ms in cells), f"{times[-1] / times[0]:.2f}x")
    return table
