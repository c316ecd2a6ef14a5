"""The schedule of each request, and stepping through it as plain diffusers does.

diffusers' schedulers hold a step index and, for multistep methods, earlier model outputs, so each request has its own
copy. `PerRequestSampler` calls that copy, which is exact for every scheduler that the pipeline accepts; `batched` only
reads coefficients from it.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...data.errors import UsageError
from ...training.cache.schedule import StepPlan
from ..layout.packing import Packing, WholeImages

_DRAW_NOISE = frozenset({
    *("DDPMScheduler", "DDPMParallelScheduler", "DPMSolverSDEScheduler", "EulerAncestralDiscreteScheduler"),
    *("FlowMatchLCMScheduler", "KDPM2AncestralDiscreteScheduler", "LCMScheduler", "SASolverScheduler"),
})  # fmt: skip
"""Schedulers that draw noise in their steps with any options, when called as the pipelines do."""


NOISING = ("scale_noise", "add_noise")
"""Names of the schedulers' methods that noise clean latents; some schedulers have none."""


def draws_noise(scheduler: Any, *, pass_step_kwargs: bool) -> bool:
    """Return whether this scheduler draws noise in its steps when called as pipelines do: with `eta` 0 or without."""
    name, config = type(scheduler).__name__, scheduler.config
    if name == "TCDScheduler":
        return not pass_step_kwargs  # its own `eta` is 0.3
    is_stochastic = str(config.get("algorithm_type")).startswith("sde-") or config.get("stochastic_sampling", False)
    return name in _DRAW_NOISE or is_stochastic


@dataclass(slots=True)
class SamplerState:
    """The position of one request in its own denoising schedule.

    Attributes:
        scheduler: the request's own diffusers scheduler, with its timesteps set.
        timesteps: (num_steps,), in the order of the steps: the scheduler's timesteps from `first` on, or those of them
            that are computed.
        step_kwargs: further arguments of the scheduler's `step` (`eta`, `generator`), as the pipeline passes them.
        first: index of the request's first step in the scheduler's timesteps; above 0 if it starts from an image.
        plan: plan of the computed steps, to which `timesteps` are then restricted; None for all steps.
        steps_done: number of finished steps; `timesteps[steps_done]` is the next one.
        coefficients: coefficients of all steps, set by `BatchedSampler.table`.
        num_history: number of tensors, each shaped like the latents, that a step keeps for the next one; set with
            `coefficients`.
    """

    scheduler: Any
    timesteps: torch.Tensor
    step_kwargs: dict[str, Any] = field(default_factory=dict)
    first: int = 0
    steps_done: int = 0
    coefficients: torch.Tensor | None = None
    num_history: int = 0
    plan: StepPlan | None = None

    def skip(self, plan: StepPlan) -> None:
        """Compute only the steps of a plan. Called once, before the first step; requires a `SkippingSampler`."""
        assert plan.num_steps == len(self.timesteps), "the plan is of another number of steps"
        assert self.coefficients is None, "coefficients are of the steps that are computed"
        self.plan, self.timesteps = plan, self.timesteps[list(plan.steps)]

    @property
    def whole_plan(self) -> StepPlan:
        """Plan of the computed steps, even if these are all steps."""
        return self.plan or StepPlan.of_all(len(self.timesteps))

    def place(self, step: int) -> int:
        """Return the index of a step in the scheduler's timesteps; `num_steps` gives the index after the last one."""
        if self.plan is None:
            return self.first + step
        return self.first + (*self.plan.steps, self.plan.num_steps)[step]

    @property
    def num_passed(self) -> int:
        """Number of requested steps that are done, computed or skipped."""
        return self.place(self.steps_done) - self.first

    @property
    def num_requested(self) -> int:
        """Number of requested steps, computed or skipped."""
        return len(self.timesteps) if self.plan is None else self.plan.num_steps

    @property
    def num_steps(self) -> int:
        return len(self.timesteps)

    @property
    def is_finished(self) -> bool:
        return self.steps_done >= len(self.timesteps)

    def noising(self) -> torch.Tensor:
        """Return the factors with which the request's own scheduler noises clean latents.

        Their shape is (num_steps + 1, 2), float32 on the CPU. Row i holds the factors of clean latents and noise before
        step i; the last row is (1, 0).
        """
        scheduler = copy.deepcopy(self.scheduler)
        clean, noise = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
        factors = []
        for index, timestep in enumerate(self.timesteps.cpu().split(1)):
            if hasattr(scheduler, "_step_index"):
                # As in a pipeline that has taken these steps, so that the timestep is not searched.
                scheduler._step_index = self.place(index)
            if hasattr(scheduler, "scale_noise"):
                factors.append(scheduler.scale_noise(clean, timestep, noise))
            else:
                factors.append(scheduler.add_noise(clean, noise, timestep))
        return torch.stack([*factors, clean])


