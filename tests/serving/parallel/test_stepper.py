"""The denoise stage on several ranks equals plain diffusers alone, with any scheduler."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DPMSolverMultistepScheduler, EulerAncestralDiscreteScheduler, HeunDiscreteScheduler

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.models.build import build_model
from patchedserve.serving.models.decoder import ImageDecoder
from patchedserve.serving.models.defaults import ModelDefaults
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.parallel.group import GroupError, Message
from patchedserve.serving.parallel.options import ParallelOptions
from patchedserve.serving.parallel.plan import CallTimes, CallTimeTable
from patchedserve.serving.parallel.stepper import ParallelStepper

from ...support.family_kit import BUILDS, STEPS, denoised, mixed, relative_error
from ...support.joining import run_joining
from ...support.plain import plain_latents, short_texts
from ...support.tiny_models import largest_error, tiny_sd3, tiny_sdxl

LOW, HIGH = Resolution(32, 64), Resolution(64, 96)
REQUESTS = [
    Request(0, "a red apple", LOW, 4, guidance_scale=4.0, seed=10),
    Request(1, "a car", HIGH, 5, guidance_scale=1.0, seed=11),
    Request(2, "two birds", LOW, 3, guidance_scale=7.5, seed=12, negative_prompt="blur"),
    Request(3, "a sea", HIGH, 5, guidance_scale=2.0, seed=14),
]


def served(make: Any, count: int, scheduler: Any = None, **options: Any) -> ServedModel:
    pipe = make()
    if scheduler is not None:
        pipe.scheduler = scheduler.from_config(pipe.scheduler.config)
    parallel = ParallelOptions(f"virtual:{count}", **options)
    return build_model(pipe, name="tiny", options=EngineOptions("parallel", parallel=parallel))


def run(model: ServedModel) -> list[torch.Tensor]:
    """Return the final latents of the requests, in order."""
    latents, failures = run_joining(model, REQUESTS)
    model.close()
    assert not failures
    return [latents[request.request_id] for request in REQUESTS]


@pytest.mark.product(most=2)
@pytest.mark.parametrize(
    ("make", "scheduler"),
    [
        (tiny_sdxl, None),
        (tiny_sdxl, DDIMScheduler),
        (tiny_sdxl, DPMSolverMultistepScheduler),
        (tiny_sdxl, EulerAncestralDiscreteScheduler),
        (tiny_sdxl, HeunDiscreteScheduler),
        (tiny_sd3, None),
    ],
)
@pytest.mark.parametrize("cfg_split", ["off", "on"])
def test_joining_and_leaving_requests_equal_diffusers_alone(make: Any, scheduler: Any, cfg_split: str) -> None:
    model = served(make, 2, scheduler, cfg_split=cfg_split)
    expected = [plain_latents(model.pipe, request) for request in REQUESTS]
    assert largest_error(run(model), expected) <= 1e-3


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in ("flux", "lumina2") else pytest.mark.exhaustive)
        for name in BUILDS
        if name not in ("sd", "sdxl", "sd3")
    ],
)
def test_ranks_draw_the_images_of_all_families(family: str) -> None:
    """Requests that join and leave equal their pipelines, in strips and drawn whole, at any length of text."""
    pipe, requests = BUILDS[family](), mixed([4, 2, 3, 2])
    texts = short_texts(pipe)
    expected = [plain_latents(pipe, request, **texts) for request in requests]
    for given in ({"cfg_split": "off"}, {"text": "split"}, {"from_pixels": "2000"}):
        options = ParallelOptions("virtual:2", may_use_fewer=True, **given)  # type: ignore[arg-type]
        model = build_model(
            pipe, name="tiny", options=EngineOptions("parallel", parallel=options), defaults=ModelDefaults(**texts)
        )
        assert relative_error(denoised(model, requests, joins=[0, 1, 2, 2]), expected) <= STEPS, given
        model.close()


def test_displaced_requests_are_close_and_exact_during_warm_up() -> None:
    expected = run(served(tiny_sdxl, 2, cfg_split="off"))
    assert all(map(torch.equal, run(served(tiny_sdxl, 2, cfg_split="off", mode="displaced", warmup=9)), expected))
    error = largest_error(run(served(tiny_sdxl, 2, cfg_split="off", mode="displaced", warmup=1)), expected)
    assert 0 < error < 0.5 * float(torch.cat([each.flatten() for each in expected]).abs().max())


@pytest.mark.product(most=1)
@pytest.mark.parametrize("from_pixels", ["100000", str(LOW.pixels + 1)])
@pytest.mark.parametrize(
    ("make", "scheduler"),
    [(tiny_sdxl, None), (tiny_sdxl, DPMSolverMultistepScheduler), (tiny_sdxl, HeunDiscreteScheduler), (tiny_sd3, None)],
)
def test_images_drawn_whole_by_ranks_equal_diffusers(make: Any, scheduler: Any, from_pixels: str) -> None:
    """This holds if all images are whole or only the small ones, also for schedulers that each request calls itself."""
    model = served(make, 3, scheduler, from_pixels=from_pixels, cfg_split="off", may_use_fewer=True)
    expected = [plain_latents(model.pipe, request) for request in REQUESTS]
    assert largest_error(run(model), expected) <= 1e-3


@pytest.mark.exhaustive
@pytest.mark.slow
def test_steps_are_divided_by_measured_times(tmp_path: Path) -> None:
    model = served(tiny_sdxl, 2, from_pixels="auto", cfg_split="off")
    expected = [plain_latents(model.pipe, request) for request in REQUESTS]
    model.tune([LOW, HIGH], tmp_path)
    stepper = model.stepper
    assert isinstance(stepper, ParallelStepper)
    assert set(stepper.facts()["gains"]) == {"32x64", "64x96"}
    assert stepper.facts()["mode"] == "sync"
    assert list(tmp_path.glob("strips-*.json"))
    drawn: list[tuple[int, int]] = []
    groups_of = stepper.groups_of

    def watched(active: Any) -> Any:
        groups = groups_of(active)
        drawn.append((len(stepper._whole), len(active)))
        return groups

    stepper.groups_of = watched  # type: ignore[method-assign]
    # Strips of large images pay if there is nothing else to do.
    stepper._times = CallTimeTable([CallTimes(8, 4, 1, 10.0, 20.0), CallTimes(12, 8, 1, 100.0, 55.0)])
    assert largest_error(run(model), expected) <= 1e-3
    assert {0 < whole < all_of_them for whole, all_of_them in drawn} == {True, False}


def test_image_with_too_few_rows_is_refused() -> None:
    model = served(tiny_sdxl, 3)
    with pytest.raises(UsageError, match="at most 2 can share them"):
        model.check_request(REQUESTS[0])
    model.check_request(REQUESTS[1])


def test_failure_while_releasing_state_ends_no_step() -> None:
    model = served(tiny_sdxl, 2)
    expected = plain_latents(model.pipe, REQUESTS[0])
    first, other = model.prepare(REQUESTS[0]), model.prepare(REQUESTS[2])
    assert model.stepper.step([first, other]) == {}
    assert isinstance(model.stepper, ParallelStepper)
    with model.stepper.group.end:
        # The other rank gives up before it is notified that a request has left.
        model.stepper.group.ranks._broadcast(Message("nonsense"))
        with pytest.raises(GroupError, match="does not know"):
            model.stepper.group.ranks._end.receive(1)
    while not first.state.is_finished:
        assert model.stepper.step([first]) == {}
    assert largest_error([first.latents[0]], [expected]) <= 1e-3
    model.close()


def test_synchronous_ranks_wait_for_each_other() -> None:
    model = served(tiny_sdxl, 2)
    model.tune([LOW, HIGH], Path("nowhere"))
    assert isinstance(model.stepper, ParallelStepper)
    assert model.stepper.facts()["mode"] == "sync"
    assert model.stepper.facts()["reason"] == "virtual ranks run one at a time"
    model.close()


@pytest.mark.parametrize("make", [tiny_sdxl, tiny_sd3])
def test_images_are_decoded_by_all_ranks(make: Any) -> None:
    model = served(make, 3, decode="strips")
    latents = [plain_latents(model.pipe, request) for request in REQUESTS[:2]]
    for each in latents:
        own = np.asarray(model.decode(each[None]), dtype=int)
        model.decoder, before = ImageDecoder(model.pipe.vae), model.decoder
        whole = np.asarray(model.decode(each[None]), dtype=int)
        model.decoder = before
        # One level of 255: a call of the decoder differs by 1e-5, which may change the rounding.
        assert np.abs(own - whole).max() <= 1
    model.close()
