"""The prompt cache encodes a repeated text once: images are the same, the memory bound holds, and hits are counted."""

from typing import Any

import pytest
import torch

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.models.build import as_plain, build_model
from patchedserve.serving.models.prompt_cache import PromptCache
from patchedserve.serving.options import EngineOptions

from ...support.joining import run_joining
from ...support.patched_models import relative_error
from ...support.tiny_families import tiny_flux
from ...support.tiny_models import plain_latents, tiny_sdxl

SMALL, LARGE = Resolution(32, 32), Resolution(64, 32)
REQUESTS = [
    Request(0, "a hat", SMALL, 3, 4.0, seed=1),
    Request(1, "a hat", SMALL, 4, 4.0, seed=2),
    Request(2, "a hat", LARGE, 3, 4.0, seed=3),
    Request(3, "a hat", SMALL, 3, 1.0, seed=4),
    Request(4, "a hat", SMALL, 3, 4.0, seed=5, negative_prompt="blur"),
    Request(5, "a hat", SMALL, 3, 3.0, seed=6),
    Request(6, "a hat", SMALL, 2, 4.0, seed=7),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", [tiny_sdxl, tiny_flux])
def test_images_equal_diffusers_with_and_without_the_cache(make: Any) -> None:
    pipe = make()
    model = build_model(pipe, name="tiny", options=EngineOptions(prompt_cache_mb=1))
    found, failures = run_joining(model, REQUESTS)
    assert failures == {}
    for request in REQUESTS:
        assert relative_error([found[request.request_id]], [plain_latents(pipe, request)]) <= 1e-3, request
    assert model.prompts is not None
    said = model.prompts.to_json()
    assert (said["hits"], said["misses"], said["num_kept"]) == (2, 5, 5)
    assert said["hit_rate"] == 2 / 7


def test_cache_is_bounded_and_evicts_least_recently_used() -> None:
    calls: list[str] = []

    def encode(request: Request, is_guided: bool) -> dict[str, torch.Tensor]:
        calls.append(request.prompt)
        return {"text": torch.zeros(25)}

    cache = PromptCache(250)
    for prompt in ("a", "b", "a", "c", "a", "b"):
        cache.get(Request(0, prompt, SMALL, 3), False, encode)
        assert cache.to_json()["kept_bytes"] <= 250
    assert calls == ["a", "b", "c", "b"]
    nothing = PromptCache(99)
    for _ in range(2):
        assert nothing.get(Request(0, "a", SMALL, 3), False, encode)["text"].shape == (25,)
    assert nothing.to_json()["kept_bytes"] == nothing.to_json()["hits"] == 0


def test_cache_is_off_by_default_and_in_baselines() -> None:
    pipe = tiny_sdxl()
    assert build_model(pipe, name="tiny").prompts is None
    for engine in ("patched", "plain"):
        model = build_model(pipe, name="tiny", options=EngineOptions(engine, prompt_cache_mb=1))
        assert model.prompts is not None
        assert as_plain(model).prompts is None
    with pytest.raises(UsageError, match="prompt cache"):
        EngineOptions(prompt_cache_mb=-1)
