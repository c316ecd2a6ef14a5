"""The promise: whatever else is in its batch, a request's output equals that of plain diffusers for it alone."""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from patchedserve.data.errors import UsageError
from patchedserve.data.models.bundled import bundled_model_path
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.cache.options import CacheOptions
from patchedserve.serving.engine.collectors import InMemory
from patchedserve.serving.engine.engine import Engine
from patchedserve.serving.engine.run_result import RunResult
from patchedserve.serving.models.build import build_model
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.scheduling.policies import get_policy

from ...support.patched_models import relative_error
from ...support.plain import plain_image, plain_latents
from ...support.tiny_models import OWN_SCHEDULERS, SAMPLERS, largest_error, tiny_sd, tiny_sd3, tiny_sdxl

TOLERANCE = 1e-3
SMALL, MEDIUM, LARGE, WIDE = Resolution(32, 32), Resolution(48, 48), Resolution(64, 64), Resolution(96, 32)


def mixed_requests() -> list[Request]:
    """Return requests that differ in size, steps, guidance and negative prompt."""
    return [
        Request(0, "a red apple", SMALL, 4, guidance_scale=4.0, seed=10),
        Request(1, "a car", LARGE, 6, guidance_scale=1.0, seed=11),
        Request(2, "two birds", SMALL, 3, guidance_scale=7.5, seed=12, negative_prompt="blur"),
        Request(3, "a hat", MEDIUM, 1, guidance_scale=4.0, seed=13, negative_prompt=""),
        Request(4, "a wide sea", WIDE, 5, guidance_scale=2.0, seed=14),
        Request(5, "", SMALL, 7, guidance_scale=0.0, seed=15),
        Request(6, "a red apple", LARGE, 2, guidance_scale=4.0, seed=10),
    ]


def serve(
    pipe: Any,
    requests: Sequence[Request],
    policy: str = "continuous",
    max_batch_size: int = 16,
    *,
    options: EngineOptions | None = None,
    all_at_once: bool = False,
) -> RunResult:
    """Serve the requests; with `all_at_once`, the first step waits until every request is prepared."""
    engine = Engine(
        build_model(pipe, name="tiny", options=options),
        get_policy(policy),
        max_batch_size=max_batch_size,
        collector=InMemory(keep_images=True, keep_latents=True),
    )
    for request in requests:
        engine.submit(request)
    engine.close()
    engine.start()
    while all_at_once and any(each.prepared is None for each in engine._open.by_id.values()):
        engine._serve_stages()
        time.sleep(0.001)
    result = engine.run()
    assert [record.reason for record in result.records] == [None] * len(requests)
    return result


def assert_equal_to_plain(pipe: Any, requests: Sequence[Request], result: RunResult) -> None:
    expected = [plain_latents(pipe, request) for request in requests]
    found = [result.latents[request.request_id][0] for request in requests]
    assert largest_error(found, expected) <= TOLERANCE
    # No two requests may have the same latents, so that mixed-up seeds or prompts are noticed.
    assert len({round(float(latents.abs().sum()), 3) for latents in expected}) == len(requests)


@pytest.mark.product(most=2)
@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_sdxl_mixed_batch_equals_plain(sampler: str) -> None:
    pipe = tiny_sdxl()
    pipe.scheduler = SAMPLERS[sampler](pipe.scheduler.config)
    requests = mixed_requests()
    assert_equal_to_plain(pipe, requests, serve(pipe, requests))


@pytest.mark.product(most=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "sampler"),
    [*(("patched", name) for name in OWN_SCHEDULERS), *(("plain", name) for name in ("heun", "dpm++-sde"))],
)
def test_a_batch_whose_requests_call_their_own_schedulers_equals_plain(sampler: str, engine: Any) -> None:
    pipe = tiny_sd()
    pipe.scheduler = OWN_SCHEDULERS[sampler](pipe.scheduler.config)
    requests = [replace(LONG[0], num_inference_steps=6), *LONG[1:]]
    result = serve(pipe, requests, options=EngineOptions(engine), all_at_once=True)
    assert_equal_to_plain(pipe, requests, result)
    if engine == "patched":
        # Requests share the model's passes, whatever their samplers are.
        assert max(len(step.resolutions) for step in result.steps) == 3


def test_bfloat16_noise_of_unbatched_schedulers_equals_plain_diffusers() -> None:
    # Noise drawn in bfloat16 differs from noise drawn in float32, and so does the image.
    pipe = tiny_sd().to(torch.bfloat16)
    pipe.scheduler = OWN_SCHEDULERS["kdpm2-ancestral"](pipe.scheduler.config)
    result = serve(pipe, mixed_requests()[:3])
    for request in mixed_requests()[:3]:
        expected = plain_latents(pipe, request).float()
        found = result.latents[request.request_id]
        assert float((found[0].float() - expected).abs().mean()) <= 0.05 * float(expected.abs().mean())


