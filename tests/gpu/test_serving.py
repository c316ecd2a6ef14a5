"""Tests of races in the whole engine on a device, which encodes texts and decodes images on streams of their own.

If one stream reads data before another has written it, single requests are occasionally wrong. So there are many
requests that overlap as much as possible, and each is compared with the same request alone.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL.Image import Image

from patchedserve.data.requests import Request
from patchedserve.data.traces.traces import TraceConfig, generate_trace
from patchedserve.eval.metrics.psnr import psnr
from patchedserve.serving.engine.engine import Engine
from patchedserve.serving.engine.watch import Watch
from patchedserve.serving.models.build import with_engine
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions, ModelOptions
from patchedserve.serving.scheduling.policies import get_policy

from ..support.family_kit import BUILDS, STEPS, denoised
from ..support.family_kit import mixed as tiny_requests
from ..support.patched_models import relative_error
from ..support.tiny_models import save_tiny
from .cases import BUNDLED, EXACT, alone, error_of, mixed, served, served_together

SAME_DB = 55.0
"""The last bit of float32 may change a pixel by one grey level."""


def poisson(count: int, seed: int) -> list[Request]:
    """Return a trace with numbers of steps and scales by which requests join and leave at nearly every step."""
    config = TraceConfig(request_rate=100.0, num_prompts=count, seed=seed)
    trace = generate_trace(config, ["a red apple", "two birds in the rain at night", "", "a hat"])
    return [
        replace(each, num_inference_steps=1 + each.request_id % 5, guidance_scale=1.0 + each.request_id % 3)
        for each in trace
    ]


@pytest.mark.parametrize("options", [EngineOptions(), EngineOptions("plain"), EngineOptions(prompt_cache_mb=8)])
@pytest.mark.parametrize("name", BUNDLED)
def test_requests_of_a_trace_equal_those_alone(name: str, options: EngineOptions, device: str) -> None:
    model = served(name, device, options)
    for repeat in range(1 if device == "cpu" else 3):
        requests = poisson(8 if device == "cpu" else 30, seed=repeat)
        expected = alone(model, requests)
        result = served_together(model, requests)
        assert error_of(result, requests, expected) <= EXACT
        for request, latents in zip(requests, expected, strict=True):
            assert psnr(result.images[request.request_id], model.decode(latents[None])) >= SAME_DB


@pytest.mark.parametrize("engine", ["patched", "plain"])
def test_partial_images_show_the_latents_of_their_step(engine: Any, device: str) -> None:
    """Partial images are decoded during the next step, from the final latents that a step predicts."""
    model = served("emoji-xl", device, EngineOptions(engine))
    requests = [replace(each, request_id=number) for number, each in enumerate(mixed((6, 6, 6, 6)) * 3)]
    apart = {}
    for request in requests:
        apart |= _partial_images(model, [request])
    together = _partial_images(model, requests)
    assert apart.keys() == together.keys() == {(each.request_id, index) for each in requests for index in range(3)}
    for key, image in apart.items():
        assert psnr(together[key], image) >= SAME_DB


def _partial_images(model: ServedModel, requests: Sequence[Request]) -> dict[tuple[int, int], Image]:
    """Return the partial images of requests that are served together, by request id and number."""
    found: dict[tuple[int, int], Image] = {}
    engine = Engine(model, get_policy("continuous"), max_batch_size=4)
    for request in requests:

        def keep(index: int, image: Image, own: int = request.request_id) -> None:
            found[own, index] = image

        engine.submit(request, watch=Watch(num_partials=3, on_partial=keep))
    engine.close()
    engine.run()
    return found


@pytest.mark.slow
def test_stage_processes_equal_stage_threads(device: str) -> None:
    requests = mixed()
    with closing(load_model("emoji-xl", device, "float32", EngineOptions(stages="processes"))) as model:
        assert model.stages is not None
        found = served_together(model, requests)
        expected = served_together(with_engine(model, EngineOptions()), requests)
    for number, image in expected.images.items():
        apart = np.abs(np.asarray(image, int) - np.asarray(found.images[number], int))
        assert apart.max() <= 1


@pytest.mark.parametrize("stages", ["inline", "threads"])
def test_stages_inline_and_text_offload(stages: Any, device: str) -> None:
    requests = mixed()
    model = load_model("emoji-xl", device, "float32", EngineOptions(stages=stages, offload="text"))
    assert error_of(served_together(model, requests), requests, alone(served("emoji-xl", device), requests)) <= EXACT


@pytest.mark.parametrize("name", ["sdxl", "sd3", "flux"])
def test_a_batch_mixes_adapters(name: str, device: str, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the extra lora is not installed")
    from ..support.loras import save_lora

    pipe = BUILDS[name]()
    part = "unet" if hasattr(pipe, "unet") else "transformer"
    path = save_lora(tmp_path / "toy.safetensors", pipe, part)
    folder = save_tiny(tmp_path / "model", pipe)
    named = ModelOptions(adapter=[f"toy={path}"])
    each = ((("toy", 1.0),), (), (("toy", -0.7),), ())
    requests = [replace(one, adapters=own) for one, own in zip(tiny_requests([6, 2, 3, 4]), each, strict=True)]
    expected = denoised(load_model(str(folder), "cpu", "float32", EngineOptions("plain", model=named)), requests)
    for options in (EngineOptions(model=named), EngineOptions(order="image", model=named)):
        found = denoised(load_model(str(folder), device, "float32", options), requests)
        assert relative_error([each.cpu() for each in found], expected) <= STEPS


@pytest.mark.slow
def test_int8_weights_stay_close(device: str) -> None:
    pytest.importorskip("torchao", reason="the extra quantize is not installed")
    requests = mixed()
    model = load_model("emoji-3", device, "float32", EngineOptions(model=ModelOptions(quantize="int8")))
    expected = alone(served("emoji-3", device), requests)
    assert 0 < relative_error(denoised(model, requests), expected) < 0.2
    assert torch.device(device).type == model.device.type


@pytest.mark.parametrize("name", BUNDLED)
def test_products_of_eight_bits_equal_the_emulation(name: str, device: str) -> None:
    if device != "cpu" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("this GPU does not multiply in 8 bits")
    requests, named = mixed(), ModelOptions(quantize="fp8")
    exact = alone(served(name, device), requests)
    emulated = denoised(load_model(name, "cpu", "float32", EngineOptions(model=named)), requests)
    error = relative_error([each.cpu() for each in exact], emulated)
    for options in (EngineOptions(model=named), EngineOptions("plain", model=named)):
        found = [each.cpu() for each in denoised(load_model(name, device, "float32", options), requests)]
        # Fast accumulation, and different roundings of inputs to 8 bits.
        assert relative_error(found, emulated) <= 1.5 * error


@pytest.mark.parametrize("name", BUNDLED)
def test_images_decoded_together_and_recorded_equal_those_alone(name: str, device: str, tmp_path: Path) -> None:
    model = served(name, device, EngineOptions(decode_batch=4))
    requests = [replace(each, request_id=index) for index, each in enumerate(mixed((3, 3, 3, 3)) * 3)]
    model.tune({each.resolution for each in requests}, tmp_path, 4)
    if device != "cpu":
        assert model.decoder.captured is not None
        assert model.decoder.captured.failure is None
    result = served_together(model, requests)
    for request, latents in zip(requests, alone(model, requests), strict=True):
        with torch.inference_mode():
            image = model.family.decode(latents[None], lambda scaled: model.pipe.vae.decode(scaled)[0])[0]
        assert psnr(result.images[request.request_id], image) >= SAME_DB
