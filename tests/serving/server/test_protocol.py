"""Request bodies: every invalid one is answered with a one-line message, the field and a code."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from starlette.requests import Request

from patchedserve.data.resolution import Resolution
from patchedserve.serving.models.defaults import ModelDefaults
from patchedserve.serving.server.edits import read_edit
from patchedserve.serving.server.errors import ApiError
from patchedserve.serving.server.json_body import parse_object, read_object
from patchedserve.serving.server.limits import Limits
from patchedserve.serving.server.protocol import Generation, ModelFacts, parse_generation

from ...support.bad_requests import BODIES, WRONG

SIZES = (Resolution(128, 128), Resolution(192, 192), Resolution(256, 256))
MODEL = ModelFacts("tiny", ModelDefaults(30, 4.0, SIZES[0], SIZES), aliases=("dall-e-3",))
LIMITS = Limits(max_pixels=256 * 256)


def parsed(header_slo: str | None = None, **fields: Any) -> Generation:
    return parse_generation({"prompt": "a cat", **fields}, MODEL, LIMITS, header_slo=header_slo)


def test_cascade_uses_its_own_steps() -> None:
    model = replace(MODEL, cascade=("light", "heavy"))

    def read(**fields: Any) -> Generation:
        return parse_generation({"prompt": "a cat", **fields}, model, LIMITS)

    assert read(num_inference_steps=None, guidance_scale=None, quality="medium", fallback="never").fallback == "never"
    for fields, message in (
        ({"num_inference_steps": 4}, "num_inference_steps is given, but each model of the cascade"),
        ({"guidance_scale": 4.0}, "guidance_scale is given, but each model of the cascade"),
        ({"quality": "high"}, "one of auto, standard, medium: each model of a cascade takes its own steps"),
        ({"partial_images": 1, "stream": True}, "a whole number from 0 to 0: a cascade has none"),
    ):
        with pytest.raises(ApiError, match=message) as caught:
            read(**fields)
        assert (caught.value.status, caught.value.code) == (400, "invalid_value")
    with pytest.raises(ApiError, match="the field 'fallback' is unknown"):
        parsed(fallback="light")


def test_unknown_model_is_reported_first() -> None:
    """The name of the model is checked before the fields."""
    for fields in ({"colour": "red"}, {"prompt": None}, {"n": 0}):
        error = refused(model="another", **fields)
        assert (error.status, error.code) == (404, "model_not_found")


def test_served_adapters_may_be_requested() -> None:
    model = replace(MODEL, adapters=("ink", "toy"))

    def named(**fields: Any) -> Generation:
        return parse_generation({"prompt": "a cat", **fields}, model, LIMITS)

    assert named().adapters == named(lora=None).adapters == named(lora="").adapters == ()
    assert named(lora="ink:0.5+toy").adapters == (("ink", 0.5), ("toy", 1.0))
    assert named(lora=[{"name": "toy", "scale": 2}]).adapters == (("toy", 2),)
    for given, told in (
        ("oil", "lora: adapter oil is unknown; there are ink, toy"),
        ("ink:much", "lora: the scale of adapter ink is 'much', but it must be a number"),
        (3, "lora: 3 names no adapters"),
        (False, "lora: False names no adapters"),
        ({"name": "ink"}, "names no adapters"),
    ):
        with pytest.raises(ApiError, match=told) as caught:
            named(lora=given)
        assert (caught.value.status, caught.value.param) == (400, "lora")
    with pytest.raises(ApiError, match=r"requests name their adapters in the field lora"):
        named(adapter="ink")


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parsed(**fields)
    return caught.value


def test_defaults_come_from_the_model() -> None:
    found = parsed()
    assert (found.resolution, found.num_inference_steps, found.guidance_scale) == (SIZES[0], 30, 4.0)
    assert (found.response_format, found.output_format, found.stream, found.partial_images) == (
        "b64_json",
        "png",
        False,
        0,
    )
    assert len(found.seeds) == 1
    assert found.slo_s is None
    assert parsed().seeds != parsed().seeds, "a seed is drawn"
    assert parsed(size=None, n=None, seed=None, stream=None).resolution == SIZES[0], "null is as good as nothing"


def test_all_fields_are_accepted() -> None:
    found = parsed(
        model="dall-e-3",
        n=3,
        size="256x128",
        response_format="b64_json",
        output_format="webp",
        output_compression=40,
        background="opaque",
        stream=True,
        partial_images=3,
        user="somebody",
        moderation="low",
        quality="high",
        seed=7,
        guidance_scale=2,
        negative_prompt="a dog",
        progress=True,
        slo=4.5,
        cache=False,
        priority=-3,
        style="natural",
        header_slo="3",
    )
    assert found == Generation(
        "a cat",
        Resolution(256, 128),
        60,
        2.0,
        (7, 8, 9),
        negative_prompt="a dog",
        output_format="webp",
        output_compression=40,
        stream=True,
        partial_images=3,
        progress=True,
        slo_s=3.0,
        quality="high",
        cache=False,
        priority=-3,
    )
    assert found.pixel_steps == 3 * 256 * 128 * 60
    assert parsed(slo=2, header_slo="3").slo_s == 2.0


@pytest.mark.parametrize(
    ("quality", "steps"),
    [
        ("low", 15),
        ("medium", 30),
        ("standard", 30),
        ("auto", 30),
        ("hd", 60),
        ("high", 60),
        ("xhigh", 90),
        ("max", 120),
    ],
)
def test_quality_is_a_share_of_the_model_steps(quality: str, steps: int) -> None:
    assert parsed(quality=quality).num_inference_steps == steps
    assert parsed(quality=quality, num_inference_steps=7).num_inference_steps == 7, "said outright it wins"


@pytest.mark.parametrize(("fields", "param", "code", "status"), WRONG)
def test_invalid_fields_are_refused(fields: dict[str, Any], param: str | None, code: str, status: int) -> None:
    error = refused(**fields)
    assert (error.status, error.param, error.code) == (status, param, code)
    assert len(error.message) < 250
    assert "\n" not in error.message
    told = error.to_json()["error"]
    assert told["type"] == "invalid_request_error"
    json.dumps(told).encode()


@pytest.mark.parametrize("body", BODIES)
def test_non_object_json_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_object(body)
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "invalid_json", None)
    assert "\n" not in error.message
    assert len(error.message) < 250


@pytest.mark.parametrize(
    ("read", "wanted"),
    [
        (read_object, "JSON (curl: -H 'Content-Type: application/json')"),
        (
            partial(read_edit, limits=LIMITS),
            "a form (Content-Type: multipart/form-data; curl: -F name=value), or JSON",
        ),
    ],
)
@pytest.mark.parametrize(
    ("given", "what"),
    [
        ((), "has no content type"),
        # The default of `curl -d`.
        (("application/x-www-form-urlencoded",), "is said to be 'application/x-www-form-urlencoded'"),
    ],
)
def test_wrong_content_type_gives_the_expected_one(
    read: Callable[[Request], Coroutine[Any, Any, Any]], wanted: str, given: tuple[str, ...], what: str
) -> None:
    headers = [(b"content-type", each.encode()) for each in given]
    with pytest.raises(ApiError) as caught:
        asyncio.run(read(Request({"type": "http", "headers": headers})))
    assert (caught.value.status, caught.value.code) == (415, "unsupported_media_type")
    assert caught.value.message == f"the body {what}, but it must be {wanted}"


def test_json_object_with_unicode_is_parsed() -> None:
    assert parse_object('{"prompt": "ä \\ud83d\\ude00"}'.encode()) == {"prompt": "ä 😀"}