def test_unseeded_noise_is_refused() -> None:
    pipe = tiny_sd3(stochastic_sampling=True)
    for engine in ("patched", "plain"):
        with pytest.raises(UsageError, match=r"FlowMatchEulerDiscreteScheduler draws noise .* passes it no generator"):
            build_model(pipe, name="tiny", options=EngineOptions(engine))


def test_sd_mixed_batch_equals_plain() -> None:
    pipe = tiny_sd()
    requests = mixed_requests()
    assert_equal_to_plain(pipe, requests, serve(pipe, requests))


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheduler", [{}, {"use_dynamic_shifting": True, "base_image_seq_len": 4, "max_image_seq_len": 64}]
)
def test_sd3_mixed_batch_equals_plain(scheduler: dict[str, Any]) -> None:
    pipe = tiny_sd3(**scheduler)
    requests = mixed_requests()
    assert_equal_to_plain(pipe, requests, serve(pipe, requests))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fcfs", "static", "continuous"])
def test_requests_that_join_and_leave_mid_flight(policy: str) -> None:
    # The first request takes so many steps that, with 2 places, all the others come and go beside it one by one, even
    # on a machine where they arrive late.
    pipe = tiny_sdxl()
    long = Request(7, "a long way", MEDIUM, 500 if policy == "continuous" else 50, seed=16, arrival_s=0.0)
    requests = [replace(long, request_id=0), *(replace(r, request_id=r.request_id + 1) for r in mixed_requests())]
    # With inline stages, all would be prepared before the first step.
    result = serve(pipe, requests, policy, max_batch_size=2, options=EngineOptions(stages="threads"))
    assert_equal_to_plain(pipe, requests, result)
    first, *others = result.records
    start_s, end_s = first.admitted_s, first.denoise_end_s
    assert start_s is not None
    assert end_s is not None
    num_beside = sum(start_s <= (other.admitted_s or 0) < end_s for other in others)
    num_joined = sum(start_s < (other.admitted_s or 0) < end_s for other in others)
    assert num_beside == (len(others) if policy == "continuous" else 0)
    # One may have been prepared before the first step, too.
    assert num_beside - num_joined <= 1
    assert max(step.active for step in result.steps) == (2 if policy == "continuous" else 1)


@pytest.mark.product(most=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "cache",
    [
        CacheOptions("patch", threshold=1e9, warmup_steps=1),
        CacheOptions("interval", interval=2, warmup_steps=1),
        CacheOptions("accumulated", threshold=1e9, warmup_steps=1),
    ],
    ids=lambda cache: cache.mode,
)
def test_request_without_cache_is_exact_beside_reusing_ones(cache: CacheOptions) -> None:
    pipe = tiny_sdxl()
    wanted = [request for request in mixed_requests() if request.num_inference_steps > 3 and request.guidance_scale]
    requests = [replace(request, cache=number % 2 == 0) for number, request in enumerate([*wanted, *wanted])]
    requests = [replace(request, request_id=number) for number, request in enumerate(requests)]
    result = serve(pipe, requests, options=EngineOptions(cache=cache, stages="inline"), all_at_once=True)
    reused = {record.request_id: record.steps_reused for record in result.records}
    for request in requests:
        error = largest_error([result.latents[request.request_id][0]], [plain_latents(pipe, request)])
        assert (error <= TOLERANCE) == (reused[request.request_id] == 0) == (not request.cache)
        assert 0 <= (reused[request.request_id] or 0) <= request.num_inference_steps - 2
    serving_alone = serve(pipe, [replace(requests[0], request_id=0)])
    assert serving_alone.records[0].steps_reused == 0


LONG = [
    Request(0, "a red apple", SMALL, 20, guidance_scale=4.0, seed=20),
    Request(1, "a car", LARGE, 20, guidance_scale=1.0, seed=21),
    Request(2, "two birds", SMALL, 20, guidance_scale=7.5, seed=22, negative_prompt="blur"),
    Request(3, "a wide sea", WIDE, 20, guidance_scale=2.0, seed=23),
]


@functools.cache
def plain_long(build: Callable[[], Any]) -> list[torch.Tensor]:
    pipe = build()
    return [plain_latents(pipe, request) for request in LONG]


