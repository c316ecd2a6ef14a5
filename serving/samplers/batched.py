"""Batched samplers: every request at its own timestep and step count, all advanced by one vectorised update.

diffusers' schedulers remain the source of the numbers: `BatchedSampler.table` turns the schedule of each request's own
copy into coefficients. One step of every supported scheduler is then

    model input = scale * x
    x0 = x0_sample * x + x0_output * out          (clamped where DDIM's `clip_sample` asks for it)
    x' = sample * x + output * out + x0 * x0 + previous_x0 * (x0 of the step before) + noise * (fresh noise)

with one scalar per request and term, where x are the latents and out is the model's prediction. The terms depend on
the scheduler alone, never on the step, so requests at different steps share the same few operators. The update equals
`scheduler.step` without options (no `eta`, no `s_churn`), in float32 whatever the model's dtype.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from ...data.errors import UsageError
from .single import SamplerState

# The columns of a table by term, float64, a row for every timestep of the scheduler. Their formulas are in
# x = alpha * x0 + sigma * epsilon; a level is one of a scheduler's `sigmas`: sigma / alpha, or for flow models sigma.
_Columns = dict[str, torch.Tensor]


def _levels(scheduler: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the noise level before and after every step."""
    levels = scheduler.sigmas.cpu().double()
    count = len(scheduler.timesteps)
    return levels[:count], levels[1 : count + 1]


