"""diffusers' schedulers with every option that batched samplers support, and requests that are served with them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch

from patchedserve.serving.samplers.batched import BatchedSampler, SamplerBatch
from patchedserve.serving.samplers.single import PerRequestSampler, SamplerState

PATCH, CHANNELS = 4, 4
# float32 has a relative precision of 6e-8. diffusers' differences in float32 lose up to 1.2e-6 over these schedules.
TOLERANCE = 2e-6

SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
DDIM = {**SD, "clip_sample": False, "steps_offset": 1}
V = {"prediction_type": "v_prediction"}
SAMPLE = {"prediction_type": "sample"}
ZERO_SNR = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
SIGMA_MIN = {"final_sigmas_type": "sigma_min"}
FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}
SHIFT = {"use_dynamic_shifting": True}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddim": ("DDIMScheduler", DDIM),
    "ddim-trailing": ("DDIMScheduler", {**DDIM, "timestep_spacing": "trailing"}),
    "ddim-linspace": ("DDIMScheduler", {**DDIM, "timestep_spacing": "linspace"}),
    "ddim-v": ("DDIMScheduler", {**DDIM, **V}),
    "ddim-sample": ("DDIMScheduler", {**DDIM, **SAMPLE}),
    "ddim-v-zero-snr": ("DDIMScheduler", {**DDIM, **V, **ZERO_SNR}),
    "ddim-alpha-not-one": ("DDIMScheduler", {**DDIM, "set_alpha_to_one": False}),
    "ddim-cosine": ("DDIMScheduler", {"clip_sample": False, "beta_schedule": "squaredcos_cap_v2"}),
    "ddim-clip": ("DDIMScheduler", {**DDIM, "clip_sample": True}),
    "ddim-clip-range": ("DDIMScheduler", {**DDIM, "clip_sample": True, "clip_sample_range": 2.5}),
    "ddim-clip-v": ("DDIMScheduler", {**DDIM, **V, "clip_sample": True}),
    "ddim-clip-sample": ("DDIMScheduler", {**DDIM, **SAMPLE, "clip_sample": True}),
    "euler": ("EulerDiscreteScheduler", SD),
    "euler-leading": ("EulerDiscreteScheduler", {**SD, "timestep_spacing": "leading", "steps_offset": 1}),
    "euler-trailing": ("EulerDiscreteScheduler", {**SD, "timestep_spacing": "trailing"}),
    "euler-karras": ("EulerDiscreteScheduler", {**SD, "use_karras_sigmas": True}),
    "euler-exponential": ("EulerDiscreteScheduler", {**SD, "use_exponential_sigmas": True}),
    "euler-beta": ("EulerDiscreteScheduler", {**SD, "use_beta_sigmas": True}),
    "euler-log-linear": ("EulerDiscreteScheduler", {**SD, "interpolation_type": "log_linear"}),
    "euler-sigma-min": ("EulerDiscreteScheduler", {**SD, **SIGMA_MIN}),
    "euler-v": ("EulerDiscreteScheduler", {**SD, **V}),
    "euler-v-zero-snr": ("EulerDiscreteScheduler", {**SD, **V, **ZERO_SNR}),
    "euler-v-continuous": (
        "EulerDiscreteScheduler",
        {**SD, **V, "timestep_type": "continuous", "use_karras_sigmas": True, "sigma_min": 0.002, "sigma_max": 700.0},
    ),
    "euler-sample": ("EulerDiscreteScheduler", {**SD, **SAMPLE}),
    "ancestral": ("EulerAncestralDiscreteScheduler", SD),
    "ancestral-leading": ("EulerAncestralDiscreteScheduler", {**SD, "timestep_spacing": "leading"}),
    "ancestral-trailing": ("EulerAncestralDiscreteScheduler", {**SD, "timestep_spacing": "trailing"}),
    "ancestral-v": ("EulerAncestralDiscreteScheduler", {**SD, **V}),
    "ancestral-v-zero-snr": ("EulerAncestralDiscreteScheduler", {**SD, **V, **ZERO_SNR}),
    "dpm": ("DPMSolverMultistepScheduler", SD),
    "dpm-heun": ("DPMSolverMultistepScheduler", {**SD, "solver_type": "heun"}),
    "dpm-first-order": ("DPMSolverMultistepScheduler", {**SD, "solver_order": 1}),
    "dpm-leading": ("DPMSolverMultistepScheduler", {**SD, "timestep_spacing": "leading", "steps_offset": 1}),
    "dpm-trailing": ("DPMSolverMultistepScheduler", {**SD, "timestep_spacing": "trailing"}),
    "dpm-karras": ("DPMSolverMultistepScheduler", {**SD, "use_karras_sigmas": True}),
    "dpm-lu": ("DPMSolverMultistepScheduler", {**SD, "use_lu_lambdas": True}),
    "dpm-v": ("DPMSolverMultistepScheduler", {**SD, **V}),
    "dpm-v-zero-snr": ("DPMSolverMultistepScheduler", {**SD, **V, **ZERO_SNR}),
    "dpm-sample": ("DPMSolverMultistepScheduler", {**SD, **SAMPLE}),
    "dpm-sigma-min": ("DPMSolverMultistepScheduler", {**SD, **SIGMA_MIN}),
    "dpm-sigma-min-heun": ("DPMSolverMultistepScheduler", {**SD, **SIGMA_MIN, "solver_type": "heun"}),
    "dpm-never-lower": ("DPMSolverMultistepScheduler", {**SD, **SIGMA_MIN, "lower_order_final": False}),
    "dpm-zero-not-lower": ("DPMSolverMultistepScheduler", {**SD, "lower_order_final": False}),
    "dpm-euler-at-final": ("DPMSolverMultistepScheduler", {**SD, **SIGMA_MIN, "euler_at_final": True}),
    "dpm-flow": ("DPMSolverMultistepScheduler", {**SD, **FLOW}),
    "dpm-flow-epsilon": ("DPMSolverMultistepScheduler", {**SD, **FLOW, "prediction_type": "epsilon"}),
    "dpm-flow-of-vp": ("DPMSolverMultistepScheduler", {**SD, "prediction_type": "flow_prediction"}),
    "dpm-exponential": ("DPMSolverMultistepScheduler", {**SD, "use_exponential_sigmas": True}),
    "dpm-beta": ("DPMSolverMultistepScheduler", {**SD, "use_beta_sigmas": True}),
    "dpm-flow-dynamic": ("DPMSolverMultistepScheduler", {**SD, **FLOW, **SHIFT}),
    "unipc": ("UniPCMultistepScheduler", SD),
    "unipc-bh1": ("UniPCMultistepScheduler", {**SD, "solver_type": "bh1", **SIGMA_MIN}),
    "unipc-first-order": ("UniPCMultistepScheduler", {**SD, "solver_order": 1}),
    "unipc-leading": ("UniPCMultistepScheduler", {**SD, "timestep_spacing": "leading", "steps_offset": 1}),
    "unipc-trailing": ("UniPCMultistepScheduler", {**SD, "timestep_spacing": "trailing"}),
    "unipc-karras": ("UniPCMultistepScheduler", {**SD, "use_karras_sigmas": True}),
    "unipc-exponential": ("UniPCMultistepScheduler", {**SD, "use_exponential_sigmas": True}),
    "unipc-beta": ("UniPCMultistepScheduler", {**SD, "use_beta_sigmas": True}),
    "unipc-v": ("UniPCMultistepScheduler", {**SD, **V}),
    "unipc-v-zero-snr": ("UniPCMultistepScheduler", {**SD, **V, **ZERO_SNR}),
    "unipc-sample": ("UniPCMultistepScheduler", {**SD, **SAMPLE}),
    "unipc-never-lower": ("UniPCMultistepScheduler", {**SD, **SIGMA_MIN, "lower_order_final": False}),
    "unipc-some-uncorrected": ("UniPCMultistepScheduler", {**SD, "disable_corrector": [0, 2]}),
    "unipc-flow": ("UniPCMultistepScheduler", {**SD, **FLOW}),
    "unipc-flow-dynamic": ("UniPCMultistepScheduler", {**SD, **FLOW, **SHIFT}),
    "lcm": ("LCMScheduler", SD),
    "lcm-v": ("LCMScheduler", {**SD, **V}),
    "lcm-sample": ("LCMScheduler", {**SD, **SAMPLE}),
    "lcm-clip": ("LCMScheduler", {**SD, "clip_sample": True, "clip_sample_range": 2.5}),
    "lcm-v-zero-snr": ("LCMScheduler", {**SD, **V, "rescale_betas_zero_snr": True}),
    "tcd": ("TCDScheduler", SD),
    "tcd-v": ("TCDScheduler", {**SD, **V}),
    "tcd-sample": ("TCDScheduler", {**SD, **SAMPLE}),
    "flow": ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
    "flow-dynamic": ("FlowMatchEulerDiscreteScheduler", SHIFT),
    "flow-dynamic-linear": ("FlowMatchEulerDiscreteScheduler", {**SHIFT, "time_shift_type": "linear"}),
    "flow-karras": ("FlowMatchEulerDiscreteScheduler", {"use_karras_sigmas": True}),
    "flow-exponential": ("FlowMatchEulerDiscreteScheduler", {"use_exponential_sigmas": True}),
    "flow-beta": ("FlowMatchEulerDiscreteScheduler", {"use_beta_sigmas": True}),
    "flow-inverted": ("FlowMatchEulerDiscreteScheduler", {"invert_sigmas": True}),
}
ONE_OF_EACH = ["ddim", "ddim-clip", "euler", "euler-v", "ancestral", "dpm", "dpm-heun", "unipc", "lcm", "flow-dynamic"]

# Steps, and rows and columns of patches, of each request. DPM-Solver++ has special rules for fewer than 15 steps.
REQUESTS = [(14, 1, 2), (1, 3, 1), (30, 2, 2), (2, 1, 1), (5, 2, 1), (15, 1, 1)]


def make_scheduler(case: str) -> Any:
    name, options = CASES[case]
    return getattr(diffusers, name)(**options)


def cut(image: torch.Tensor) -> torch.Tensor:
    """Cut (1, channels, height, width) into (patches, channels, PATCH, PATCH), row by row."""
    parts = image[0].unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)
    return parts.permute(1, 2, 0, 3, 4).reshape(-1, image.shape[1], PATCH, PATCH)


def joined(patches: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The inverse of `cut`."""
    rows, cols = shape[2] // PATCH, shape[3] // PATCH
    return patches.reshape(rows, cols, *patches.shape[1:]).permute(2, 0, 3, 1, 4).reshape(shape)


