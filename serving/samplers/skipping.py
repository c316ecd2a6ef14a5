"""Sampler for requests that compute only some steps: one update spans all steps up to the next computed one.

Skipped outputs of the model are forecast from its last two outputs (`training.cache.schedule`). The forecast is linear
in both outputs, and every supported sampler is linear in the model's output. All steps up to the next computed one are
therefore a single linear map of the latents, the two outputs and the tensors that the sampler keeps; its coefficients
are computed once per request, in float64. A computed step costs as much as without a schedule, and there are fewer
steps.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ...data.errors import UsageError
from .batched import BatchedSampler
from .rules import Columns
from .single import SamplerState

_PREVIOUS_OUTPUT = "previous_output"


class SkippingSampler(BatchedSampler):
    """A batched sampler for requests some of which skip steps (`SamplerState.plan`).

    Each tensor that the next step reads is a sum of the present tensors, each times the coefficient `TO<OF`.

    Raises:
        UsageError: as `BatchedSampler`; or the scheduler clips, so that its steps are not linear.
    """

    def __init__(self, scheduler: Any, *, pass_step_kwargs: bool) -> None:
        super().__init__(scheduler, pass_step_kwargs=pass_step_kwargs)
        name = type(scheduler).__name__
        if self.clip is not None:
            raise UsageError(f"--cache schedule: steps of {name} with clip_sample=True are not linear")
        self._stepwise = BatchedSampler(scheduler, pass_step_kwargs=pass_step_kwargs)
        if self.needs_noise and self.history_terms:
            raise UsageError(f"--cache schedule: {name} draws noise and keeps steps before, whose sums are not known")
        self.history_terms = (*self._stepwise.history_terms, _PREVIOUS_OUTPUT)
        self._sources = ("sample", "output", *self.history_terms)
        pairs = [_pair(to, of) for to in ("sample", *self._stepwise.history_terms) for of in self._sources]
        self.terms = (*(term for term in ("scale", "noise") if term in self._stepwise.terms), *pairs)

    def advanced(
        self, of: Columns, x: torch.Tensor, output: torch.Tensor, history: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the latents before the next computed step and the history for it, as `BatchedSampler.advanced`."""
        assert history is not None, "the output before is always kept"
        tensors = dict(zip(self._sources, (x, output, *history.chunk(len(self.history_terms), dim=1)), strict=True))

        def summed(to: str) -> torch.Tensor:
            total = x * of[_pair(to, "sample")]
            for name, tensor in tensors.items():
                if name != "sample":
                    total.addcmul_(tensor, of[_pair(to, name)])
            return total

        return summed("sample"), torch.cat([*map(summed, self._stepwise.history_terms), output], dim=1)

    def columns(self, state: SamplerState) -> Columns:
        """Return the coefficients by term, float64, with a row for every computed step of a request."""
        columns = self._rule(state)
        rows = [self._folded(columns, state.first + gap.step, gap.shares) for gap in state.whole_plan.gaps()]
        return {term: torch.stack([row[term] for row in rows]) for term in self.terms}

    def output_weights(self, state: SamplerState) -> list[float]:
        """Return the weight of each step's output in a request's final latents, if all of its steps are computed."""
        columns, outputs = self._rule(state), torch.eye(state.num_steps, dtype=torch.float64)
        latents = torch.zeros_like(outputs[:1])
        history = outputs.new_zeros(1, len(self._stepwise.history_terms) * len(outputs))
        for step, output in enumerate(outputs, start=state.first):
            latents, history = self._advanced_once(columns, step, latents, output[None], history)
        return latents[0].tolist()

    def _folded(self, columns: Columns, first: int, shares: Sequence[float]) -> Columns:
        """Return the coefficients from one computed step to the next, obtained by advancing unit vectors."""
        latents, output, *held, previous = torch.eye(len(self._sources), dtype=torch.float64).split(1)
        history, noise = torch.cat([*held, latents[:, :0]], dim=1), torch.zeros((), dtype=torch.float64)
        for step, share in enumerate(shares, start=first):
            forecast = output + share * (output - previous)
            latents, history = self._advanced_once(columns, step, latents, forecast, history)
            if self.needs_noise:
                # Noise drawn at once has the total variance of noise drawn at each step.
                noise = noise * columns["sample"][step] ** 2 + columns["noise"][step] ** 2
        row = {"noise": noise.sqrt()} | ({"scale": columns["scale"][first]} if "scale" in columns else {})
        parts = (latents, *history.split(len(self._sources), dim=1))
        for to, values in zip(("sample", *self._stepwise.history_terms), parts, strict=False):
            row |= {_pair(to, of): value for of, value in zip(self._sources, values[0], strict=True)}
        return row

    def _advanced_once(
        self, columns: Columns, step: int, latents: torch.Tensor, output: torch.Tensor, history: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a single step of the scheduler."""
        of = {term: columns[term][step] for term in self._stepwise.terms}
        latents, kept = self._stepwise.advanced(of, latents, output, history if self._stepwise.history_terms else None)
        return latents, history if kept is None else kept


def _pair(to: str, of: str) -> str:
    return f"{to}<{of}"