def _x0_columns(prediction_type: str, alpha: torch.Tensor, sigma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of x and of the prediction in x0 (v: Salimans & Ho 2022, appendix D)."""
    if prediction_type == "epsilon":
        return 1 / alpha, -sigma / alpha
    if prediction_type == "v_prediction":
        return alpha, -sigma
    return torch.zeros_like(alpha), torch.ones_like(alpha)


def _ddim(state: SamplerState) -> _Columns:
    """DDIM: x' = alpha' x0 + sigma' epsilon (Song et al. 2021, eq. 12 with its sigma_t = 0)."""
    scheduler, timesteps = state.scheduler, state.scheduler.timesteps.cpu()
    config, square = scheduler.config, scheduler.alphas_cumprod.double()
    next_timesteps = timesteps - config.num_train_timesteps // scheduler.num_inference_steps
    next_square = torch.where(next_timesteps >= 0, square[next_timesteps.clamp(min=0)], scheduler.final_alpha_cumprod)
    alpha, sigma = square[timesteps].sqrt(), (1 - square[timesteps]).sqrt()
    next_alpha, next_sigma = next_square.sqrt(), (1 - next_square).sqrt()
    a, b = _x0_columns(config.prediction_type, alpha, sigma)
    # epsilon = (x - alpha x0) / sigma, of the x0 before it is clipped.
    sample, output = next_sigma * (1 - alpha * a) / sigma, next_sigma * -alpha * b / sigma
    if not config.clip_sample:
        sample, output = sample + next_alpha * a, output + next_alpha * b
    return {"x0_sample": a, "x0_output": b, "sample": sample, "output": output, "x0": next_alpha}


def _euler(state: SamplerState) -> _Columns:
    """Euler: y' = y + (y - x0) / level * (level' - level) for y = x / alpha (Karras et al. 2022, algorithm 1).

    The ancestral step goes down to level'^2 / level instead and then adds noise back up to level' (Song et al. 2021,
    eq. 16 with eta = 1). diffusers writes the former as sqrt(level'^2 - up^2), which in float32 can give NaN.
    """
    scheduler = state.scheduler
    level, next_level = _levels(scheduler)
    alpha = (level**2 + 1).rsqrt()
    a, b = _x0_columns(scheduler.config.prediction_type, alpha, level * alpha)
    ratio = next_level / level
    kept = ratio**2 if type(scheduler).__name__ == "EulerAncestralDiscreteScheduler" else ratio
    sample, output = kept + (1 - kept) * a * alpha, (1 - kept) * b
    return {
        "scale": alpha,
        "x0_sample": a * alpha,
        "x0_output": b,
        "sample": sample,
        "output": output,
        "noise": next_level * (1 - ratio**2).sqrt(),
    }


def _dpm_solver(state: SamplerState) -> _Columns:
    """DPM-Solver++ 2M: x' = sigma' / sigma x + alpha' (1 - e^-h) x0 + w h / h_before (x0 - x0_before).

    h is the step in log(alpha / sigma); w is alpha' (1 - e^-h) / 2 for "midpoint" (Lu et al. 2022, DPM-Solver++,
    algorithm 2) and alpha' (1 - (1 - e^-h) / h) for "heun". The last term is missing in the first step and, by
    diffusers' rules, in the last step where steps are few or h is infinite.
    """
    config = state.scheduler.config
    levels = torch.stack(_levels(state.scheduler))
    alphas = 1 - levels if config.use_flow_sigmas else (levels**2 + 1).rsqrt()
    sigmas = levels if config.use_flow_sigmas else levels * alphas
    (alpha, next_alpha), (sigma, next_sigma) = alphas, sigmas
    if config.prediction_type == "flow_prediction":
        a, b = torch.ones_like(alpha), -levels[0]
    else:
        a, b = _x0_columns(config.prediction_type, alpha, sigma)
    gain = 1 - (next_sigma * alpha) / (next_alpha * sigma)  # 1 - e^-h
    h = -(1 - gain).log()
    weight = gain / 2 if config.solver_type == "midpoint" else 1 - gain / h
    is_few = config.lower_order_final and len(state.scheduler.timesteps) < 15
    is_last_lower = config.euler_at_final or is_few or config.final_sigmas_type == "zero"
    is_second_order = torch.full_like(h, config.solver_order == 2, dtype=torch.bool)
    is_second_order[[state.first, -1] if is_last_lower else [state.first]] = False
    slope = torch.where(is_second_order, next_alpha * weight * h / h.roll(1), 0.0)
    x0 = next_alpha * gain + slope
    sample = next_sigma / sigma + x0 * a
    return {"x0_sample": a, "x0_output": b, "sample": sample, "output": x0 * b, "previous_x0": -slope}


def _flow_match(state: SamplerState) -> _Columns:
    """Euler along the predicted velocity: x' = x + (level' - level) out (Esser et al. 2024, section 2)."""
    level, next_level = _levels(state.scheduler)
    return {"x0_sample": torch.ones_like(level), "x0_output": -level, "output": next_level - level}


# Scheduler class -> its columns, and option -> the values that they cover; all other options shape only what is read
# from the scheduler. Classes go by name, so that a subclass with its own `step` is not taken for its parent.
_RULES: dict[str, tuple[Callable[[SamplerState], _Columns], dict[str, tuple[Any, ...]]]] = {
    "DDIMScheduler": (_ddim, {"prediction_type": ("epsilon", "sample", "v_prediction"), "thresholding": (False,)}),
    "EulerDiscreteScheduler": (_euler, {"prediction_type": ("epsilon", "sample", "v_prediction")}),
    "EulerAncestralDiscreteScheduler": (_euler, {"prediction_type": ("epsilon", "v_prediction")}),
    "DPMSolverMultistepScheduler": (
        _dpm_solver,
        {
            "algorithm_type": ("dpmsolver++",),
            "solver_order": (1, 2),
            "solver_type": ("midpoint", "heun"),
            "prediction_type": ("epsilon", "sample", "v_prediction", "flow_prediction"),
            "thresholding": (False,),
            "variance_type": (None,),
        },
    ),
    "FlowMatchEulerDiscreteScheduler": (_flow_match, {"stochastic_sampling": (False,)}),
}
SUPPORTED_SCHEDULERS: tuple[str, ...] = tuple(_RULES)


def _terms(name: str, config: Any) -> tuple[str, ...]:
    """Return the terms of this scheduler; left out are those that are 0, or for `sample` 1, at every step."""
    if name == "FlowMatchEulerDiscreteScheduler":
        return ("output",)
    if name in ("EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler"):
        terms = ("scale", "output") if config.prediction_type == "epsilon" else ("scale", "sample", "output")
        return (*terms, "noise") if name == "EulerAncestralDiscreteScheduler" else terms
    if name == "DDIMScheduler" and config.clip_sample:
        return ("x0_sample", "x0_output", "sample", "output", "x0")
    if name == "DPMSolverMultistepScheduler" and config.solver_order == 2:
        return ("x0_sample", "x0_output", "sample", "output", "previous_x0")
    return ("sample", "output")


def _refusal(given: str) -> UsageError:
    return UsageError(f"{given} cannot be batched; supported: {', '.join(_RULES)}; for others use --engine plain")


class BatchedSampler:
    """The update rule of one served model's scheduler, which is only read; holds no state of any request.

    Attributes:
        terms: names of the terms of the update that this scheduler has; the columns of every table.
        clip: DDIM's `clip_sample_range` if it clips x0, else None.
        needs_noise: whether each step adds fresh noise.
        needs_history: whether a step reads the x0 of the step before.

    Raises:
        UsageError: the scheduler's class or one of its options is not covered.
    """

    def __init__(self, scheduler: Any, *, pass_step_kwargs: bool) -> None:
        name, config = type(scheduler).__name__, scheduler.config
        if name not in _RULES:
            raise _refusal(f"scheduler {name}")
        self._rule, covered = _RULES[name]
        for option, values in covered.items():
            if config[option] not in values:
                raise _refusal(f"{name} with {option}={config[option]!r} (only {' or '.join(map(repr, values))})")
        self.terms = _terms(name, config)
        self.clip: float | None = config.clip_sample_range if "x0" in self.terms else None
        self.needs_noise, self.needs_history = "noise" in self.terms, "previous_x0" in self.terms
        if self.needs_noise and not pass_step_kwargs:
            # Plain diffusers would draw from the global generator, and a request's seed would mean nothing.
            raise _refusal(f"{name} in a pipeline that passes it no generator")

    def table(self, state: SamplerState) -> torch.Tensor:
        """Return the coefficients of all steps of one request, float32 (num_steps, len(terms)) on the CPU.

        They are computed in float64, once per request, and kept in its state. The first call reads the schedule from
        the device, so the prepare stage makes it. Raises UsageError if a coefficient is not finite, for example if
        epsilon is predicted from noise without signal; plain diffusers would continue with NaN.
        """
        if state.coefficients is None:
            columns = self._rule(state)
            table = torch.stack([columns[term] for term in self.terms], dim=1)[state.first :].float()
            if not bool(table.isfinite().all()):
                given = f"{type(state.scheduler).__name__} with {state.num_steps} steps"
                raise UsageError(f"{given} has no finite update; change the steps, timestep_spacing or prediction_type")
            state.coefficients = table
        return state.coefficients

    def x0_factors(self, state: SamplerState) -> tuple[float, float]:
        """The factors of x and out in the x0 of the step that a request has taken last, which is one at the least."""
        columns, last = self._rule(state), state.first + state.steps_done - 1
        sample, output = (float(columns[name][last]) for name in ("x0_sample", "x0_output"))
        return sample, output


class SamplerBatch:
    """The sampler's side of a packed batch: the latents of all requests in patches, advanced together.

    Rebuilt whenever a request joins or leaves; in between, nothing else may change the states' `steps_done`. Tensors
    that it is given or hands out are never written to.

    Args:
        sampler: the model's update rule.
        states: of the n requests.
        latents: (P, channels, s, s) float32, the patches of all requests, in any memory format; it is kept.
        patch_request: (P,) int64, the index in `states` of the request that each patch belongs to.
        previous_x0: (P, channels, s, s) float32, that of the batch before; rows of requests at their first step may
            hold anything. None if all are at their first step, or if the sampler needs no history.

    Attributes:
        sampler: as given.
        latents: as after the last step.
        previous_x0: the predicted clean latents of the last step; None if the sampler needs no history.
        last: the latents before the last step and the prediction in it; None before the first.
        needs_noise, needs_history: the sampler's. With the latter, a missing `previous_x0` raises ValueError.
    """

    def __init__(
        self,
        sampler: BatchedSampler,
        states: Sequence[SamplerState],
        latents: torch.Tensor,
        patch_request: torch.Tensor,
        previous_x0: torch.Tensor | None = None,
    ) -> None:
        assert latents.dtype == torch.float32
        self.needs_noise, self.needs_history = sampler.needs_noise, sampler.needs_history
        self.sampler, self._states, self.latents = sampler, tuple(states), latents
        self.previous_x0 = self._history(patch_request, previous_x0) if self.needs_history else None
        # The steps of all requests, one after another, one row each.
        self._table = torch.cat([sampler.table(state) for state in states]).to(latents.device)
        self._timesteps = torch.cat([state.timesteps for state in states]).to(latents.device)
        ends = accumulate(state.num_steps for state in states)
        rows = [end - state.num_steps + state.steps_done for end, state in zip(ends, states, strict=True)]
        request_rows = torch.tensor(rows, device=latents.device)
        # Requests and patches share one tensor, so that one addition moves both to their next row.
        self._rows = torch.cat([request_rows, request_rows[patch_request]])
        self._request_rows, self._patch_rows = self._rows.split([len(states), len(patch_request)])
        self._coefficients: _Columns | None = None
        self.last: tuple[torch.Tensor, torch.Tensor] | None = None

    def timesteps(self) -> torch.Tensor:
        """Return the current timestep of every request, (n,), in the dtype of the scheduler's timesteps."""
        self._check_unfinished()
        return self._timesteps.index_select(0, self._request_rows)

    def model_input(self) -> torch.Tensor:
        """Return what the model sees, (P, channels, s, s) float32; the latents themselves if nothing scales them."""
        return self.latents * self._current()["scale"] if "scale" in self.sampler.terms else self.latents

    def step(self, prediction: torch.Tensor, draw_noise: Callable[[], torch.Tensor] | None = None) -> None:
        """Advance every request by one step.

        Args:
            prediction: (P, channels, s, s), the model's guided output, in any dtype.
            draw_noise: returns standard normal noise shaped as the latents; called once, only if `needs_noise`.

        Raises:
            RuntimeError: a request is finished (also raised by `timesteps`); nothing has changed then.
        """
        of, x, output = self._current(), self.latents, prediction.float()
        updated = torch.addcmul(x * of["sample"] if "sample" in of else x, output, of["output"])
        if "x0_sample" in of:
            x0 = (x * of["x0_sample"]).addcmul_(output, of["x0_output"])
            if self.sampler.clip is not None:
                updated.addcmul_(x0.clamp_(-self.sampler.clip, self.sampler.clip), of["x0"])
            if self.previous_x0 is not None:
                updated.addcmul_(self.previous_x0, of["previous_x0"])
                self.previous_x0 = x0
        if "noise" in of:
            assert draw_noise is not None
            updated.addcmul_(draw_noise().float(), of["noise"])
        self.latents, self.last = updated, (x, output)
        self._rows += 1
        self._coefficients = None
        for state in self._states:
            state.steps_done += 1

    def _current(self) -> _Columns:
        """Return this step's coefficients by term, each (P, 1, 1, 1)."""
        self._check_unfinished()
        if self._coefficients is None:
            columns = self._table.index_select(0, self._patch_rows)[:, :, None, None, None].unbind(1)
            self._coefficients = dict(zip(self.sampler.terms, columns, strict=True))
        return self._coefficients

    def _check_unfinished(self) -> None:
        if any(state.is_finished for state in self._states):
            raise RuntimeError("a request of this batch has finished its last step and must leave it")

    def _history(self, patch_request: torch.Tensor, previous_x0: torch.Tensor | None) -> torch.Tensor:
        is_first = [state.steps_done == 0 for state in self._states]
        if previous_x0 is None and not all(is_first):
            raise ValueError("previous_x0 is None, but a request past its first step needs it")
        # The coefficient of these rows is 0, which does not silence NaN.
        is_unused = torch.tensor(is_first, device=self.latents.device)[patch_request, None, None, None]
        return (self.latents if previous_x0 is None else previous_x0).masked_fill(is_unused, 0.0)