@dataclass
class ServedRequest:
    """A request with its fake predictions, its noise, and the copy of diffusers' scheduler that is the reference."""

    index: int
    state: SamplerState
    reference: SamplerState
    latents: torch.Tensor
    draws: torch.Generator
    history: torch.Tensor
    predictions: list[torch.Tensor] = field(default_factory=list)

    @property
    def num_patches(self) -> int:
        return math.prod(self.latents.shape[2:]) // PATCH**2


def start(case: str, index: int) -> ServedRequest:
    steps, rows, cols = REQUESTS[index]
    sampler = PerRequestSampler(make_scheduler(case), pass_step_kwargs=True)
    # The pipeline's mu grows with the image.
    kwargs = {"mu": 0.5 + 0.1 * rows * cols} if "use_dynamic_shifting" in CASES[case][1] else {}
    state, reference = (
        sampler.start(
            steps, device=torch.device("cpu"), generator=torch.Generator().manual_seed(index), schedule_kwargs=kwargs
        )
        for _ in range(2)
    )
    generator = torch.Generator().manual_seed(100 + index)
    shape = (1, CHANNELS, rows * PATCH, cols * PATCH)
    latents = torch.randn(shape, generator=generator) * getattr(state.scheduler, "init_noise_sigma", 1.0)
    predictions = [torch.randn(shape, generator=generator) for _ in range(state.num_steps)]
    draws = torch.Generator().manual_seed(index)
    num_terms = len(BatchedSampler(state.scheduler, pass_step_kwargs=True).history_terms)
    history = torch.full_like(cut(latents), math.nan).repeat(1, num_terms, 1, 1)
    return ServedRequest(index, state, reference, latents, draws, history, predictions)


