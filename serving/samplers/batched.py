"""Batched samplers: every request at its own timestep and step count, all advanced by one vectorised update.

diffusers' schedulers remain the source of the numbers: `BatchedSampler.table` turns the schedule of each request's own
copy into coefficients. One step of every supported scheduler is then

    model input = scale * x
    x0 = x0_sample * x + x0_output * out          (clamped if `clip_sample` is set)
    x' = sample * x + output * out + x0 * x0 + previous_x0 * (x0 of the previous step) + noise * (fresh noise)
                    + carried * (tensor carried over from the previous step)

with one scalar per request and term, where x are the latents and out is the model's prediction. The terms depend only
on the scheduler, never on the step, so requests at different steps share the same few operators. The update equals
`scheduler.step` as pipelines call it (`eta` 0, no `s_churn`), in float32 whatever the model's dtype. `rules` has the
formulas.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from ...data.errors import UsageError
from ..layout.device_tables import all_to_device
from .rules import RULES, Columns, terms_of
from .single import SamplerState, draws_noise


def _refusal(given: str) -> UsageError:
    return UsageError(f"{given} is not batched; batched are {', '.join(RULES)}")


class BatchedSampler:
    """The update rule of one served model's scheduler, which is only read. It holds no state of requests.

    Attributes:
        terms: names of the terms of the update that this scheduler has; the columns of every table.
        clip: `clip_sample_range` of a scheduler that clips x0, else None.
        needs_noise: whether each step adds fresh noise.
        history_terms: the terms whose tensors a step keeps for the next one.

    Raises:
        UsageError: the scheduler's class or one of its options is not covered; use `PerRequestSampler`.
    """

    def __init__(self, scheduler: Any, *, pass_step_kwargs: bool) -> None:
        name, config = type(scheduler).__name__, scheduler.config
        if name not in RULES:
            raise _refusal(f"scheduler {name}")
        self._rule, covered = RULES[name]
        for option, values in covered.items():
            if config[option] not in values:
                raise _refusal(f"{name} with {option}={config[option]!r} (only {' or '.join(map(repr, values))})")
        if draws_noise(scheduler, pass_step_kwargs=pass_step_kwargs) and not pass_step_kwargs:
            raise _refusal(f"{name} in a pipeline that passes it no generator")
        self.terms = terms_of(name, config)
        self.clip: float | None = config.clip_sample_range if "x0" in self.terms else None
        self.needs_noise = "noise" in self.terms
        self.history_terms = tuple(term for term in ("previous_x0", "carried") if term in self.terms)

    def table(self, state: SamplerState) -> torch.Tensor:
        """Return the coefficients of all steps of one request, float32 (num_steps, len(terms)) on the CPU.

        They are computed in float64, once per request, and kept in its state. The first call reads the schedule from
        the device, so the prepare stage makes it. Raises UsageError if a coefficient is not finite, for example if
        epsilon is predicted from noise without signal; plain diffusers would continue with NaN.
        """
        if state.coefficients is None:
            columns = self.columns(state)
            table = torch.stack([columns[term] for term in self.terms], dim=1).float()
            if not bool(table.isfinite().all()):
                given = f"{type(state.scheduler).__name__} with {state.num_steps} steps"
                raise UsageError(
                    f"{given} has no finite update; change the steps, timestep_spacing or prediction_type, or use "
                    "--engine plain"
                )
            state.coefficients, state.num_history = table, len(self.history_terms)
        return state.coefficients

    def columns(self, state: SamplerState) -> Columns:
        """Return the coefficients of a request's steps by term, float64 (num_steps,)."""
        return {term: column[state.first :] for term, column in self._rule(state).items()}

    def advanced(
        self, of: Columns, x: torch.Tensor, output: torch.Tensor, history: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the latents after a step, without its noise, and the history for the next step.

        Args:
            of: coefficients by term, each (P, 1, 1, 1).
            x, output: (P, channels, s, s) float32, the latents and the model's output for them.
            history: (P, k * channels, s, s), tensors kept by the previous step; None if the sampler keeps nothing.
        """
        updated = torch.addcmul(x * of["sample"] if "sample" in of else x, output, of["output"])
        if "x0_sample" not in of:
            return updated, history
        x0 = (x * of["x0_sample"]).addcmul_(output, of["x0_output"])
        if self.clip is not None:
            updated.addcmul_(x0.clamp_(-self.clip, self.clip), of["x0"])
        if history is None:
            return updated, None
        before = dict(zip(self.history_terms, history.chunk(len(self.history_terms), dim=1), strict=True))
        for term, tensor in before.items():
            updated.addcmul_(tensor, of[term])
        if "carried" not in before:
            return updated, x0
        carried = (x * of["keep_sample"]).addcmul_(x0, of["keep_x0"])
        for term, tensor in before.items():
            carried.addcmul_(tensor, of[f"keep_{term}"])
        return updated, torch.cat([x0, carried], dim=1) if "previous_x0" in before else carried

    def x0_factors(self, state: SamplerState) -> tuple[float, float]:
        """Return the factors of x and out in the x0 of a request's last step; it must have taken at least one."""
        columns, last = self._rule(state), state.place(state.steps_done - 1)
        sample, output = (float(columns[name][last]) for name in ("x0_sample", "x0_output"))
        return sample, output


class SamplerBatch:
    """The sampler's side of a packed batch: the latents of all requests in patches, advanced together.

    It is rebuilt whenever a request joins or leaves; in between, nothing else may change the states' `steps_done`.
    Tensors that it receives or returns are never written to.

    Args:
        sampler: the model's update rule.
        states: states of the n requests.
        latents: (P, channels, s, s) float32, the patches of all requests, in any memory format, which is preserved.
        patch_request: (P,) int64, the index in `states` of the request that each patch belongs to.
        history: (P, k * channels, s, s) float32, the history of the previous batch; rows of requests at their first
            step may hold any values. None if all are at their first step, or if the sampler keeps nothing.

    Attributes:
        sampler: the sampler.
        latents: latents after the last step.
        history: tensors of earlier steps for the next one; None if the sampler keeps nothing.
        last: the latents before the last step and the prediction in it; None before the first step.
        needs_noise: whether each step adds fresh noise.

    Raises:
        ValueError: the sampler keeps a history, and it is missing.
    """

    def __init__(
        self,
        sampler: BatchedSampler,
        states: Sequence[SamplerState],
        latents: torch.Tensor,
        patch_request: torch.Tensor,
        history: torch.Tensor | None = None,
    ) -> None:
        assert latents.dtype == torch.float32
        self.needs_noise = sampler.needs_noise
        self.sampler, self._states, self.latents = sampler, tuple(states), latents
        ends = accumulate(state.num_steps for state in states)
        rows = [end - state.num_steps + state.steps_done for end, state in zip(ends, states, strict=True)]
        is_first = [state.steps_done == 0 for state in states]
        # The steps of all requests, one after another, one row each.
        table = torch.cat([sampler.table(state) for state in states])
        self._table, request_rows, starts = all_to_device(
            [table, torch.tensor(rows), torch.tensor(is_first)], latents.device
        )
        self.history = None
        if sampler.history_terms:
            if history is None and not all(is_first):
                raise ValueError("history is None, but a request past its first step needs it")
            nothing = latents.repeat(1, len(sampler.history_terms), 1, 1) if history is None else history
            # The coefficient of these rows is 0, but 0 times NaN is NaN.
            self.history = nothing.masked_fill(starts[patch_request, None, None, None], 0.0)
        self._timesteps = torch.cat([state.timesteps for state in states]).to(latents.device)
        # Requests and patches share one tensor, so that one addition moves both to their next row.
        self._rows = torch.cat([request_rows, request_rows[patch_request]])
        self._request_rows, self._patch_rows = self._rows.split([len(states), len(patch_request)])
        self._coefficients: Columns | None = None
        self.last: tuple[torch.Tensor, torch.Tensor] | None = None

    def timesteps(self) -> torch.Tensor:
        """Return the current timestep of every request, (n,), in the dtype of the scheduler's timesteps."""
        self._check_unfinished()
        return self._timesteps.index_select(0, self._request_rows)

    def model_input(self) -> torch.Tensor:
        """Return the model's input, (P, channels, s, s) float32; the latents themselves if nothing scales them."""
        return self.latents * self._current()["scale"] if "scale" in self.sampler.terms else self.latents

    def step(self, prediction: torch.Tensor, draw_noise: Callable[[], torch.Tensor] | None = None) -> None:
        """Advance every request by one step.

        Args:
            prediction: (P, channels, s, s), the model's guided output, in any dtype.
            draw_noise: returns standard normal noise shaped like the latents; called once, only if `needs_noise`.

        Raises:
            RuntimeError: a request is finished (also raised by `timesteps`); the batch is then unchanged.
        """
        x, output = self.latents, prediction.float()
        updated, self.history = self.sampler.advanced(self._current(), x, output, self.history)
        if self.needs_noise:
            assert draw_noise is not None
            updated.addcmul_(draw_noise().float(), self._current()["noise"])
        self.latents, self.last = updated, (x, output)
        self._rows += 1
        self._coefficients = None
        for state in self._states:
            state.steps_done += 1

    def _current(self) -> Columns:
        """Return this step's coefficients by term, each (P, 1, 1, 1)."""
        self._check_unfinished()
        if self._coefficients is None:
            columns = self._table.index_select(0, self._patch_rows)[:, :, None, None, None].unbind(1)
            self._coefficients = dict(zip(self.sampler.terms, columns, strict=True))
        return self._coefficients

    def _check_unfinished(self) -> None:
        if any(state.is_finished for state in self._states):
            raise RuntimeError("a request of this batch has finished its last step and must leave it")
