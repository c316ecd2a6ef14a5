"""Steps of SDXL with products in 16 bits and in 8-bit floating point, eager and recorded, by turns."""

import copy
from collections.abc import Iterator
from functools import partial

import torch

from patchedserve.profiling.steps.combinations import Combination
from patchedserve.profiling.steps.sides import RequestPool, StepperSide, patched_stepper
from patchedserve.serving.core.denoiser import denoiser_of
from patchedserve.serving.core.float8 import check_float8, convert_to_float8
from patchedserve.serving.core.timing import medians_us
from patchedserve.serving.models.build import build_model, with_engine
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions

from ..context import Context, Row

_PATIENCE = 1


def eight_bits(context: Context) -> Iterator[Row]:
    """Yield a row for each combination, with the median time of a step of each side."""
    model, scale = context.model, context.scale
    check_float8(context.device)
    options, pool = EngineOptions(cuda_graphs=False), RequestPool(model)
    pipe = copy.copy(model.pipe)
    part = "unet" if hasattr(pipe, "unet") else "transformer"
    converted = copy.deepcopy(model.denoiser)
    context.notes["num_converted"] = convert_to_float8(converted)
    pipe.register_modules(**{part: converted})
    assert denoiser_of(model.pipe) is not converted
    sides = dict[str, ServedModel]()
    for name, source in (("16 bits", model), ("fp8", None)):
        for is_recorded in (False, True):
            served = (
                with_engine(source, options)
                if source is not None
                else build_model(pipe, name=f"{model.name}-fp8", defaults=model.defaults, options=options)
            )
            served.tune(context.tuned, context.tables)
            if is_recorded:
                patched_stepper(served).model.use_graphs(context.make_recorder(context.device), _PATIENCE)
            sides[f"{name}, recorded" if is_recorded else name] = served

    def steps(combination: Combination) -> Row:
        requests = pool.take(combination)
        steppers = {name: StepperSide(served.stepper, requests) for name, served in sides.items()}
        with torch.inference_mode():
            for side in steppers.values():
                side.begin()
                for _ in range(_PATIENCE + 2):
                    side.step()
            times = medians_us({name: side.step for name, side in steppers.items()}, context.device)
        return {"times": [{"side": name, "ms": us / 1e3} for name, us in times.items()]}

    yield from context.measured((each.label, partial(steps, each)) for each in context.combinations(scale.combinations))
    failures = {name: patched_stepper(served).recording_failure for name, served in sides.items()}
    context.notes["recording_failures"] = {name: each for name, each in failures.items() if each is not None}
