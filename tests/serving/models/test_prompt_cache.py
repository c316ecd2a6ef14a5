"""A repeated text is encoded once: images are the same, the memory bound holds, and hits are counted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.models.build import as_plain, build_model
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.prompt_cache import PromptCache
from patchedserve.serving.options import EngineOptions

from ...support.family_kit import BUILDS, served
from ...support.joining import run_joining
from ...support.patched_models import relative_error
from ...support.tiny_families import tiny_flux
from ...support.tiny_models import plain_latents, save_tiny, short_texts, tiny_sd, tiny_sdxl

SMALL, LARGE = Resolution(32, 32), Resolution(64, 32)
REQUESTS = [
    Request(0, "a hat", SMALL, 3, 4.0, seed=1),
    Request(1, "a hat", SMALL, 4, 4.0, seed=2),
    Request(2, "a hat", LARGE, 3, 4.0, seed=3),
    Request(3, "a hat", SMALL, 3, 1.0, seed=4),
    Request(4, "a hat", SMALL, 3, 4.0, seed=5, negative_prompt="blur"),
    Request(5, "a car", SMALL, 3, 3.0, seed=6, negative_prompt="blur"),
]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("make", [tiny_sd, tiny_sdxl, tiny_flux])
def test_images_equal_diffusers_with_and_without_the_cache(make: Any) -> None:
    pipe = make()
    for size in (0, 1):
        model = build_model(pipe, name="tiny", options=EngineOptions(prompt_cache_mb=size))
        found, failures = run_joining(model, REQUESTS)
        assert failures == {}
        for request in REQUESTS:
            assert relative_error([found[request.request_id]], [plain_latents(pipe, request)]) <= 1e-3, request


@pytest.mark.product(most=3)
@pytest.mark.parametrize("name", BUILDS)
def test_repeated_texts_are_not_encoded_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = BUILDS[name]()
    texts = short_texts(pipe)
    cached, usual = (served(pipe, EngineOptions(prompt_cache_mb=size), **texts) for size in (8, 0))
    assert cached.prompts is not None
    one, other, larger = (
        Request(index, prompt, size, 3, 4.0, seed=index, negative_prompt="blur")
        for index, (prompt, size) in enumerate([("a hat", SMALL), ("two cars", SMALL), ("a hat", LARGE)])
    )
    known: dict[int, Any] = {}
    for request in (one, other):
        known[request.request_id] = found = cached.prepare(request).conditioning
        expected = usual.prepare(request).conditioning
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[part], expected[part]) for part in expected)
    kept = {part: value.clone() for part, value in known[0].items()}
    facts = cached.prompts.to_json()
    num_texts = facts["hits"] + facts["misses"]
    if cached.family.uses_guidance(4.0):
        assert facts["hits"] == num_texts / 4, "the second negative prompt"

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("encoded again")

    expected = usual.prepare(larger).conditioning
    for encoder in cached.prompts._encoders.values():
        monkeypatch.setattr(encoder, "forward", refuse)
    found = cached.prepare(larger).conditioning
    assert all(torch.equal(found[part], expected[part]) for part in expected)
    assert all(torch.equal(known[0][part], kept[part]) for part in kept), "what is kept was written to"
    with pytest.raises(AssertionError, match="encoded again"):
        usual.prepare(larger)


class Encoder(nn.Module):
    def forward(self, ids: torch.Tensor) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        self.calls = [*getattr(self, "calls", []), int(ids)]
        states = tuple(torch.zeros(1, 1, 25) for _ in range(4))
        return BaseModelOutput(last_hidden_state=torch.zeros(1, 1, 25), hidden_states=states)  # type: ignore[arg-type]


def test_cache_is_bounded_and_evicts_least_recently_used() -> None:
    """One hidden state is read, so that an output keeps 200 bytes."""
    encoder = Encoder()
    cache = PromptCache({"text_encoder": encoder}, 500)
    for text in (0, 1, 0, 2, 0, 1):
        with cache.answering(()):
            output = encoder(torch.tensor(text))
            assert output.hidden_states[-2].shape == (1, 1, 25)
        assert cache.to_json()["kept_bytes"] <= 400
    assert encoder.calls == [0, 1, 2, 1]
    assert (cache.to_json()["hits"], cache.to_json()["misses"]) == (2, 4)
    assert cache.to_json()["hit_rate"] == 2 / 6
    encoder(torch.tensor(1))
    with cache.answering((("ink", 0.5),)):
        encoder(torch.tensor(1))
    assert encoder.calls == [0, 1, 2, 1, 1, 1], "outside, and with other adapters, texts are encoded"
    nothing = PromptCache({"text_encoder": encoder}, 99)
    for _ in range(2):
        with nothing.answering(()):
            encoder(torch.tensor(1))
    assert nothing.to_json()["kept_bytes"] == nothing.to_json()["hits"] == 0


def test_offloaded_encoders_stay_off_the_device_for_repeated_texts(tmp_path: Path) -> None:
    folder = str(save_tiny(tmp_path, tiny_sd()))
    model = load_model(folder, "cpu", "float32", EngineOptions(offload="text"))
    assert model.offload is not None
    for request in REQUESTS:
        model.prepare(request)
    assert model.offload.to_json(model.pipe)["num_moves"] == 4, "a hat, nothing, blur, a car"


def test_baselines_have_the_cache_of_the_engine_except_alone() -> None:
    model = build_model(tiny_sdxl(), name="tiny")
    assert model.prompts is not None
    assert as_plain(model).prompts is not None
    assert as_plain(model, is_eager=True).prompts is None
    assert build_model(model.pipe, name="tiny", options=EngineOptions(prompt_cache_mb=0)).prompts is None
    with pytest.raises(UsageError, match="prompt cache"):
        EngineOptions(prompt_cache_mb=-1)
