"""Where the time of a denoising step goes, by kind of work, for the patch engine and for plain diffusers.

`torch.profiler` records operators inside scopes that hooks open around the model and its leaf modules; the engine is
not involved. `attribution` assigns each operator to a category.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from ...data.errors import RunError
from ...serving.core.timing import synchronize
from ..experiment.rows import Row
from ..report.tables import breakdown_tables
from .attribution import CATEGORIES, MODEL_SCOPE, SCOPE_PREFIX, STEP_SCOPE, HostSpan, Kernel, attribute
from .bench import BenchKind, StepBench, fastest
from .combinations import Combination
from .lanes import Lane, time_lanes
from .plots import plot_breakdown
from .sides import EAGER, patched_stepper

# Parts of the class names of leaf modules, those of diffusers and those of the patch engine.
_MODULES = {
    "GroupNorm": "group_norm",
    "Attention": "attention",
    "Conv": "convolution",
    "PatchEmbed": "convolution",
    "Linear": "linear",
}
_EMPTY_CALLS = 50
_RUNTIME = ("cu", "hip")
"""Prefixes of the names of CUDA and HIP runtime calls; names of operators begin with `aten::` and the like."""


@contextmanager
def _scopes(models: Iterable[nn.Module]) -> Iterator[None]:
    """Open a profiler scope around every forward of the models and of the leaf modules in them."""
    opened: list[record_function] = []
    handles: list[Any] = []

    def opener(name: str) -> Callable[..., None]:
        def enter(*_: object) -> None:
            scope = record_function(name)
            scope.__enter__()
            opened.append(scope)

        return enter

    def leave(*_: object) -> None:
        opened.pop().__exit__(None, None, None)

    for model in models:
        for module in model.modules():
            name = type(module).__name__
            category = next((category for part, category in _MODULES.items() if part in name), None)
            scope = MODEL_SCOPE if module is model else None if category is None else SCOPE_PREFIX + category
            if scope is not None:
                handles.append(module.register_forward_pre_hook(opener(scope)))
                handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def profile_step(lanes: dict[str, Lane], models: Iterable[nn.Module], device: torch.device) -> dict[str, Row]:
    """Profile one step of every lane. Returns its `ms` by category and its length, `profiled_ms`.

    On a CPU the `ms` add up to the length less the overhead of the scopes. On CUDA they are times of kernels, and the
    host has 0.
    """
    # The profiler's library logs its start and stop to stderr, which only this variable silences.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    is_cuda = device.type == "cuda"
    with (
        _scopes(models),
        profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * is_cuda) as profiler,
    ):
        for name, lane in lanes.items():
            with record_function(STEP_SCOPE + name):
                lane.side.step()
                synchronize(device)
        scope_us = _scope_us()
    steps: dict[str, Row] = {}
    for name, spans, kernels in _steps(profiler.events() or []):
        if is_cuda and not kernels:
            raise RunError(f"the profiler has recorded no kernels on {device}")
        us = attribute(spans, kernels if is_cuda else None)
        num_scopes = sum(span.name.startswith(SCOPE_PREFIX) for span in spans)
        us["host"] = max(0.0, us["host"] - num_scopes * scope_us)
        ms = {category: value / 1e3 for category, value in us.items()}
        steps[name] = {"profiled_ms": (spans[0].end - spans[0].start) / 1e3, "ms": ms}
    return steps


def _scope_us() -> float:
    """Return the overhead of a module's scope in us: calls of a module that does nothing, with and without a scope."""
    module, given = nn.Identity(), torch.zeros(1)

    def time_calls() -> float:
        start = time.perf_counter()
        for _ in range(_EMPTY_CALLS):
            module(given)
        return time.perf_counter() - start

    bare_s = min(time_calls() for _ in range(3))
    with _scopes([module]):
        scoped_s = min(time_calls() for _ in range(3))
    return (scoped_s - bare_s) / _EMPTY_CALLS * 1e6


