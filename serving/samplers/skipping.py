"""Requests that compute some steps of their schedule only: one update takes them over all steps to the next such one.

What the model would say in between is forecast from the last two steps that it took (`training.cache.schedule`), which
is linear in both outputs, as every supported sampler is in its own. So all that happens up to the next computed step is
one linear map of the latents, the two outputs and what the sampler keeps; its coefficients are worked out once for a
request, in float64. A step costs what it costs without a schedule, and there are fewer of them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ...data.errors import UsageError
from ...training.cache.schedule import Floats
from .batched import BatchedSampler, SamplerBatch
from .single import SamplerState

_PREVIOUS_OUTPUT = "previous_output"


class SkippingSampler(BatchedSampler):
    """A batched sampler for requests some of which skip steps (`SamplerState.plan`).

    Each tensor of which the next step reads is a sum of those that there are now, times the coefficient `TO<OF`.

    Raises:
        UsageError: as `BatchedSampler`; or the scheduler clips, so that its steps are not linear.
    """

    def __init__(self, scheduler: Any, *, pass_step_kwargs: bool) -> None:
        super().__init__(scheduler, pass_step_kwargs=pass_step_kwargs)
        name = type(scheduler).__name__
        if self.clip is not None:
            raise UsageError(f"--cache schedule: steps of {name} with clip_sample=True are not linear")
        self.own_terms, self.own_kept = self.terms, self.kept
        if self.needs_noise and self.own_kept:
            raise UsageError(f"--cache schedule: {name} draws noise and keeps steps before, whose sums are not known")
        self.kept = (*self.own_kept, _PREVIOUS_OUTPUT)
        self.sources = ("sample", "output", _PREVIOUS_OUTPUT, *self.own_kept)
        pairs = [_pair(to, of) for to in ("sample", *self.own_kept) for of in self.sources]
        self.terms = (*(term for term in ("scale", "noise") if term in self.own_terms), *pairs)

    def begin(
        self,
        states: Sequence[SamplerState],
        latents: torch.Tensor,
        patch_request: torch.Tensor,
        history: torch.Tensor | None = None,
    ) -> SamplerBatch:
        """See `BatchedSampler.begin`."""
        return _SkippingBatch(self, states, latents, patch_request, history)

    def columns(self, state: SamplerState) -> dict[str, torch.Tensor]:
        """See `BatchedSampler.columns`: a row for every computed step."""
        columns = {name: column.numpy() for name, column in self._rule(state).items()}
        rows = [
            self._folded(columns, state.first + gap.step, gap.shares, columns.get("scale"))
            for gap in state.whole_plan.gaps()
        ]
        return {term: torch.from_numpy(np.array([row[term] for row in rows])) for term in self.terms}

    def output_weights(self, state: SamplerState) -> list[float]:
        """Of the outputs of all steps of a request that computes each, in its final latents."""
        columns = {name: column.numpy() for name, column in self._rule(state).items()}
        num_steps = len(columns["output"]) - state.first
        nothing = np.zeros(num_steps)
        latents, kept = nothing, dict.fromkeys(self.own_kept, nothing)
        for step, output in enumerate(np.eye(num_steps)):
            latents, kept = self._advanced(columns, state.first + step, latents, output, kept)
        return latents.tolist()

    def _folded(
        self, columns: dict[str, Floats], first: int, shares: Sequence[float], scale: Floats | None
    ) -> dict[str, float]:
        """The coefficients of all that happens from a computed step to the next."""
        latents, output, previous, *held = np.eye(len(self.sources))
        kept, noise = dict(zip(self.own_kept, held, strict=True)), 0.0
        for step, share in enumerate(shares, start=first):
            latents, kept = self._advanced(columns, step, latents, output + share * (output - previous), kept)
            if self.needs_noise:
                # What is drawn at each step by itself has this variance when it is drawn at once.
                noise = noise * columns["sample"][step] ** 2 + columns["noise"][step] ** 2
        row = {"noise": noise**0.5, "scale": 1.0 if scale is None else scale[first]}
        for to, values in {"sample": latents, **kept}.items():
            row |= {_pair(to, of): value for of, value in zip(self.sources, values.tolist(), strict=True)}
        return row

    def _advanced(
        self, columns: dict[str, Floats], step: int, latents: Floats, output: Floats, kept: dict[str, Floats]
    ) -> tuple[Floats, dict[str, Floats]]:
        """One step as `SamplerBatch` takes it, on what tensors are made of."""
        of = {name: column[step] for name, column in columns.items()}
        clean = of["x0_sample"] * latents + of["x0_output"] * output
        updated = of.get("sample", 1.0) * latents + of["output"] * output
        carried = of.get("keep_sample", 0.0) * latents + of.get("keep_x0", 0.0) * clean
        for name, each in kept.items():
            updated = updated + of[name] * each
            carried = carried + of.get(f"keep_{name}", 0.0) * each
        left = {"previous_x0": clean, "carried": carried}
        return updated, {name: left[name] for name in kept}


class _SkippingBatch(SamplerBatch):
    """The batch of a `SkippingSampler`."""

    sampler: SkippingSampler

    def _updated(
        self, x: torch.Tensor, output: torch.Tensor, draw_noise: Callable[[], torch.Tensor] | None
    ) -> torch.Tensor:
        of, sampler = self._current(), self.sampler
        assert self.history is not None
        held = dict(zip(sampler.kept, self.history.chunk(len(sampler.kept), dim=1), strict=True))
        tensors = {"sample": x, "output": output, **held}

        def summed(to: str) -> torch.Tensor:
            total = x * of[_pair(to, "sample")]
            for name in sampler.sources[1:]:
                total.addcmul_(tensors[name], of[_pair(to, name)])
            return total

        updated = summed("sample")
        self.history = torch.cat([*map(summed, sampler.own_kept), output], dim=1)
        if "noise" in of:
            assert draw_noise is not None
            updated.addcmul_(draw_noise().float(), of["noise"])
        return updated


def _pair(to: str, of: str) -> str:
    return f"{to}<{of}"
