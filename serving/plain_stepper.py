"""The denoise stage without patches: one forward pass of plain diffusers for each resolution among the requests."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .prepared import PreparedRequest, describe
from .samplers import SamplerState

if TYPE_CHECKING:
    from ..data.resolution import Resolution
    from .model import ServedModel


class PlainStepper:
    """The exact, strong baseline: same-resolution batches of plain diffusers, with any of its schedulers."""

    name = "plain"

    def __init__(self, model: "ServedModel") -> None:
        self._model = model

    def tune(self, sizes: Sequence[tuple[int, int]], folder: Path, *, fingerprint: str) -> None:
        """There is nothing to choose."""

    def check(self, state: SamplerState, size: tuple[int, int]) -> None:
        """Every schedule that diffusers makes can be stepped through, at any size."""

    def prepare(self, prepared: PreparedRequest) -> None:
        """Nothing is to be worked out beforehand."""

    def step(self, active: Sequence[PreparedRequest]) -> dict[int, str]:
        """See `denoise_step`."""
        return denoise_step(self._model, active)


def group_by_resolution(active: Sequence[PreparedRequest]) -> "dict[Resolution, list[PreparedRequest]]":
    """Group requests by resolution, both in order of first appearance."""
    groups: dict[Resolution, list[PreparedRequest]] = {}
    for prepared in active:
        groups.setdefault(prepared.request.resolution, []).append(prepared)
    return groups


def denoise_step(model: "ServedModel", active: Sequence[PreparedRequest]) -> dict[int, str]:
    """Take one denoising step of every active request: one forward pass per resolution.

    Returns:
        The requests that failed, by id, with the reason. A failing forward pass is repeated one by one, so that only
        the requests which fail alone are named; the others have taken their step.
    """
    failures: dict[int, str] = {}
    finite: dict[int, torch.Tensor] = {}
    for group in group_by_resolution(active).values():
        for prepared, prediction in _predict_each(model, group, failures):
            try:
                model.advance(prepared, prediction)
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
    model: "ServedModel", group: list[PreparedRequest], failures: dict[int, str]
) -> list[tuple[PreparedRequest, torch.Tensor]]:
    """Predict for a group of one resolution, together if possible, else one by one."""
    try:
        return list(zip(group, model.predict(group), strict=True))
    except Exception as error:  # noqa: BLE001  as above
        if len(group) == 1:
            failures[group[0].request.request_id] = describe("denoising", error)
            return []
    return [pair for prepared in group for pair in _predict_each(model, [prepared], failures)]
