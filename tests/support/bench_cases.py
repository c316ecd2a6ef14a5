"""Shared parts of tests of step benchmarks: resolutions of tiny models, short settings, the fields of a row."""

import copy

import torch

from patchedserve.data.resolution import parse_list
from patchedserve.profiling.steps.combinations import Combination
from patchedserve.profiling.steps.lanes import BenchSettings
from patchedserve.profiling.steps.sides import OneByOne, StepperSide
from patchedserve.serving.core.prepared import PreparedRequest
from patchedserve.serving.models.served import ServedModel

SIZES = parse_list("32,48,64")
FAST = BenchSettings(repeats=2, warmup=1)
ROW = {
    *("combination", "label", "requests", "is_mixed", "one_by_one_ms", "same_resolution_ms", "same_resolution_format"),
    *("one_by_one_effort", "same_resolution_effort", "patched_effort", "baseline", "ratio", "times", "left_out"),
    *("patched_ms", "patched_p10_ms", "patched_p90_ms", "patched_samples_ms", "patched_repack_ms"),
    *("patched_is_plain", "intervals", "repeats", "same_resolution_share_of_peak"),
    "patched_share_of_peak",
}


def squares(*counts: int) -> Combination:
    return Combination(SIZES, counts)


@torch.inference_mode()
def steps_by_diffusers(model: ServedModel, prepared: PreparedRequest, num_steps: int) -> torch.Tensor:
    """Return the latents of a benchmark's request after some steps, alone, with diffusers' own scheduler and model."""
    state = prepared.state
    scheduler, middle = copy.deepcopy(state.scheduler), state.num_steps // 2
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(middle)
    latents = prepared.latents / getattr(scheduler, "init_noise_sigma", 1.0)
    conditions = model.family.conditions(prepared.conditioning)
    for timestep in state.timesteps[middle : middle + num_steps]:
        rows = torch.cat([latents] * prepared.num_rows)
        if hasattr(scheduler, "scale_model_input"):
            rows = scheduler.scale_model_input(rows, timestep)
        (prediction,) = model.denoiser(rows, timestep=timestep.expand(len(rows)), return_dict=False, **conditions)
        if prepared.is_guided:
            without, with_text = prediction.chunk(2)
            prediction = without + prepared.request.guidance_scale * (with_text - without)
        (latents,) = scheduler.step(prediction, timestep, latents, **state.step_kwargs, return_dict=False)[:1]
    return latents


def latents_of(side: StepperSide | OneByOne) -> list[torch.Tensor]:
    """Return the latents of a side's requests; steps another batch first, which hands the previous latents back."""
    stepped = side.active
    side.begin()
    side.step()
    return [prepared.latents for prepared in stepped]
