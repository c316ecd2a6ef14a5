"""Sides of a comparison of denoising steps: plain diffusers, one by one or batched by resolution, and patches.

All sides take real steps of the same prepared requests, including guidance and sampler. Requests start in the middle of
a long schedule, so that they do not finish while they are measured, and are reset when they run out of steps.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ...data.errors import RunError
from ...data.prompts.captions import load_prompts
from ...data.requests import Request
from ...data.resolution import Resolution
from ...serving.core.captured import CapturedPasses, Recorder
from ...serving.core.prepared import PreparedRequest
from ...serving.core.stepper import Stepper
from ...serving.models.build import build_plain, with_engine
from ...serving.models.served import ServedModel
from ...serving.patched.stepper import PatchedStepper
from ...serving.plain.formats import Format, PlainModels
from .combinations import Combination

_NUM_STEPS = 500
MakeRecorder = Callable[[torch.device], Recorder]


@dataclass(frozen=True, slots=True)
class Effort:
    """Optimizations of a side; the same code applies them to the plain model and to the patched one.

    Attributes:
        is_compiled: whether transformer blocks run through torch.compile.
        is_recorded: whether passes are recorded once and replayed.
    """

    is_compiled: bool = False
    is_recorded: bool = False

    @property
    def name(self) -> str:
        """Name in tables and files."""
        return " + ".join(["compiled"] * self.is_compiled + ["graphs"] * self.is_recorded) or "eager"


EAGER, GRAPHS, COMPILED, BOTH = Effort(), Effort(is_recorded=True), Effort(is_compiled=True), Effort(True, True)


def efforts_of(*, compiled: bool, recorded: bool) -> tuple[Effort, ...]:
    """Return the efforts that a run compares: eager, each requested optimization alone, and both together."""
    chosen = [Effort(is_compiled, is_recorded) for is_compiled in (False, True) for is_recorded in (False, True)]
    return tuple(each for each in chosen if each.is_compiled <= compiled and each.is_recorded <= recorded)


class StepSide(Protocol):
    """One way of denoising the requests of a combination."""

    def begin(self) -> None:
        """Reset all requests to the middle of their schedules."""
        ...

    @property
    def steps_left(self) -> int:
        """Number of steps until the requests finish."""
        ...

    def step(self) -> None:
        """Take one step of every request. Work on a CUDA device may still be running. Raises RunError."""
        ...


class RequestPool:
    """Prepared requests of one model with its default guidance scale, created when first needed and shared by all
    combinations. `seed` is the seed of the first request; the following ones count up.
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
        """Return the requests of a combination, at the start of their schedules; callers must not change them."""
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


class StepperSide:
    """An engine, whose step is one step of its stepper over all requests."""

    def __init__(self, stepper: Stepper, requests: Sequence[PreparedRequest]) -> None:
        self._stepper, self._requests = stepper, requests
        self.active: list[PreparedRequest] = []

    def begin(self) -> None:
        """Reset all requests. The next step is the first of a new batch, as after a request has joined or left."""
        self.active = []
        for prepared in self._requests:
            state = replace(prepared.state, steps_done=_middle(prepared))
            if state.coefficients is None:
                # Each request's own scheduler is called, and it counts steps itself.
                state.scheduler = _scheduler_at(prepared, state.steps_done)
            latents = _start(prepared)
            history = latents.repeat(1, state.num_history, 1, 1) if state.num_history else None
            self.active.append(replace(prepared, latents=latents, state=state, history=history))

    @property
    def steps_left(self) -> int:
        return min(prepared.state.num_steps - prepared.state.steps_done for prepared in self.active)

    def step(self) -> None:
        failures = self._stepper.step(self.active)
        if failures:
            raise RunError(f"a request of the benchmark failed: {next(iter(failures.values()))}")


class OneByOne:
    """Plain diffusers with every request in its own batch, one after the other."""

    def __init__(self, model: ServedModel, models: PlainModels, requests: Sequence[PreparedRequest]) -> None:
        self._sides = [plain_side(model, models, [prepared]) for prepared in requests]

    @property
    def active(self) -> list[PreparedRequest]:
        return [prepared for side in self._sides for prepared in side.active]

    def begin(self) -> None:
        for side in self._sides:
            side.begin()

    @property
    def steps_left(self) -> int:
        return min(side.steps_left for side in self._sides)

    def step(self) -> None:
        for side in self._sides:
            side.step()


def plain_side(model: ServedModel, models: PlainModels, requests: Sequence[PreparedRequest]) -> StepperSide:
    """Return plain diffusers as `--engine plain` runs it: one batch for each resolution, one after the other."""
    return StepperSide(build_plain(model.pipe, model.family, models), requests)


def patched_stepper(model: ServedModel) -> PatchedStepper:
    """Return the stepper of a model on the patch engine."""
    assert isinstance(model.stepper, PatchedStepper), "benchmarks of steps measure the patch engine"
    return model.stepper


def with_effort(model: ServedModel, effort: Effort, recorder: Recorder | None) -> ServedModel:
    """Return the same loaded model on its own patch engine; `recorder` records its passes if the effort asks for it."""
    served = with_engine(model, replace(model.options, compile=effort.is_compiled, cuda_graphs=False))
    if effort.is_recorded:
        assert recorder is not None
        patched_stepper(served).model.use_graphs(recorder, patience=1)
    return served


def plain_models(
    model: ServedModel, effort: Effort = EAGER, recorder: Recorder | None = None
) -> dict[Format | None, PlainModels]:
    """Return the unmodified model in each of its memory formats and, as None, in the one that tuning finds faster."""
    weights = patched_stepper(model).model.channels_last_weights
    formats: tuple[Format | None, ...] = (None, *PlainModels(model.denoiser).formats)

    def made(always: Format | None) -> PlainModels:
        assert recorder is not None or not effort.is_recorded
        captured = CapturedPasses(recorder, patience=1) if effort.is_recorded and recorder is not None else None
        return PlainModels(model.denoiser, weights, is_compiled=effort.is_compiled, always=always, captured=captured)

    return {each: made(each) for each in formats}


def _middle(prepared: PreparedRequest) -> int:
    return prepared.state.num_steps // 2


def _start(prepared: PreparedRequest) -> Tensor:
    """Return the request's noise with variance 1: the initial noise of a schedule is far too strong for its middle."""
    sigma = getattr(prepared.state.scheduler, "init_noise_sigma", 1.0)
    return prepared.latents / sigma


def _scheduler_at(prepared: PreparedRequest, steps_done: int) -> Any:
    """Return a copy of the request's scheduler, set to continue after `steps_done` steps."""
    scheduler = copy.deepcopy(prepared.state.scheduler)
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(steps_done)
    return scheduler