class PerRequestSampler:
    """Runs `scheduler.step` on each request's own copy of the pipeline's scheduler: one small update per request.

    With `pass_step_kwargs`, `step` gets `generator` and `eta` if it accepts them (SDXL's pipeline passes them, SD3's
    does not).

    Attributes:
        draws_noise: whether steps draw noise. Its values depend on the dtype, so steps then run in the model's dtype,
            as in the pipelines; in float32 otherwise.

    Raises:
        UsageError: the scheduler draws noise that does not depend on a seed, because the pipeline passes it no
            generator.
    """

    def __init__(self, scheduler: Any, *, pass_step_kwargs: bool) -> None:
        self._scheduler = scheduler
        self.draws_noise = draws_noise(scheduler, pass_step_kwargs=pass_step_kwargs)
        if self.draws_noise and not pass_step_kwargs:
            # Plain diffusers would draw from the global generator, and a request's seed would mean nothing.
            name = type(scheduler).__name__
            raise UsageError(
                f"scheduler {name} draws noise in its steps, and this pipeline passes it no generator: a request's "
                "seed would not decide its image"
            )
        accepted = inspect.signature(scheduler.step).parameters if pass_step_kwargs else {}
        self._accepts_generator = "generator" in accepted
        self._accepts_eta = "eta" in accepted

    def start(
        self,
        num_inference_steps: int,
        *,
        device: torch.device,
        generator: torch.Generator | None = None,
        schedule_kwargs: dict[str, Any] | None = None,
        first_step: int = 0,
    ) -> SamplerState:
        """Set a request's schedule; the first `first_step` steps are skipped."""
        scheduler = copy.deepcopy(self._scheduler)
        scheduler.set_timesteps(num_inference_steps, device=device, **(schedule_kwargs or {}))
        first = first_step * scheduler.order
        if hasattr(scheduler, "set_begin_index"):
            # Avoids a search for the first timestep, which on CUDA would wait for the device.
            scheduler.set_begin_index(first)
        if generator is not None and getattr(scheduler, "noise_sampler_seed", 0) is None:
            # DPM++ SDE takes no generator; without its own seed, its noise would differ each time.
            scheduler.noise_sampler_seed = generator.initial_seed()
        step_kwargs: dict[str, Any] = {}
        if self._accepts_eta:
            step_kwargs["eta"] = 0.0
        if self._accepts_generator:
            step_kwargs["generator"] = generator
        return SamplerState(scheduler, scheduler.timesteps[first:], step_kwargs, first)

    def model_input(self, states: Sequence[SamplerState], latents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # Flow-match schedulers have no `scale_model_input`: the model gets the latents unscaled.
        return [
            state.scheduler.scale_model_input(latent, state.timesteps[state.steps_done])
            if hasattr(state.scheduler, "scale_model_input")
            else latent
            for state, latent in zip(states, latents, strict=True)
        ]

    def timesteps(self, states: Sequence[SamplerState]) -> torch.Tensor:
        return torch.stack([state.timesteps[state.steps_done] for state in states])

    def update(self, state: SamplerState, prediction: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        timestep = state.timesteps[state.steps_done]
        updated = state.scheduler.step(prediction, timestep, latents, **state.step_kwargs, return_dict=False)[0]
        state.steps_done += 1
        return updated


class PerRequestBatch:
    """Counterpart of `batched.SamplerBatch` for schedulers that it does not cover: each request calls its own.

    Args:
        sampler: calls the schedulers.
        states: states of the n requests; their schedulers count their own steps.
        latents: (P, channels, s, s) float32, the patches of all requests.
        packing: cuts images into patches.
        dtype: dtype of the model.

    Attributes:
        latents: latents after the last step.
        errors: errors that schedulers raised in the last step, by index of the request, whose latents are unchanged.
    """

    history = None

    def __init__(
        self,
        sampler: PerRequestSampler,
        states: Sequence[SamplerState],
        latents: torch.Tensor,
        packing: Packing | WholeImages,
        dtype: torch.dtype,
    ) -> None:
        self._sampler, self._states, self.latents, self._packing = sampler, tuple(states), latents, packing
        self._dtype = dtype if sampler.draws_noise else torch.float32
        self.errors: dict[int, Exception] = {}

    def timesteps(self) -> torch.Tensor:
        """Return the current timestep of every request, (n,)."""
        return self._sampler.timesteps(self._states)

    def model_input(self) -> torch.Tensor:
        """Return the model's input, shaped like the latents."""
        seen = self._sampler.model_input(self._states, self._images(self.latents))
        return self._packing.pack([image[0].float() for image in seen])

    def step(self, prediction: torch.Tensor, draw_noise: Callable[[], torch.Tensor] | None = None) -> None:
        """Advance every request by the model's guided output, shaped like the latents; each draws its own noise."""
        self.errors.clear()
        updated = self._images(self.latents)
        for index, (state, part) in enumerate(zip(self._states, self._images(prediction), strict=True)):
            try:
                updated[index] = self._sampler.update(state, part, updated[index])
            except Exception as error:  # noqa: BLE001  one failing request must not take down the others
                self.errors[index] = error
        self.latents = self._packing.pack([image[0].float() for image in updated])

    def _images(self, patches: torch.Tensor) -> list[torch.Tensor]:
        """Return the latents (1, channels, height, width) of every request."""
        count = range(len(self._states))
        return [self._packing.unpack(patches, index)[None].to(self._dtype) for index in count]
