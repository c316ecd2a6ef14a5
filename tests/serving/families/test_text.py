"""Text that is encoded at its own length has the same states, and padding is not computed."""

from typing import Any

import pytest
import torch
from torch import Tensor

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.families.text import own_length

from ...support.family_kit import served
from ...support.patched_models import relative_error
from ...support.tiny_families import tiny_aura, tiny_lumina2, tiny_pixart

BUILDS = [tiny_aura, tiny_lumina2, tiny_pixart]


@pytest.fixture(params=BUILDS)
def pipe(request: pytest.FixtureRequest) -> Any:
    return request.param()


def encoded(pipe: Any, prompt: str) -> tuple[Tensor, Tensor]:
    """Return the states and the mask of a text."""
    states, mask = pipe.encode_prompt(prompt, do_classifier_free_guidance=False, device="cpu")[:2]
    return states, mask.view(1, states.shape[1], -1)[..., 0]  # AuraFlow returns a mask for each channel


def lengths_of(pipe: Any) -> list[int]:
    """Return a list to which each later call of the encoder appends its number of tokens."""
    lengths: list[int] = []
    first = next(layer for layer in pipe.text_encoder.modules() if isinstance(layer, torch.nn.Linear))
    first.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    return lengths


@torch.inference_mode()
@pytest.mark.parametrize("prompt", ["", "a car", "b" * 40])
def test_text_states_equal_those_of_padded_text(pipe: Any, prompt: str) -> None:
    expected, mask = encoded(pipe, prompt)
    lengths = lengths_of(pipe)
    with own_length(pipe.text_encoder):
        found, found_mask = encoded(pipe, prompt)
    num_tokens = int(mask.sum())
    assert lengths == [num_tokens]
    assert num_tokens < mask.shape[1]
    assert torch.equal(found_mask, mask)
    assert found.shape == expected.shape
    assert relative_error([found[:, :num_tokens]], [expected[:, :num_tokens]]) <= 1e-6
    assert not found[:, num_tokens:].any()
    encoded(pipe, prompt)
    assert lengths[1:] == [mask.shape[1]], "the encoder is left as it was"


@torch.inference_mode()
def test_text_of_full_length_is_encoded_completely(pipe: Any) -> None:
    expected, mask = encoded(pipe, "c" * 1000)
    assert mask.all()
    with own_length(pipe.text_encoder):
        assert torch.equal(encoded(pipe, "c" * 1000)[0], expected)


def test_requests_use_unpadded_text(pipe: Any) -> None:
    model, lengths = served(pipe), lengths_of(pipe)
    for prompt in ("a car", "two red cars"):
        model.prepare(Request(0, prompt, Resolution(64, 64), 2, guidance_scale=3.0))
    assert len(lengths) == 3  # with the negative text, which both share
    assert max(lengths) < 100
    assert len(set(lengths)) == 3


def test_failing_encoder_is_restored(pipe: Any) -> None:
    tokens = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(IndexError), own_length(pipe.text_encoder):
        pipe.text_encoder(tokens * 10**6, attention_mask=tokens)
    assert pipe.text_encoder(tokens).last_hidden_state.shape[1] == 4
