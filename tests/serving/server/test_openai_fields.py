"""Every value of every field in the types of OpenAI's client is deliberately accepted or refused."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal, Union, get_args, get_origin

import openai.types
import pytest
from typing_extensions import get_type_hints, is_typeddict

from patchedserve.data.resolution import Resolution
from patchedserve.serving.families.references import CROPPED, KONTEXT
from patchedserve.serving.models.defaults import ModelDefaults
from patchedserve.serving.server.edits import parse_edit
from patchedserve.serving.server.errors import ApiError
from patchedserve.serving.server.limits import Limits
from patchedserve.serving.server.protocol import Generation, ModelFacts, parse_generation

from ...support.edits import file_of, image_of, mask_of

SIZE = Resolution(64, 48)
MODEL = ModelFacts("tiny", ModelDefaults(4, 4.0, SIZE, (SIZE,)))
LIMITS = Limits(max_pixels=2048 * 2048)
IMAGE, MASK = file_of(image_of(SIZE)), file_of(mask_of(SIZE))
TEXTS = {"size": str(SIZE), "model": MODEL.name}
NO_FORMATS = ["gif", "svg"]
REFUSED: dict[str, list[Any]] = {
    "background": ["transparent"],
    "complexity": ["low", "medium", "high"],
    "frame_count": [2],
    "frame_duration_ms": [2],
    "output_format": NO_FORMATS,
    "svg": [{"model": "a cat"}],
}
"""Values that generations and edits refuse, by field; names of OpenAI's models are tested elsewhere."""
OWN_SIZE = ["1024x1024", "1536x1024", "1024x1536", "256x256", "512x512"]


def values_of(kind: Any, name: str) -> Iterator[Any]:
    """Yield values of a type of the client: every value of a `Literal`, one of any other type."""
    if get_origin(kind) is Literal:
        yield from get_args(kind)
    elif kind is str:
        yield TEXTS.get(name, "a cat")
    elif kind is int:
        yield 2
    elif is_typeddict(kind):
        yield {"model": "a cat"}
    elif get_origin(kind) is Union:
        for each in get_args(kind):
            yield from values_of(each, name)
    elif kind is not type(None):  # a file, in any of its forms
        yield IMAGE if name == "image" else MASK


def generation(name: str, value: Any) -> Generation:
    return parse_generation({"prompt": "a cat", name: value} | more(name), MODEL, LIMITS)


