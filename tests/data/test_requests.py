"""Validation of requests."""

import dataclasses
import math
from typing import Any

import pytest

from patchedserve.data.adapters import Adapters, adapters_text, read_adapters
from patchedserve.data.edits import TemplateSpec
from patchedserve.data.errors import UsageError
from patchedserve.data.requests import MAX_SEED, Request
from patchedserve.data.resolution import Resolution

SMALL = Resolution(128, 128)


def test_defaults() -> None:
    request = Request(3, "a red apple", SMALL)
    assert (request.num_inference_steps, request.guidance_scale, request.seed) == (30, 4.0, 0)
    assert (request.arrival_s, request.slo_s, request.negative_prompt, request.deadline_s) == (0.0, None, None, None)


def test_deadline_counts_from_the_arrival() -> None:
    assert Request(0, "", SMALL, arrival_s=1.5, slo_s=2.0).deadline_s == 3.5


def test_boundary_values_are_allowed() -> None:
    request = Request(0, "", Resolution(8, 4096), 1, 0, MAX_SEED, "", 0, 1e-9)
    assert request.seed == 2**63 - 1


def test_request_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Request(0, "", SMALL).seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    "change",
    [
        {"request_id": -1},
        {"request_id": 1.0},
        {"request_id": True},
        {"prompt": None},
        {"prompt": b"bytes"},
        {"resolution": (128, 128)},
        {"resolution": Resolution(128, 100)},
        {"num_inference_steps": 0},
        {"num_inference_steps": "30"},
        {"guidance_scale": -0.1},
        {"guidance_scale": math.nan},
        {"guidance_scale": math.inf},
        {"seed": -1},
        {"seed": MAX_SEED + 1},
        {"negative_prompt": 5},
        {"arrival_s": -1e-9},
        {"arrival_s": math.nan},
        {"slo_s": 0},
        {"slo_s": -1.0},
        {"slo_s": math.inf},
        {"weight": 0},
        {"weight": 1e9},
        {"weight": math.nan},
    ],
)
def test_bad_fields_are_named(change: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"request_id": 0, "prompt": "", "resolution": SMALL} | change
    name = "height" if change.get("resolution") == Resolution(128, 100) else next(iter(change))
    with pytest.raises(UsageError, match=f"^{name} is .*must be") as caught:
        Request(**fields)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["a \ud83d cat", "\udcff", "a\0"])
def test_prompts_are_text(text: str) -> None:
    for name in ("prompt", "negative_prompt"):
        fields: dict[str, Any] = {"prompt": "", name: text}
        with pytest.raises(UsageError, match=f"^{name} holds a character that is not text"):
            Request(0, resolution=SMALL, **fields)
    with pytest.raises(UsageError, match="the template's prompt holds a character that is not text"):
        TemplateSpec(text)


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("", ()),
        ([], ()),
        ("ink", (("ink", 1.0),)),
        ("ink:0.5+toy-2", (("ink", 0.5), ("toy-2", 1.0))),
        ([{"name": "ink"}, {"name": "toy", "scale": -2}], (("ink", 1.0), ("toy", -2))),
    ],
)
def test_adapters_are_read_from_text_and_lists(said: object, found: Adapters) -> None:
    assert read_adapters(said) == found
    request = Request(0, "", SMALL, adapters=found)
    assert read_adapters(adapters_text(request.adapters) or "") == found


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("ink:", "the scale of adapter ink is '', but it must be a number from -100 to 100"),
        ("ink:nan", "the scale of adapter ink is nan"),
        ("ink:101", "the scale of adapter ink is 101.0"),
        ([{"name": "ink", "scale": 10**400}], "the scale of adapter ink is 1000"),
        ([{"name": "ink", "scale": True}], "the scale of adapter ink is True"),
        ("ink+ink", "adapter ink is named twice"),
        ("+", "adapter name '' is not allowed"),
        ([{"scale": 1}], "adapter name None is not allowed"),
        ("é" * 1000, "adapter name 'é"),
        ("+".join("abcdefghijklmnopq"), "17 adapters are named, but a request may have at most 16"),
        ([{"name": "ink", "weight": 1}], "names no adapters"),
        (["ink"], "names no adapters"),
        (5, "5 names no adapters: give NAME"),
    ],
)
def test_bad_adapters_give_a_short_one_line_error(said: object, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_adapters(said)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200
