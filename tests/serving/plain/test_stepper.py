"""The plain engine equals plain diffusers alone, with any scheduler, and keeps a batch until a request leaves it."""

from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    HeunDiscreteScheduler,
    UniPCMultistepScheduler,
)

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.core.captured import PassBatch
from patchedserve.serving.models.build import build_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.plain import stepper as plain_stepper
from patchedserve.serving.plain.stepper import PlainStepper
from patchedserve.serving.samplers.single import PerRequestSampler

from ...support.joining import run_joining
from ...support.plain import plain_latents
from ...support.tiny_models import largest_error, tiny_sd3, tiny_sdxl

SMALL, LARGE = Resolution(32, 32), Resolution(64, 32)
REQUESTS = [
    Request(0, "a red apple", SMALL, 4, guidance_scale=4.0, seed=10),
    Request(1, "a car", LARGE, 6, guidance_scale=1.0, seed=11),
    Request(2, "two birds", SMALL, 3, guidance_scale=7.5, seed=12, negative_prompt="blur"),
    Request(3, "a hat", SMALL, 1, guidance_scale=1.0, seed=13),
    Request(4, "a sea", LARGE, 5, guidance_scale=2.0, seed=14),
]
# A schedule that our formulas do not cover: its first step has no signal, so diffusers divides by 0 and clips the
# result to 1.
CLIPPED = {"clip_sample": True, "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}


def served(scheduler: Any = None, *, make: Any = tiny_sdxl, **config: Any) -> ServedModel:
    pipe = make()
    if scheduler is not None:
        pipe.scheduler = scheduler.from_config(pipe.scheduler.config, **config)
    return build_model(pipe, name="tiny", options=EngineOptions("plain"))


@pytest.mark.product(most=4)
@pytest.mark.parametrize(
    ("scheduler", "config", "is_batched"),
    [
        (None, {}, True),
        (DPMSolverMultistepScheduler, {}, True),
        (EulerAncestralDiscreteScheduler, {}, True),
        (DDIMScheduler, {"clip_sample": False}, True),
        (DDIMScheduler, CLIPPED, False),
        (HeunDiscreteScheduler, {}, False),
        (UniPCMultistepScheduler, {}, True),
        (UniPCMultistepScheduler, {"solver_order": 3}, False),
    ],
)
def test_joining_and_leaving_requests_equal_diffusers_alone(
    scheduler: Any, config: dict[str, Any], is_batched: bool
) -> None:
    model = served(scheduler, **config)
    found, failures = run_joining(model, REQUESTS)
    assert failures == {}
    expected = {request.request_id: plain_latents(model.pipe, request) for request in REQUESTS}
    assert largest_error([found[name] for name in expected], list(expected.values())) <= 1e-3
    assert (model.prepare(REQUESTS[0]).state.coefficients is not None) == is_batched


def test_joining_and_leaving_with_transformers_and_bfloat16() -> None:
    model = served(make=tiny_sd3)
    found, _ = run_joining(model, REQUESTS)
    assert (
        largest_error([found[each.request_id] for each in REQUESTS], [plain_latents(model.pipe, r) for r in REQUESTS])
        <= 1e-3
    )
    model = served(make=lambda: tiny_sdxl().to(torch.bfloat16))
    found, _ = run_joining(model, REQUESTS)
    for request in REQUESTS:
        expected = plain_latents(model.pipe, request).float()
        assert float((found[request.request_id] - expected).abs().mean()) <= 0.05 * float(expected.abs().mean())


def test_text_is_concatenated_once_per_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, joined = served(), []
    join = plain_stepper.join_conditioning
    monkeypatch.setattr(plain_stepper, "join_conditioning", lambda group: joined.append(len(group)) or join(group))
    active = [model.prepare(Request(i, f"a {i}", (SMALL, LARGE)[i % 2], 9, seed=i)) for i in range(5)]
    for _ in range(3):
        assert model.stepper.step(active) == {}
    assert joined == [3, 2]
    # One of the larger leaves: the batch of the others stays as it is.
    assert model.stepper.step([each for each in active if each.request.request_id != 3]) == {}
    assert joined == [3, 2, 1]


def test_failing_scheduler_fails_only_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    model = served(HeunDiscreteScheduler)
    update = PerRequestSampler.update

    def failing(sampler: PerRequestSampler, state: Any, *rest: Any) -> torch.Tensor:
        if state.num_steps == 5:  # Heun takes two evaluations for each step but the last: three steps
            raise ZeroDivisionError("no noise left")
        return update(sampler, state, *rest)

    expected, _ = run_joining(model, REQUESTS)
    monkeypatch.setattr(PerRequestSampler, "update", failing)
    found, failures = run_joining(model, REQUESTS)
    assert failures == {2: "denoising: ZeroDivisionError: no noise left"}
    for name in (0, 1, 3, 4):
        assert largest_error([found[name]], [expected[name]]) <= 1e-4


def test_failing_batch_is_retried_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    model = served()
    expected, _ = run_joining(model, REQUESTS)
    assert isinstance(model.stepper, PlainStepper)
    predict = model.stepper.models.predict

    def failing(
        batch: PassBatch, latents: torch.Tensor, timesteps: torch.Tensor, given: Any, adapters: None
    ) -> torch.Tensor:
        if any(torch.equal(row, bad) for row in given["encoder_hidden_states"]):
            raise MemoryError("too much")
        return predict(batch, latents, timesteps, given)

    bad = model.prepare(REQUESTS[2]).conditioning["text"][1]
    monkeypatch.setattr(model.stepper.models, "predict", failing)
    found, failures = run_joining(model, REQUESTS)
    assert failures == {2: "denoising: MemoryError: too much"}
    for name in (0, 1, 3, 4):
        assert largest_error([found[name]], [expected[name]]) <= 1e-4
