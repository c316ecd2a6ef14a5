"""Requests that join a stepper one after the other."""

from collections.abc import Sequence

import torch

from patchedserve.data.requests import Request
from patchedserve.serving.models.served import ServedModel


def run_joining(model: ServedModel, requests: Sequence[Request]) -> tuple[dict[int, torch.Tensor], dict[int, str]]:
    """Run requests, of which the i-th joins before step i; returns their final latents and the failures."""
    coming, active = list(requests), []
    latents: dict[int, torch.Tensor] = {}
    failures: dict[int, str] = {}
    while coming or active:
        if coming:
            active.append(model.prepare(coming.pop(0)))
        failures |= model.stepper.step(active)
        for prepared in [each for each in active if each.state.is_finished or each.request.request_id in failures]:
            active.remove(prepared)
            latents[prepared.request.request_id] = prepared.latents[0]
    return latents, failures