def _steps(events: Iterable[Any]) -> Iterator[tuple[str, list[HostSpan], list[Kernel]]]:
    """Yield the recorded steps: the side, the spans (the step's own scope first), and the kernels of each."""
    on_host = [event for event in events if event.device_type == DeviceType.CPU and not event.is_async]
    # Events of the device carry the id of the call that launched them; the device's timeline repeats every scope.
    launches = {event.id: event.time_range.start for event in on_host if event.name.startswith(_RUNTIME)}
    kernels = [
        Kernel(event.name, launches[event.id], event.time_range.elapsed_us())
        for event in events
        if event.device_type != DeviceType.CPU and event.id in launches and not event.name.startswith(SCOPE_PREFIX)
    ]
    # The profiler also records each event's parent, but runtime calls would come in between.
    spans = [
        (event.thread, HostSpan(event.name, event.time_range.start, event.time_range.end))
        for event in on_host
        if not event.name.startswith(_RUNTIME)
    ]
    for thread, step in [each for each in spans if each[1].name.startswith(STEP_SCOPE)]:
        inside = [
            span for other, span in spans if other == thread and step.start <= span.start and span.end <= step.end
        ]
        inside.sort(key=lambda span: (span.start, -span.end))
        own = [kernel for kernel in kernels if step.start <= kernel.launched <= step.end]
        yield step.name.removeprefix(STEP_SCOPE), inside, own


def divide(wall_ms: float, steps: Sequence[Row], *, is_cuda: bool) -> Row:
    """Divide the wall time of an unprofiled step by category, in proportion to the medians of its profiled steps.

    On CUDA the host is charged the time that no kernel takes. On a CPU all categories are scaled to the wall time,
    because the profiler makes every operator a little slower.
    """
    ms = {category: statistics.median(step["ms"][category] for step in steps) for category in CATEGORIES}
    known_ms = sum(ms.values())
    if is_cuda:
        ms["host"] = max(0.0, wall_ms - known_ms)
    scale = wall_ms / sum(ms.values())
    return {
        "step_ms": wall_ms,
        "profiled_ms": statistics.median(step["profiled_ms"] for step in steps),
        "ms": {category: value * scale for category, value in ms.items()},
    }


def measure_breakdown(bench: StepBench, combination: Combination) -> Row:
    """Time and profile, in turn, the patched and the faster same-resolution side of one combination.

    A side has its `ms` by category, over all repeats and for each repeat. `first_ms` is the step after a request has
    joined or left, which repacks the batch.
    """
    found = bench.lanes(combination, ("same_resolution", "patched"))
    time_lanes(found.values(), bench.settings)
    best = {side: fastest(found, side) for side in ("patched", "same_resolution")}
    lanes = {side: found[each] for side, each in best.items()}
    stepper = patched_stepper(bench.model)
    copies = [models.channels_last for models in (stepper.plain, *bench.plain[EAGER].values())]
    models = [stepper.model.model, bench.model.denoiser, *(copy for copy in copies if copy is not None)]
    steps: dict[str, list[Row]] = {name: [] for name in lanes}
    for lane in lanes.values():
        lane.samples_ms.clear()
    for _ in range(bench.settings.repeats):
        for lane in lanes.values():
            # An untimed step first, so that what the profiler leaves in the processor's caches does not affect timing.
            lane.make_room()
            lane.side.step()
            lane.measure()
            lane.make_room()
        for name, step in profile_step(lanes, models, bench.model.device).items():
            steps[name].append(step)
    is_cuda = bench.model.device.type == "cuda"
    sides = {
        name: {
            **divide(lane.median_ms, steps[name], is_cuda=is_cuda),
            "first_ms": statistics.median(lane.first_ms),
            "ms_by_repeat": [divide(lane.median_ms, [step], is_cuda=is_cuda)["ms"] for step in steps[name]],
        }
        for name, lane in lanes.items()
    }
    return {
        **combination.columns,
        "same_resolution_format": best["same_resolution"].format,
        "sides": sides,
        "repeats": bench.settings.repeats,
    }


BREAKDOWN = BenchKind(
    "breakdown", measure_breakdown, lambda rows: {"categories": CATEGORIES}, plot_breakdown, breakdown_tables
)
