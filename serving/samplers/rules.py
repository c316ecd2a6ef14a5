"""The coefficients of one step, described in `batched`, with one rule per batched scheduler.

diffusers' schedulers remain the source of the numbers: a rule reads the schedule of a request's own copy.
"""

from collections.abc import Callable
from typing import Any

import torch

from .single import SamplerState

# The columns of a table by term, float64, with a row for every timestep of the scheduler. Their formulas assume
# x = alpha * x0 + sigma * epsilon; a level is one of a scheduler's `sigmas`: sigma / alpha, or for flow models sigma.
Columns = dict[str, torch.Tensor]


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


def _ddim(state: SamplerState) -> Columns:
    """DDIM: x' = alpha' x0 + sigma' epsilon (Song et al. 2021, eq. 12 with its sigma_t = 0)."""
    scheduler, timesteps = state.scheduler, state.scheduler.timesteps.cpu()
    config, square = scheduler.config, scheduler.alphas_cumprod.double()
    next_timesteps = timesteps - config.num_train_timesteps // scheduler.num_inference_steps
    next_square = torch.where(next_timesteps >= 0, square[next_timesteps.clamp(min=0)], scheduler.final_alpha_cumprod)
    return _deterministic(config, square[timesteps], next_square, clips=config.clip_sample)


def _deterministic(config: Any, square: torch.Tensor, next_square: torch.Tensor, *, clips: bool = False) -> Columns:
    """DDIM's step between two values of alpha squared."""
    alpha, sigma = square.sqrt(), (1 - square).sqrt()
    next_alpha, next_sigma = next_square.sqrt(), (1 - next_square).sqrt()
    a, b = _x0_columns(config.prediction_type, alpha, sigma)
    # epsilon = (x - alpha x0) / sigma, with x0 before clipping.
    sample, output = next_sigma * (1 - alpha * a) / sigma, next_sigma * -alpha * b / sigma
    if not clips:
        sample, output = sample + next_alpha * a, output + next_alpha * b
    return {"x0_sample": a, "x0_output": b, "sample": sample, "output": output, "x0": next_alpha}


def _euler(state: SamplerState) -> Columns:
    """Euler: y' = y + (y - x0) / level * (level' - level) for y = x / alpha (Karras et al. 2022, algorithm 1).

    The ancestral step goes down to level'^2 / level instead, and then adds noise up to level' (Song et al. 2021, eq. 16
    with eta = 1). diffusers computes the former as sqrt(level'^2 - up^2), which can give NaN in float32.
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


def _dpm_solver(state: SamplerState) -> Columns:
    """DPM-Solver++ 2M: x' = sigma' / sigma x + alpha' (1 - e^-h) x0 + w h / h_before (x0 - x0_before).

    h is the step in log(alpha / sigma); w is alpha' (1 - e^-h) / 2 for "midpoint" (Lu et al. 2022, DPM-Solver++,
    algorithm 2) and alpha' (1 - (1 - e^-h) / h) for "heun". The last term is omitted in the first step and, by
    diffusers' rules, in the last step if there are few steps or h is infinite.
    """
    config = state.scheduler.config
    alpha, next_alpha, sigma, next_sigma, a, b = _signal_and_noise(state.scheduler)
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


def _signal_and_noise(scheduler: Any) -> tuple[torch.Tensor, ...]:
    """Return alpha and sigma before and after each step, and the columns of x0, for solvers in log(alpha / sigma)."""
    config = scheduler.config
    levels = torch.stack(_levels(scheduler))
    alphas = 1 - levels if config.use_flow_sigmas else (levels**2 + 1).rsqrt()
    sigmas = levels if config.use_flow_sigmas else levels * alphas
    if config.prediction_type == "flow_prediction":
        return (*alphas, *sigmas, torch.ones_like(levels[0]), -levels[0])
    return (*alphas, *sigmas, *_x0_columns(config.prediction_type, alphas[0], sigmas[0]))


def _uni_pc(state: SamplerState) -> Columns:
    """UniPC: each step corrects the x predicted by the previous step, then predicts (Zhao et al. 2023, algorithms 5-8).

    With m0, m1 for the x0 of the two previous steps, and y for a corrected x:

        y  = c0 y_before + c1 m0 + c2 m1 + c3 x0        (y = x in the first step, or if the step is not corrected)
        x' = p0 y + p1 x0 + p2 m0

    The first three terms of y are known at the end of the previous step; their sum is carried over.
    """
    scheduler, first = state.scheduler, state.first
    config, count = scheduler.config, len(scheduler.timesteps)
    alpha, next_alpha, sigma, next_sigma, a, b = _signal_and_noise(scheduler)
    step = torch.arange(count)
    order = (step - first + 1).clamp(1, config.solver_order)
    if config.lower_order_final:
        order = order.minimum(count - step)
    is_second = order == 2
    h = (next_alpha.log() - next_sigma.log()) - (alpha.log() - sigma.log())
    gain = -torch.expm1(-h)  # 1 - e^-h
    scale = h if config.solver_type == "bh1" else gain
    # For a step of second order, the negative ratio of the previous step's length to its own.
    ratio = -h.roll(1) / h
    slope = torch.where(is_second, next_alpha * scale / ratio, 0.0)
    p0, p1, p2 = next_sigma / sigma, next_alpha * gain - slope / 2, slope / 2
    # The correction of x' in the next step, with the same number of x0 terms as the prediction.
    phi = gain / h - 1
    of_first, of_second = -phi / scale, (2 * phi / h + 1) / scale
    older = torch.where(is_second, (of_first - of_second) / (1 - ratio), 0.0)
    newest = torch.where(is_second, of_first - older, 0.5)
    c2 = torch.where(is_second, next_alpha * scale * older / ratio, 0.0)
    c3 = next_alpha * scale * newest
    c1 = next_alpha * gain - c2 - c3
    is_corrected = torch.tensor([index > first and index - 1 not in config.disable_corrector for index in range(count)])
    c3 = c3.roll(1)
    x0 = p1 + torch.where(is_corrected, p0 * c3, 0.0)
    kept_x0 = c1 + torch.where(is_corrected, p0 * c3, 0.0)
    columns = {
        "x0_sample": a,
        "x0_output": b,
        "sample": torch.where(is_corrected, 0.0, p0) + x0 * a,
        "output": x0 * b,
        "previous_x0": p2,
        "carried": torch.where(is_corrected, p0, 0.0),
        "keep_sample": torch.where(is_corrected, 0.0, p0),
        "keep_x0": kept_x0,
        "keep_previous_x0": c2,
        "keep_carried": torch.where(is_corrected, p0, 0.0),
    }
    for name in columns:
        if name.startswith("keep"):
            columns[name][-1] = 0.0
    return columns


def _lcm(state: SamplerState) -> Columns:
    """Latent consistency: y = c_skip x + c_out x0, then x' = alpha' y + sigma' noise (Luo et al. 2023, algorithm 3)."""
    scheduler, timesteps = state.scheduler, state.scheduler.timesteps.cpu()
    config, square = scheduler.config, scheduler.alphas_cumprod.double()[timesteps]
    next_square = torch.cat([square[1:], torch.ones(1)])
    a, b = _x0_columns(config.prediction_type, square.sqrt(), (1 - square).sqrt())
    skip, out = scheduler.get_scalings_for_boundary_condition_discrete(timesteps.double())
    sample, x0 = next_square.sqrt() * skip, next_square.sqrt() * out
    output = torch.zeros_like(sample)
    if not config.clip_sample:
        sample, output = sample + x0 * a, x0 * b
    noise = (1 - next_square).sqrt()
    return {"x0_sample": a, "x0_output": b, "sample": sample, "output": output, "x0": x0, "noise": noise}