def pack(sampler: BatchedSampler, served: Sequence[ServedRequest]) -> SamplerBatch:
    counts = torch.tensor([one.num_patches for one in served])
    return SamplerBatch(
        sampler,
        [one.state for one in served],
        torch.cat([cut(one.latents) for one in served]),
        torch.arange(len(served)).repeat_interleave(counts),
        torch.cat([one.history for one in served]) if sampler.history_terms else None,
    )


def unpack(batch: SamplerBatch, served: Sequence[ServedRequest]) -> None:
    """Return the batch's tensors to the requests."""
    counts = [one.num_patches for one in served]
    for one, patches in zip(served, batch.latents.split(counts), strict=True):
        one.latents = joined(patches, one.latents.shape)
    if batch.history is not None:
        for one, patches in zip(served, batch.history.split(counts), strict=True):
            one.history = patches


def advance(batch: SamplerBatch, served: Sequence[ServedRequest]) -> None:
    """Take one step of the batch, with each request's own prediction and noise."""
    predictions = [one.predictions[one.state.steps_done] for one in served]

    def draw_noise() -> torch.Tensor:
        return torch.cat([cut(torch.randn(one.latents.shape, generator=one.draws)) for one in served])

    batch.step(torch.cat([cut(prediction) for prediction in predictions]), draw_noise if batch.needs_noise else None)
    unpack(batch, served)


def serve(case: str, arrivals: dict[int, int]) -> Iterator[tuple[SamplerBatch, list[ServedRequest]]]:
    """Serve the requests `arrivals` (index -> step at which it joins); yield before every step of the batch.

    The batch is rebuilt only when a request joins or leaves.
    """
    sampler = BatchedSampler(make_scheduler(case), pass_step_kwargs=True)
    active: list[ServedRequest] = []
    batch: SamplerBatch | None = None
    step = 0
    while active or step <= max(arrivals.values()):
        joining = [start(case, index) for index, arrival in arrivals.items() if arrival == step]
        staying = [one for one in active if not one.state.is_finished]
        if joining or len(staying) < len(active) or batch is None:
            active = [*joining, *staying]
            if not active:
                break
            batch = pack(sampler, active)
        yield batch, active
        advance(batch, active)
        step += 1


def serve_to_the_end(case: str, arrivals: dict[int, int]) -> dict[int, ServedRequest]:
    return {one.index: one for _, served in serve(case, arrivals) for one in served}
