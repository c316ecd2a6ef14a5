"""A repeated text is encoded once: images are the same, the memory bound holds, and hits are counted."""

import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.core.threads import LoneThread
from patchedserve.serving.families import build_family
from patchedserve.serving.models.build import as_plain, build_model
from patchedserve.serving.models.channel import Channel
from patchedserve.serving.models.decoder import ImageDecoder
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.prompt_cache import PromptCache
from patchedserve.serving.models.stage_process import serve_stage
from patchedserve.serving.options import EngineOptions

from ...support.family_kit import BUILDS, served
from ...support.joining import run_joining
from ...support.patched_models import relative_error
from ...support.plain import plain_latents, short_texts
from ...support.tiny_families import tiny_flux
from ...support.tiny_models import save_tiny, tiny_sd, tiny_sdxl

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

    for output in cached.prompts._entries._values.values():
        states = output.get("hidden_states") or ()
        assert len([state for state in states if state is not None]) <= 3, "states that are not read are not kept"

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


def test_a_text_that_comes_twice_in_a_context_is_encoded_once_and_not_kept_after_an_error() -> None:
    encoder = Encoder()
    cache = PromptCache({"text_encoder": encoder}, 500)

    def fail() -> None:
        with cache.answering(()):
            encoder(torch.tensor(0))
            encoder(torch.tensor(0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert encoder.calls == [0]
    with cache.answering(()):
        assert encoder(torch.tensor(0)).hidden_states[-2].shape == (1, 1, 25)
    assert encoder.calls == [0, 0], "its states had not been read"
    assert "forward" not in vars(encoder)
    cache.clear()
    facts = cache.to_json()
    assert (facts["hits"], facts["misses"], facts["num_kept"], facts["kept_bytes"]) == (0, 0, 0, 0)


def test_process_that_encodes_has_the_cache() -> None:
    pipe, calls, (ours, theirs) = tiny_sd(), [], socket.socketpair()
    encode = pipe.text_encoder.forward

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return encode(*args, **kwargs)

    pipe.text_encoder.forward = noted
    loaded = pipe, build_family(pipe), ImageDecoder(pipe.vae)
    thread = LoneThread(target=serve_stage, name="stage", args=(Channel(theirs), lambda: loaded, 8))
    thread.start()
    with closing(Channel(ours)) as channel:
        found = []
        for request in REQUESTS[:3]:
            channel.send(("condition", (request, True)))
            found.append(channel.receive())
    thread.join(30)
    assert not thread.is_alive()
    assert len(calls) == 2, "a hat, and the negative prompt"
    assert all(torch.equal(each["text"], found[0]["text"]) for each in found)


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
