"""The sides of a comparison of denoising steps: plain diffusers, one by one or batched by resolution, and patches.

All take real steps of the same prepared requests, guidance and sampler included. Requests start in the middle of a long
schedule, so that they do not finish while they are measured, and are put back there when they run out.
"""

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from ...data.errors import RunError
from ...data.prompts.captions import load_prompts
from ...data.requests import Request
from ...data.resolution import Resolution
from ...serving.core.denoiser import denoise
from ...serving.core.prepared import PreparedRequest
from ...serving.models.served import ServedModel
from ...serving.patched.stepper import PatchedStepper
from ...serving.plain.formats import channels_last_copy, compile_whole
from ...serving.plain.stepper import group_by_resolution
from .combinations import Combination

Format = Literal["default", "channels-last"]
_NUM_STEPS = 500


class Side(Protocol):
    """One way of denoising the requests of a combination."""

    def begin(self) -> None:
        """Put all requests back to the middle of their schedules."""
        ...

    @property
    def steps_left(self) -> int:
        """Steps until the requests finish."""
        ...

    def step(self) -> None:
        """Take one step of every request. Work may still be under way on a CUDA device. Raises RunError."""
        ...


class RequestPool:
    """Prepared requests of one model with its own guidance scale, made when they are first needed and shared by all
    combinations; `seed` is that of the first request, and the others count up.
    """

    def __init__(self, model: ServedModel, seed: int = 0) -> None:
        self._model, self._seed = model, seed
        self._prompts = load_prompts()
        self._made: dict[Resolution, list[PreparedRequest]] = defaultdict(list)
        train_steps = model.pipe.scheduler.config.num_train_timesteps
        self._num_steps = max(2, min(_NUM_STEPS, train_steps // 2))

    def check(self, resolution: Resolution) -> None:
        """Raise UsageError if the model cannot serve the resolution."""
        self._model.check_request(self._request(0, resolution))

    def take(self, combination: Combination) -> list[PreparedRequest]:
        """Return the requests of a combination, at the start of their schedules; they are not to be changed."""
        taken: list[PreparedRequest] = []
        for resolution, count in zip(combination.resolutions, combination.counts, strict=True):
            made = self._made[resolution]
            while len(made) < count:
                number = sum(map(len, self._made.values()))
                made.append(self._model.prepare(self._request(number, resolution)))
            taken += made[:count]
        return taken

    def _request(self, number: int, resolution: Resolution) -> Request:
        return Request(
            request_id=number,
            prompt=self._prompts[number % len(self._prompts)],
            resolution=resolution,
            num_inference_steps=self._num_steps,
            guidance_scale=self._model.defaults.guidance_scale,
            seed=self._seed + number,
        )


class EngineSide:
    """The engine that serves: one step of its stepper, over all requests."""

    def __init__(self, model: ServedModel, requests: Sequence[PreparedRequest]) -> None:
        self._stepper, self._requests = model.stepper, requests
        self._active: list[PreparedRequest] = []

    def begin(self) -> None:
        """See `Side`. The next step is one of a new batch, as after a request has joined or left."""
        self._active = []
        for prepared in self._requests:
            state = replace(prepared.state, steps_done=_middle(prepared))
            if self._stepper.name == "plain":
                # It calls the scheduler of each request, which counts steps itself. The patch engine only reads it.
                state.scheduler = _scheduler_at(prepared, state.steps_done)
            latents = _start(prepared)
            self._active.append(replace(prepared, latents=latents, state=state, previous_x0=latents.clone()))

    @property
    def steps_left(self) -> int:
        return min(prepared.state.num_steps - prepared.state.steps_done for prepared in self._active)

    def step(self) -> None:
        failures = self._stepper.step(self._active)
        if failures:
            raise RunError(f"a request of the benchmark failed: {next(iter(failures.values()))}")


class PlainSide:
    """Plain diffusers: its batches are stepped one after the other.

    Args:
        model, requests: the served model, and its requests in any order.
        batched: all requests of a resolution in one batch; else each is a batch of its own.
        denoiser: the unmodified model; None for the served model's own.
        memory_format: of the denoiser's convolutions and its input.
    """

    def __init__(
        self,
        model: ServedModel,
        requests: Sequence[PreparedRequest],
        *,
        batched: bool,
        denoiser: nn.Module | None = None,
        memory_format: Format = "default",
    ) -> None:
        groups = list(group_by_resolution(requests).values()) if batched else [[prepared] for prepared in requests]
        chosen = model.denoiser if denoiser is None else denoiser
        self._batches = [_PlainBatch(model, chosen, group, memory_format) for group in groups]

    def begin(self) -> None:
        for batch in self._batches:
            batch.begin()

    @property
    def steps_left(self) -> int:
        return min(batch.steps_left for batch in self._batches)

    def step(self) -> None:
        for batch in self._batches:
            batch.step()


class _PlainBatch:
    """Requests of one resolution at the same timestep, as a pipeline called with several prompts holds them."""

    def __init__(
        self, model: ServedModel, denoiser: nn.Module, group: Sequence[PreparedRequest], memory_format: Format
    ) -> None:
        first = group[0]
        self._denoiser, self._first, self._start = denoiser, first, torch.cat([_start(each) for each in group])
        self._start = self._start.to(model.dtype)
        self._scale = first.request.guidance_scale if first.is_guided else None
        self._layout = torch.channels_last if memory_format == "channels-last" else torch.contiguous_format
        # As in a pipeline, all unconditional rows come first. The text is encoded and put together once, not per step.
        rows = range(first.num_rows)
        conditioning = {
            key: torch.cat([each.conditioning[key][row : row + 1] for row in rows for each in group])
            for key in first.conditioning
        }
        self._conditions: dict[str, Any] = model.family.conditions(conditioning)
        self._step_kwargs = dict(first.state.step_kwargs)
        if len(group) > 1 and self._step_kwargs.get("generator") is not None:
            self._step_kwargs["generator"] = [each.state.step_kwargs["generator"] for each in group]
        self.begin()

    def begin(self) -> None:
        middle = _middle(self._first)
        self._scheduler = _scheduler_at(self._first, middle)
        self._timesteps = self._first.state.timesteps[middle:]
        self._steps_done = 0
        self._latents = self._start

    @property
    def steps_left(self) -> int:
        return len(self._timesteps) - self._steps_done

    @torch.inference_mode()
    def step(self) -> None:
        timestep, latents = self._timesteps[self._steps_done], self._latents
        rows = latents if self._scale is None else torch.cat([latents, latents])
        if hasattr(self._scheduler, "scale_model_input"):
            rows = self._scheduler.scale_model_input(rows, timestep)
        rows = rows.contiguous(memory_format=self._layout)
        prediction = denoise(self._denoiser, rows, timestep.expand(len(rows)), self._conditions)
        if self._scale is not None:
            unconditional, conditional = prediction.chunk(2)
            prediction = unconditional + self._scale * (conditional - unconditional)
        stepped = self._scheduler.step(prediction, timestep, latents, **self._step_kwargs, return_dict=False)
        self._latents = stepped[0]
        self._steps_done += 1


def patched_stepper(model: ServedModel) -> PatchedStepper:
    """Return the stepper of a model that the patch engine serves."""
    assert isinstance(model.stepper, PatchedStepper), "benchmarks of steps measure the patch engine"
    return model.stepper


def plain_denoisers(model: ServedModel) -> dict[Format, nn.Module]:
    """Return the unmodified model, and of a U-Net also a copy whose convolutions are channels-last in memory.

    The copy shares all other weights. A transformer has next to no convolutions, so it is not copied.
    """
    denoisers: dict[Format, nn.Module] = {"default": model.denoiser}
    if hasattr(model.pipe, "unet"):
        denoisers["channels-last"] = channels_last_copy(model.denoiser)
        if model.options.compile:
            compile_whole(denoisers["channels-last"])
    return denoisers


def _middle(prepared: PreparedRequest) -> int:
    return prepared.state.num_steps // 2


def _start(prepared: PreparedRequest) -> Tensor:
    """The request's noise with variance 1: what a schedule begins with is far too much for its middle."""
    sigma = getattr(prepared.state.scheduler, "init_noise_sigma", 1.0)
    return prepared.latents / sigma


def _scheduler_at(prepared: PreparedRequest, steps_done: int) -> Any:
    """A copy of the request's scheduler, set to continue after so many steps."""
    scheduler = copy.deepcopy(prepared.state.scheduler)
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(steps_done)
    return scheduler
