"""The denoise stage without patches: one forward pass of plain diffusers for each resolution among the requests."""

from collections.abc import Sequence
from typing import Any

import torch

from ...data.resolution import Resolution
from ..core.denoiser import Conditions, denoise
from ..core.prepared import PreparedRequest, describe
from ..core.stepper import Tuning
from ..samplers.single import PerRequestSampler, SamplerState


class PlainStepper:
    """The exact, strong baseline: same-resolution batches of plain diffusers, with any of its schedulers."""

    name = "plain"

    def __init__(self, denoiser: Any, conditions: Conditions, sampler: PerRequestSampler) -> None:
        self._denoiser, self._conditions, self._sampler = denoiser, conditions, sampler

    def tune(self, target: Tuning) -> None:
        """There is nothing to choose."""

    def check(self, state: SamplerState, size: tuple[int, int]) -> None:
        """Every schedule that diffusers makes can be stepped through, at any size."""

    def prepare(self, prepared: PreparedRequest) -> None:
        """Nothing is to be worked out beforehand."""

    @torch.inference_mode()
    def step(self, active: Sequence[PreparedRequest]) -> dict[int, str]:
        """Take one denoising step of every active request: one forward pass per resolution.

        Returns:
            The requests that failed, by id, with the reason. A failing forward pass is repeated in halves, so that
            only the requests which fail alone are named; the others have taken their step.
        """
        failures: dict[int, str] = {}
        finite: dict[int, torch.Tensor] = {}
        for group in group_by_resolution(active).values():
            for prepared, prediction in self._predict_each(group, failures):
                try:
                    prepared.latents = self._sampler.update(prepared.state, prediction, prepared.latents)
                    finite[prepared.request.request_id] = prepared.latents.isfinite().all()
                except Exception as error:  # noqa: BLE001  one failing request must not take down the others
                    failures[prepared.request.request_id] = describe("denoising", error)
        if finite:
            # The only wait for the device in an iteration. It makes measured step times honest, and after it no kernel
            # of this step still reads tensors that other threads allocated or are about to use.
            for request_id, is_finite in zip(finite, torch.stack(list(finite.values())).tolist(), strict=True):
                if not is_finite:
                    failures[request_id] = "denoising: latents are not finite (NaN or infinity)"
        return failures

    def _predict_each(
        self, group: list[PreparedRequest], failures: dict[int, str]
    ) -> list[tuple[PreparedRequest, torch.Tensor]]:
        """Predict for a group of one resolution, together if possible, else in halves."""
        try:
            return list(zip(group, self._predict(group), strict=True))
        except Exception as error:  # noqa: BLE001  as above
            if len(group) == 1:
                failures[group[0].request.request_id] = describe("denoising", error)
                return []
        middle = len(group) // 2
        return [pair for half in (group[:middle], group[middle:]) for pair in self._predict_each(half, failures)]

    def _predict(self, batch: Sequence[PreparedRequest]) -> list[torch.Tensor]:
        """Run the denoising model once for requests of one resolution, each at its own timestep.

        Returns:
            The guided prediction of every request, each (1, channels, height / 8, width / 8).
        """
        states = [prepared.state for prepared in batch]
        rows = [prepared.num_rows for prepared in batch]
        inputs = self._sampler.model_input(states, [prepared.latents for prepared in batch])
        latents = torch.cat([part.expand(count, -1, -1, -1) for part, count in zip(inputs, rows, strict=True)])
        timesteps = self._sampler.timesteps(states)
        timesteps = timesteps.repeat_interleave(torch.tensor(rows, device=timesteps.device), output_size=sum(rows))
        conditioning = {
            key: torch.cat([prepared.conditioning[key] for prepared in batch]) for key in batch[0].conditioning
        }
        predictions = denoise(self._denoiser, latents, timesteps, self._conditions(conditioning)).split(rows)
        return [_guide(prepared, part) for prepared, part in zip(batch, predictions, strict=True)]


def group_by_resolution(active: Sequence[PreparedRequest]) -> dict[Resolution, list[PreparedRequest]]:
    """Group requests by resolution, both in order of first appearance."""
    groups: dict[Resolution, list[PreparedRequest]] = {}
    for prepared in active:
        groups.setdefault(prepared.request.resolution, []).append(prepared)
    return groups


def _guide(prepared: PreparedRequest, rows: torch.Tensor) -> torch.Tensor:
    """Combine the unconditional and conditional rows of one request (classifier-free guidance)."""
    if not prepared.is_guided:
        return rows
    unconditional, conditional = rows.chunk(2)
    return unconditional + prepared.request.guidance_scale * (conditional - unconditional)
