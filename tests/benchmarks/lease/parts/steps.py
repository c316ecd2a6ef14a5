"""Denoising steps of mixed batches: plain diffusers and the patch engine, each with every optimisation."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial

from patchedserve.profiling.steps.bench import StepBench
from patchedserve.profiling.steps.combinations import Combination
from patchedserve.profiling.steps.lanes import BenchSettings
from patchedserve.profiling.steps.matrix_peak import matrix_peak
from patchedserve.profiling.steps.sides import BOTH, COMPILED, EAGER, GRAPHS, Effort
from patchedserve.tests.support.traced_only import traced_only

from ..context import Context, Row
from .rehearsal import use_small_products


def eager_and_graphs(context: Context) -> Iterator[Row]:
    """Yield rows of every side, eager and with recorded passes."""
    yield from _rows(context, (EAGER, GRAPHS), context.scale.combinations)


def all_efforts(context: Context) -> Iterator[Row]:
    """Yield rows of every side: eager, recorded, compiled, and both."""
    with traced_only() if context.scale.is_rehearsal else nullcontext():
        yield from _rows(context, (EAGER, GRAPHS, COMPILED, BOTH), context.scale.compiled)


def _rows(context: Context, efforts: Sequence[Effort], counts: Sequence[tuple[int, ...]]) -> Iterator[Row]:
    scale, model = context.scale, context.model
    if scale.is_rehearsal:
        use_small_products()
    if context.bench.name != "sdxl":
        counts = counts[: scale.num_of_flux]
    combinations = [each for each in context.combinations(counts) if each.label not in context.known]
    if not combinations:
        return
    settings = BenchSettings(repeats=scale.repeats, warmup=scale.warmup)
    bench = StepBench(model, settings, efforts=efforts, make_recorder=context.make_recorder)
    bench.tune(context.tuned, context.tables)
    context.notes["matrix_peak_tflops"] = matrix_peak(model.device, model.dtype) / 1e12
    yield from context.measured((each.label, partial(_measure, bench, each)) for each in combinations)


def _measure(bench: StepBench, combination: Combination) -> Row:
    row = bench.measure(combination)
    baseline = row["baseline"]
    about = {"baseline_ms": row[f"{baseline}_ms"], "baseline_effort": row[f"{baseline}_effort"]}
    return row | about | {"not_recorded": ", ".join(row["left_out"])}