@pytest.mark.product(most=2)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["stitch", "regroup"])
@pytest.mark.parametrize(("order", "patch_size"), [("image", None), ("patch", 4)])
@pytest.mark.parametrize("build", [tiny_sdxl, tiny_sd3])
def test_20_steps_of_a_mixed_batch_equal_plain(
    build: Callable[[], Any], order: Any, patch_size: int | None, strategy: Any
) -> None:
    """This is the figure in the README."""
    options = EngineOptions(order=order, patch_size=patch_size, strategy=strategy)
    result = serve(build(), LONG, options=options, all_at_once=True)
    assert [step.resolutions for step in result.steps] == [{"32x32": 2, "64x64": 1, "96x32": 1}] * 20
    assert relative_error([result.latents[request.request_id][0] for request in LONG], plain_long(build)) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("build", [tiny_sd, tiny_sdxl, tiny_sd3])
def test_images_equal_plain(build: Callable[[], Any]) -> None:
    pipe = build()
    requests = mixed_requests()[:5]
    result = serve(pipe, requests)
    for request in requests:
        expected = np.asarray(plain_image(pipe, request), dtype=int)
        image = result.images[request.request_id]
        assert image.size == (request.resolution.width, request.resolution.height)
        # Rounding to 8 bits may turn a last-bit difference into one grey level.
        assert np.abs(np.asarray(image, dtype=int) - expected).max() <= 1


@pytest.mark.slow
@pytest.mark.parametrize("build", [tiny_sdxl, tiny_sd3])
def test_bfloat16_stays_close_to_plain(build: Callable[[], Any]) -> None:
    pipe = build().to(torch.bfloat16)
    requests = mixed_requests()[:3]
    result = serve(pipe, requests)
    for request in requests:
        expected = plain_latents(pipe, request).float()
        found = result.latents[request.request_id]
        assert float((found[0].float() - expected).abs().mean()) <= 0.05 * float(expected.abs().mean())


def test_one_text_encoder_and_zeroed_negative_prompt() -> None:
    # Like emoji-xl, the model has no first text encoder; None and "" differ as negative prompts.
    from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel

    parts = tiny_sdxl().components
    config = dict(parts["unet"].config) | {"cross_attention_dim": 32}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        parts["unet"] = UNet2DConditionModel.from_config(config)
    parts |= {"text_encoder": None, "tokenizer": None}
    pipe = StableDiffusionXLPipeline(**parts, force_zeros_for_empty_prompt=True, add_watermarker=False)
    requests = [
        Request(0, "a car", SMALL, 4, seed=1, negative_prompt=None),
        Request(1, "a car", SMALL, 4, seed=1, negative_prompt=""),
    ]
    result = serve(pipe, requests)
    assert_equal_to_plain(pipe, requests, result)


def test_embedded_guidance_scale() -> None:
    # Distilled models take the guidance scale as an input and have no unconditional row.
    from diffusers import UNet2DConditionModel

    pipe = tiny_sdxl()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        pipe.unet = UNet2DConditionModel.from_config(dict(pipe.unet.config) | {"time_cond_proj_dim": 16})
    requests = [Request(i, "a car", SMALL, 3, guidance_scale=scale, seed=i) for i, scale in enumerate((1.0, 6.0))]
    assert_equal_to_plain(pipe, requests, serve(pipe, requests))


def test_model_scheduler_is_not_modified() -> None:
    pipe = tiny_sdxl()
    before = pipe.scheduler.timesteps.clone()
    serve(pipe, mixed_requests()[:2])
    assert torch.equal(pipe.scheduler.timesteps, before)


@pytest.mark.product(most=1)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "sampler"), [("emoji-xl", "euler"), ("emoji-xl", "ddim"), ("emoji-3", None)])
def test_bundled_models_equal_plain_diffusers(name: str, sampler: str | None) -> None:
    """This is the promise of the README, on trained weights that each project loads itself."""
    plain = DiffusionPipeline.from_pretrained(bundled_model_path(name))
    ours = load_model(name, "cpu", "float32").pipe
    if sampler is not None:
        plain.scheduler, ours.scheduler = (SAMPLERS[sampler](pipe.scheduler.config) for pipe in (plain, ours))
    requests = [
        Request(0, "a red apple on a blue background", Resolution(128, 128), 20, guidance_scale=4.0, seed=1),
        Request(1, "a hedgehog and a candle on a yellow background", Resolution(256, 128), 12, seed=2),
        Request(2, "a butterfly on a pink background", Resolution(192, 192), 8, guidance_scale=1.0, seed=3),
        Request(3, "a red apple on a blue background", Resolution(128, 128), 5, seed=1, negative_prompt="a fox"),
    ]
    assert_equal_to_plain(plain, requests, serve(ours, requests))