def edit(name: str, value: Any) -> Generation:
    """Parse an edit form, written the way the client writes it."""
    given = {f"{name}[{key}]": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
    fields = {"image": IMAGE, "mask": MASK, "prompt": "a cat"} | given | more(name)
    parts = {key: part if isinstance(part, str | bytes) else json.dumps(part) for key, part in fields.items()}
    return parse_edit(list(parts.items()), MODEL, LIMITS)


def refusal_of(parse: Callable[[str, Any], Generation], name: str, value: Any) -> ApiError | None:
    try:
        parse(name, value)
    except ApiError as error:
        return error
    return None


def more(name: str) -> dict[str, Any]:
    return {"stream": True} if name == "partial_images" else {}


@pytest.mark.parametrize(
    ("params", "parse", "refused"),
    [
        (openai.types.ImageGenerateParams, generation, REFUSED),
        (openai.types.ImageEditParams, edit, REFUSED | {"markup": [MASK], "size": OWN_SIZE}),
    ],
)
def test_every_openai_field_is_handled(
    params: Any, parse: Callable[[str, Any], Generation], refused: dict[str, list[Any]]
) -> None:
    fields = {name: kind for form in get_args(params) for name, kind in get_type_hints(form).items()}
    fields["stream"] = Literal[True, False]  # one of them in each form
    assert {"prompt", "quality", "background", "safety_identifier"} <= fields.keys()
    found: dict[str, list[Any]] = {}
    for name, kind in fields.items():
        for value in values_of(kind, name):
            if (error := refusal_of(parse, name, value)) is None:
                continue
            assert error.code != "unknown_parameter", f"nobody has decided on {name}: {error.message}"
            assert error.param == name, error.message
            assert "\n" not in error.message
            if name != "model" and value not in found.setdefault(name, []):
                found[name].append(value)
    assert found == refused


def test_images_without_a_mask_are_references_of_models_that_take_them() -> None:
    sizes = SIZE, Resolution(48, 64), Resolution(192, 256)
    model = replace(MODEL, defaults=ModelDefaults(4, 4.0, SIZE, sizes), size_multiple=16, references=CROPPED)

    def parse(images: list[bytes], **fields: Any) -> Generation:
        parts = [("image[]", image) for image in images]
        return parse_edit([*parts, ("prompt", "a hat"), *fields.items()], model, LIMITS)

    photo, room = file_of(image_of(Resolution(1300, 1000))), file_of(image_of(Resolution(70, 100)))
    found = parse([room, photo], seed="3")
    assert [str(each.resolution) for each in found.references] == ["64x96", "1152x896"]
    assert (found.resolution, found.edit, found.kind) == (Resolution(48, 64), None, "image_edit")
    assert found.pixel_steps == 4 * (48 * 64 + 64 * 96 + 1152 * 896)
    low = parse([room, photo], input_fidelity="low").references
    assert [str(each.resolution) for each in low] == ["64x96", "576x448"]
    assert parse([photo], size="64x48").resolution == Resolution(64, 48)
    assert parse([photo]).resolution == SIZE
    assert parse([IMAGE], strength="0.5").edit is not None
    masked = parse([IMAGE], mask=MASK)
    assert masked.edit is not None
    assert [each.image is masked.edit.image for each in masked.references] == [True]
    assert [str(each.resolution) for each in parse([IMAGE, photo], mask=MASK).references] == ["64x48", "1152x896"]
    alone = replace(model, references=KONTEXT)
    parts = [("image", IMAGE), ("image[]", IMAGE), ("mask", MASK), ("prompt", "a hat")]
    assert [str(each.resolution) for each in parse_edit(parts, alone, LIMITS).references] == ["1184x880"]
    with pytest.raises(ApiError, match="2 references are given, but tiny takes one reference at most"):
        parse_edit([*parts, ("image[]", IMAGE)], alone, LIMITS)
    for images, fields, param, message in (
        ([IMAGE] * 2, {"strength": "0.5"}, "image", "others are references, with a mask or without a strength"),
        ([IMAGE] * 11, {}, "image", "11 references are given, but tiny takes 10 references at most"),
        ([IMAGE] * 11, {"mask": MASK}, "image", "11 references are given, but tiny takes 10 references at most"),
        (
            [file_of(image_of(Resolution(8, 64)))],
            {},
            "image",
            "the reference has 8x64 pixels, but it must have 16x16 or",
        ),
        (
            [file_of(image_of(Resolution(16, 70_000)))],
            {},
            "image",
            "the reference has 16x70000 pixels, but it must have",
        ),
        ([IMAGE], {"feather_px": "4"}, "feather_px", "feather_px keeps what is outside a mask, but there is no mask"),
        ([IMAGE], {"size": "50x48"}, "size", "size is 50x48, but width and height must be multiples of 16"),
        ([IMAGE[:200]], {}, "image", "image: damaged image"),
    ):
        with pytest.raises(ApiError, match=message) as caught:
            parse(images, **fields)
        assert (caught.value.status, caught.value.param) == (400, param)


def test_refused_fields_give_a_reason_and_null_is_ignored() -> None:
    for name in ("complexity", "frame_count", "svg"):
        generation(name, None)
        with pytest.raises(ApiError, match=f"the field {name} is not supported: ") as caught:
            generation(name, 3)
        assert (caught.value.status, caught.value.code) == (400, "unsupported_parameter")
    with pytest.raises(ApiError, match="a mask says what is edited"):
        edit("markup", MASK)