def _tcd(state: SamplerState) -> Columns:
    """Trajectory consistency with gamma = 0, as pipelines call it: DDIM's step (Zheng et al. 2024, algorithm 4)."""
    scheduler, timesteps = state.scheduler, state.scheduler.timesteps.cpu()
    square = scheduler.alphas_cumprod.double()
    next_square = torch.cat([square[timesteps[1:]], square[:1]])
    return _deterministic(scheduler.config, square[timesteps], next_square)


def _flow_match(state: SamplerState) -> Columns:
    """Euler along the predicted velocity: x' = x + (level' - level) out (Esser et al. 2024, section 2)."""
    level, next_level = _levels(state.scheduler)
    return {"x0_sample": torch.ones_like(level), "x0_output": -level, "output": next_level - level}


# Scheduler class -> its columns, and option -> the values that they cover; all other options affect only the values
# read from the scheduler. Classes are matched by name, so that a subclass with its own `step` is not taken for its
# parent.
RULES: dict[str, tuple[Callable[[SamplerState], Columns], dict[str, tuple[Any, ...]]]] = {
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
    "UniPCMultistepScheduler": (
        _uni_pc,
        {
            "solver_order": (1, 2),
            "predict_x0": (True,),
            "solver_p": (None,),
            "prediction_type": ("epsilon", "sample", "v_prediction", "flow_prediction"),
            "thresholding": (False,),
        },
    ),
    "LCMScheduler": (_lcm, {"prediction_type": ("epsilon", "sample", "v_prediction"), "thresholding": (False,)}),
    "TCDScheduler": (_tcd, {"prediction_type": ("epsilon", "sample", "v_prediction")}),
    "FlowMatchEulerDiscreteScheduler": (_flow_match, {"stochastic_sampling": (False,)}),
}
SUPPORTED_SCHEDULERS: tuple[str, ...] = tuple(RULES)


def terms_of(name: str, config: Any) -> tuple[str, ...]:
    """Return the terms of this scheduler, without those that are 0 (or 1 for `sample`) at every step."""
    if name == "FlowMatchEulerDiscreteScheduler":
        return ("output",)
    if name in ("EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler"):
        terms = ("scale", "output") if config.prediction_type == "epsilon" else ("scale", "sample", "output")
        return (*terms, "noise") if name == "EulerAncestralDiscreteScheduler" else terms
    if name == "UniPCMultistepScheduler":
        first = ("x0_sample", "x0_output", "sample", "output", "carried")
        second = ("previous_x0", "keep_previous_x0") if config.solver_order == 2 else ()
        return (*first, "keep_sample", "keep_x0", "keep_carried", *second)
    if name in ("DDIMScheduler", "LCMScheduler"):
        clipped = ("x0_sample", "x0_output", "x0") if config.clip_sample else ()
        return (*clipped, "sample", "output", *(("noise",) if name == "LCMScheduler" else ()))
    if name == "DPMSolverMultistepScheduler" and config.solver_order == 2:
        return ("x0_sample", "x0_output", "sample", "output", "previous_x0")
    return ("sample", "output")
