"""Estimated memory of models, compared with what torch allocates on a CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.profiling.steps.memory import memory_of, peak_bytes
from patchedserve.serving.core.denoiser import denoiser_of
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.options import EngineOptions

from ...support.family_kit import BUILDS
from ...support.tiny_models import save_tiny

SIZES = (Resolution(128, 128), Resolution(256, 256))


def allocated_bytes(run: Callable[[], object]) -> int:
    """Return the largest sum of what torch allocates while a function runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled, torch.inference_mode():
        run()
    found: Any = profiled.profiler
    events = [each for each in found.kineto_results.events() if each.name() == "[memory]"]
    now = peak = 0
    for each in sorted(events, key=lambda event: event.start_ns()):
        now += each.nbytes()
        peak = max(peak, now)
    return peak


def active(model: Any, sizes: tuple[Resolution, ...]) -> list[Any]:
    return [
        model.prepare(Request(number, "a cat", size, 4, guidance_scale=4.0, seed=number))
        for number, size in enumerate(sizes)
    ]


@pytest.mark.product(most=1)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("emoji-xl", 0.85), ("emoji-3", 0.45)])
def test_steps_allocate_what_is_estimated(name: str, least: float) -> None:
    found = memory_of(name, torch.float32, SIZES, [1, 4])
    plain, patched = (load_model(name, "cpu", "float32", EngineOptions(engine)) for engine in ("plain", "patched"))
    assert (
        found["weight_bytes"].items()
        >= {
            ("unet" if name == "emoji-xl" else "transformer"): sum(each.nbytes for each in plain.denoiser.parameters())
        }.items()
    )
    step_bytes = {(each["resolution"], each["num_requests"]): each["step_bytes"] for each in found["batches"]}
    batch = active(plain, SIZES[1:] * 4)
    plain.stepper.step(batch)
    ratio = allocated_bytes(lambda: plain.stepper.step(batch)) / step_bytes["256x256", 4]
    assert 0.75 <= ratio <= 1.25, "a batch of one size"
    mixed = active(patched, SIZES)
    patched.stepper.step(mixed)
    ratio = allocated_bytes(lambda: patched.stepper.step(mixed)) / sum(step_bytes[f"{size}", 1] for size in SIZES)
    assert least <= ratio <= 1.25, "positions, which the patch engine keeps, are made anew by plain diffusers"


def test_decoding_allocates_what_is_estimated() -> None:
    found = memory_of("emoji-xl", torch.float32, SIZES[1:], [1])["batches"][0]
    model = load_model("emoji-xl", "cpu", "float32")
    latents = torch.zeros(1, 4, 32, 32)
    decode = model.decoder.run
    decode(latents)
    # Convolutions on a CPU have workspaces.
    assert 0.75 <= allocated_bytes(lambda: decode(latents)) / found["decode_bytes"] <= 1.5


@pytest.mark.product(most=5)
@pytest.mark.parametrize("name", BUILDS)
def test_folders_without_weights_are_estimated(name: str, tmp_path: Any) -> None:
    pipe = BUILDS[name]()
    folder = save_tiny(tmp_path / "model", pipe)
    for file in [*folder.rglob("*.safetensors"), *folder.rglob("*.bin")]:
        file.unlink()
    found = memory_of(str(folder), torch.float16, [Resolution(64, 64)], [2])
    denoiser = denoiser_of(pipe)
    part = "unet" if hasattr(pipe, "unet") else "transformer"
    assert found["weight_bytes"][part] == 2 * sum(each.numel() for each in denoiser.parameters())
    assert found["rows_per_request"] == (1 if name in ("flux", "schnell", "kontext", "flux2", "klein") else 2)
    (batch,) = found["batches"]
    assert batch["decode_bytes"] > 64 * 64 * 3 * 2
    if name in ("lumina2", "z-image"):
        assert batch["step_bytes"] is batch["total_bytes"] is None
        return
    assert batch["total_bytes"] == sum(found["weight_bytes"].values()) + batch["step_bytes"] + batch["decode_bytes"]


def test_tensors_count_while_they_exist() -> None:
    def run() -> None:
        first = torch.zeros(100)
        second = first + 1
        del first
        third = second.view(10, 10).mul(2)
        third.add_(1)
        del second, third
        torch.zeros(150)

    assert peak_bytes(run) == 2 * 400
