"""Cost of a composition at first sight: eager passes, the recording, and a replay."""

import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from patchedserve.profiling.steps.combinations import Combination
from patchedserve.profiling.steps.sides import RequestPool, StepperSide, patched_stepper, plain_side
from patchedserve.serving.core.captured import CapturedPasses
from patchedserve.serving.models.build import with_engine
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.plain.formats import PlainModels

from ..context import Context, Row
from .recorders import CountingRecorder
from .timing import memory_mb, once_ms

_PATIENCE = 2
"""The first two passes are eager, the third is recorded, the fourth replayed."""
_MOST_REQUESTS = 12


def first_seen(context: Context) -> Iterator[Row]:
    """Yield a row for each composition, with the passes of the patch engine and of plain diffusers by resolution."""
    model, scale = context.model, context.scale
    served, pool = with_engine(model, EngineOptions(cuda_graphs=False)), RequestPool(model)
    combinations = context.combinations(_drawn(len(scale.sides), scale.num_first_seen))
    served.tune(context.tuned, context.tables)
    recorder = CountingRecorder(context.make_recorder(context.device))
    patched_stepper(served).model.use_graphs(recorder, _PATIENCE)
    plain = PlainModels(model.denoiser, captured=CapturedPasses(recorder, _PATIENCE))
    plain.tune(model.tuning(context.tuned, context.tables), model.family.conditions)

    def passes(combination: Combination) -> Row:
        requests = pool.take(combination)
        sides = {
            "patched": StepperSide(served.stepper, requests),
            "same resolution": plain_side(model, plain, requests),
        }
        return {
            "requests": combination.num_requests,
            "passes": [{"side": name} | _measured(context, side, recorder) for name, side in sides.items()],
        }

    yield from context.measured((each.label, partial(passes, each)) for each in combinations)
    failures = {"patched": patched_stepper(served).recording_failure, "same resolution": plain.captured.failure}  # type: ignore[union-attr]
    context.notes |= {"recording_failures": failures}


def _measured(context: Context, side: StepperSide, recorder: CountingRecorder) -> dict[str, Any]:
    side.begin()
    first_ms, second_ms = (once_ms(side.step, context.device) for _ in range(2))
    num_before, before = recorder.recorded, memory_mb(context.device)
    record_ms = once_ms(side.step, context.device)
    allocated, reserved = (max(0.0, now - old) for now, old in zip(memory_mb(context.device), before, strict=True))
    return {
        "first_ms": first_ms,
        "second_ms": second_ms,
        "record_ms": record_ms,
        "replay_ms": once_ms(side.step, context.device),
        "recorded": recorder.recorded - num_before,
        "allocated_mb": allocated,
        "reserved_mb": reserved,
    }


def _drawn(num_sides: int, count: int) -> Sequence[tuple[int, ...]]:
    """Return different compositions: a random number of requests, each of a random size."""
    generator, found = random.Random(0), dict[tuple[int, ...], None]()
    while len(found) < count:
        sizes = [generator.randrange(num_sides) for _ in range(generator.randint(1, _MOST_REQUESTS))]
        found[tuple(sizes.count(place) for place in range(num_sides))] = None
    return list(found)
