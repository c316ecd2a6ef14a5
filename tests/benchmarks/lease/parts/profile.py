"""Time of a step by kind of work, and the kernels that take most of it."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from patchedserve.profiling.steps.attribution import CATEGORIES
from patchedserve.profiling.steps.bench import StepBench
from patchedserve.profiling.steps.breakdown import BREAKDOWN
from patchedserve.profiling.steps.combinations import Combination
from patchedserve.profiling.steps.lanes import BenchSettings
from patchedserve.profiling.steps.sides import StepperSide
from patchedserve.serving.core.timing import synchronize

from ..context import Context, Row

_NUM_KERNELS = 25


def profile(context: Context) -> Iterator[Row]:
    """Yield a row for each combination."""
    scale = context.scale
    bench = StepBench(context.model, BenchSettings(repeats=min(3, scale.repeats), warmup=1))
    combinations = context.combinations(scale.profiled)
    bench.tune(context.tuned, context.tables)
    yield from context.measured((each.label, partial(_profiled, context, bench, each)) for each in combinations)


def _profiled(context: Context, bench: StepBench, combination: Combination) -> Row:
    row = BREAKDOWN.measure(bench, combination)
    sides = row["sides"]
    kinds = [{"kind": kind, **{f"{name}_ms": side["ms"][kind] for name, side in sides.items()}} for kind in CATEGORIES]
    kinds.append({"kind": "all", **{f"{name}_ms": side["step_ms"] for name, side in sides.items()}})
    side = StepperSide(context.model.stepper, bench.pool.take(combination))
    return row | {"kinds": kinds, "kernels": _kernels(side, context.device)}


def _kernels(side: StepperSide, device: torch.device) -> list[dict[str, Any]]:
    """Return the kernels (operators on a CPU) of one step of an unchanged batch."""
    side.begin()
    side.step()
    is_cuda = device.type == "cuda"
    with torch_profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as profiler:
        side.step()
        synchronize(device)
    name = "self_device_time_total" if is_cuda else "self_cpu_time_total"
    found = [(getattr(each, name) / 1e3, each.key, each.count) for each in profiler.key_averages()]
    found.sort(reverse=True)
    return [{"name": key, "ms": ms, "calls": count} for ms, key, count in found[:_NUM_KERNELS]]
