"""`psctl bench steps`: how long one denoising step takes, and where its time goes."""

from typing import TYPE_CHECKING, Annotated, Any

from ...data.errors import UsageError
from ...data.files import require_places
from ...data.resolution import parse_list
from ...profiling.measure.machine import describe
from ..options.common import OutputFile, Resolutions, Seed
from ..options.flags import flag
from ..options.groups import PatchFlags
from ..options.target import Target
from ..output import Output

if TYPE_CHECKING:
    from rich.console import RenderableType


def bench_steps(
    *,
    resolutions: Resolutions = None,
    combinations: Annotated[
        str | None,
        flag(
            "--combinations",
            'Requests of each resolution, in their order, as "1,1,1;2,2,2". Default: about 20 of all kinds.',
            metavar="N,N,...;...",
        ),
    ] = None,
    random: Annotated[
        int | None, flag("--random", "Measure this many random combinations of up to 16 requests.", min=1)
    ] = None,
    breakdown: Annotated[
        bool, flag("--breakdown", "Show where the time of a step goes. Default: for two of each size.")
    ] = False,
    repeats: Annotated[int, flag("--repeats", "Timings of each side; the median counts.", min=1)] = 15,
    warmup: Annotated[int, flag("--warmup", "Rounds before them.", min=1)] = 3,
    seed: Seed = 0,
    output_file: OutputFile = None,
    patched: PatchFlags,
    target: Target,
    out: Output,
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
    # Everything that can be wrong is looked at before torch is imported and the model loaded.
    from ...profiling.steps.combinations import (
        Combination,
        default_combinations,
        parse_combinations,
        random_combinations,
    )

    if breakdown and (patched.compile or patched.cuda_graphs):
        raise UsageError("--breakdown times single modules, which run as one with --compile and --cuda-graphs")
    sizes = target.defaults().resolutions if resolutions is None else parse_list(resolutions)
    if combinations is not None and random is not None:
        raise UsageError("--combinations and --random both say what to measure; give one of them")
    if combinations is not None:
        chosen = parse_combinations(combinations, sizes)
    elif random is not None:
        chosen = random_combinations(sizes, random, seed)
    else:
        chosen = (Combination(sizes, (2,) * len(sizes)),) if breakdown else default_combinations(sizes)
    require_places(target.workspace, file=output_file)

    served, place = target.load(out, patched)
    from ...profiling.steps.bench import BenchSettings, run_step_bench
    from ...profiling.steps.breakdown import run_breakdown

    run = run_breakdown if breakdown else run_step_bench
    with out.phases() as start:
        advance = start("combinations", len(chosen))
        outcome = run(
            served,
            chosen,
            place,
            BenchSettings(repeats, warmup, seed),
            on_start=lambda combination: advance.show(combination.label),
            on_row=advance,
        )
    out.data(
        outcome.result, table=lambda: (breakdown_tables if breakdown else step_table)(outcome.result), file=output_file
    )
    out.note(f"Results and plot: {outcome.run_dir}")
    if outcome.was_interrupted:
        raise KeyboardInterrupt


def step_table(result: dict[str, Any]) -> "RenderableType":
    """What people see of `steps.json`: a row for every combination, and what they say together."""
    from rich.console import Group

    from ...profiling.report.table import Table

    columns = ("requests", "one by one", "same resolution", "patched", "p10 to p90", "of peak", "vs one by one")
    rows = [
        (
            row["label"],
            _ms(row["one_by_one_ms"]),
            # In the default memory format unless it says otherwise.
            _ms(row["same_resolution_ms"]) + (" cl" if row["same_resolution_format"] == "channels-last" else ""),
            _ms(row["patched_ms"]),
            f"{_plain(row['patched_p10_ms'])} to {_ms(row['patched_p90_ms'])}",
            f"{row['patched_share_of_peak']:.0%}",
            f"{row['ratio_one_by_one']:.2f}x",
            f"{row['ratio_same_resolution']:.2f}x",
        )
        for row in result["rows"]
    ]
    each = Table(describe(result), (*columns, "vs same resolution"), rows, note=_caption(result))
    overall = []
    for label, key in (("mixed, geometric mean", "mean_ratio_{}_mixed"), ("all, minimum", "min_ratio_{}")):
        ratios = [result[key.format(side)] for side in ("one_by_one", "same_resolution")]
        overall.append((label, *("-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios)))
    whole = Table("patched is so many times as fast as", ("", "one by one", "same resolution"), overall)
    return Group(each.to_rich(), whole.to_rich())


def breakdown_tables(result: dict[str, Any]) -> "RenderableType":
    """What people see of `breakdown.json`: a table for every combination."""
    from rich.console import Group

    from ...profiling.report.table import Table

    tables = []
    for row in result["rows"]:
        sides = [row["sides"][name] for name in ("patched", "same_resolution")]
        rows = [
            (
                category.replace("_", "-"),
                *(
                    cell
                    for side in sides
                    for cell in (_ms(side["ms"][category]), f"{side['ms'][category] / side['step_ms']:.0%}")
                ),
            )
            for category in result["categories"]
        ]
        rows.append(("step", *(cell for side in sides for cell in (_ms(side["step_ms"]), ""))))
        columns = ("where a step's time goes", "patched", "", "same resolution", "")
        tables.append(Table(f"{row['label']}: {describe(result)}", columns, rows).to_rich())
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
