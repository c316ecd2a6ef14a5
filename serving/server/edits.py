"""Bodies of `POST /v1/images/edits`: images, a mask, and fields (`fields.edit_fields`), as a form or JSON. No torch.

For a model that takes references, images without a mask and a strength are references of a new image, and further
images those of an edit by a mask.
"""

import base64
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.exceptions import HTTPException
from starlette.requests import Request

from ...data.datasets.decode import size_of
from ...data.edits import EditSpec, Reference, TemplateSpec, own_mask, read_image, read_mask
from ...data.errors import UsageError
from ...data.resolution import Resolution
from .body import MAX_NAME, Body, shown
from .errors import invalid, wrong_type
from .fields import RECORD_FIELDS, ModelFacts, edit_fields, unsupported
from .json_body import parse_object
from .limits import Limits
from .protocol import Generation, check_size, generation_of, parse_size

EDITS = "/v1/images/edits"
MAX_EDIT_BYTES = 50_000_000
_MOST_PARTS = 64
_MOST_REFERENCE_PIXELS = 1 << 24
"""Most pixels of the file of a reference, which is then scaled to a size that the model takes."""
_FORMATS = re.compile(rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|RIFF.{4}WEBP", re.DOTALL)
"""First bytes of the formats that OpenAI accepts. Pillow reads many more, some of which run other programs."""
_MOST_SCANS, _MOST_PIECES = 100, 50_000
"""Limits of the scans of a JPEG file, each of which costs a pass over the image, and of the pieces of a file (segments,
chunks), which are read one by one. Ordinary programs write about ten scans, and a few thousand pieces.
"""
_JPEG_MARKER = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")
_EOI, _SOS, _WITHOUT_LENGTH = 0xD9, 0xDA, (0x01, 0xD8)
_PARAM = re.compile("(?:the )?(image|mask|strength|feather_px|template_kind)|(?:the |[0-9]+ )?reference")
"""Start of messages about edits, which names the field."""
Part = str | bytes
"""A part of a form: text, or the bytes of a file."""


async def read_edit(request: Request, limits: Limits) -> list[tuple[str, Part]] | bytes:
    """Return the parts of the form in a request, with their names, or its body if it is JSON.

    Raises:
        ApiError: the body is neither (415), or a damaged form (400).
    """
    content_type = request.headers.get("content-type", "")
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "application/json":
        return await request.body()
    if kind != "multipart/form-data":
        raise wrong_type(content_type, "a form (Content-Type: multipart/form-data; curl: -F name=value), or JSON")
    most = limits.max_body_bytes
    try:
        async with request.form(max_files=_MOST_PARTS, max_fields=_MOST_PARTS, max_part_size=most) as form:
            return [(name, part if isinstance(part, str) else await part.read()) for name, part in form.multi_items()]
    except (HTTPException, UnicodeError) as error:
        reason = error.detail if isinstance(error, HTTPException) else str(error)
        raise invalid(f"the body is not a valid form: {reason}", code="invalid_form") from None


def parse_edit(
    parts: Sequence[tuple[str, Part]] | bytes, model: ModelFacts, limits: Limits, *, header_slo: str | None = None
) -> Generation:
    """Check an edit, and decode its images and its mask.

    Args:
        parts: parts of the form with their names, or a body of JSON.
        model, limits, header_slo: as for `protocol.parse_generation`.

    Raises:
        ApiError: a field is unknown, missing, repeated or not allowed (400), or the model is not served (404).
    """
    kind = edit_fields(model, limits)
    found, images = _of_json(parts) if isinstance(parts, bytes) else _by_name(parts, kind)
    mask = found.pop("mask", None)
    if not images:
        raise invalid("image is missing", "image", code="missing_required_parameter")
    image, fields = images[0], kind.read(found)
    try:
        is_drawn = model.references is not None and mask is None and fields.strength is None
        if len(images) > 1 and (model.references is None or (mask is None and not is_drawn)):
            reason = "one is edited at a time"
            if model.references is not None:
                reason += ": others are references, with a mask or without a strength"
            raise invalid(f"{len(images)} images were sent, but {reason}", "image")
        if model.references is not None and (is_drawn or mask is not None):
            num_seen = model.references.num_seen(len(images) - 1, is_masked=mask is not None)
            model.references.check_number(num_seen, model.name)
        most_pixels = _MOST_REFERENCE_PIXELS if is_drawn else limits.max_pixels
        first = _size_of(image, "image", most_pixels)
        for other in images[1:]:
            _size_of(other, "image", _MOST_REFERENCE_PIXELS)
        if is_drawn and (len(images) > 1 or own_mask(image, "image") is None):
            return _drawn_from(images, first, fields, model, limits, header_slo)
        resolution = check_size(first, "image", model, limits)
        if mask is not None:
            check_size(_size_of(mask, "mask", limits.max_pixels), "mask", model, limits)
        if fields.size not in ("auto", str(resolution)):
            own = f"but images are edited at their own size: {resolution}, or auto"
            raise invalid(f"size is {shown(fields.size)}, {own}", "size")
        template = _template_of(fields, model)
        generation = generation_of(fields, resolution, model, limits, header_slo)
        pixels = read_image(image, "image")
        may_change = own_mask(image, "image") if mask is None else read_mask(mask, "mask")
        if may_change is None:
            _refuse_fields_of_masks(fields)
        spec = EditSpec.with_defaults(
            pixels,
            may_change,
            fields.strength,
            paste=fields.paste,
            feather_px=fields.feather_px,
            template=template,
            full_steps=fields.full_steps,
            dilate=fields.dilate,
        )
        is_masked = may_change is not None
        references = _seen(pixels, images[1:], fields, model, is_masked=True) if is_masked else ()
        return replace(generation, edit=spec, references=references, kind="image_edit")
    except UsageError as error:
        begin = _PARAM.match(str(error))
        raise invalid(str(error), begin and (begin[1] or "image")) from None


def _drawn_from(
    images: Sequence[bytes], first: Resolution, fields: Any, model: ModelFacts, limits: Limits, header_slo: str | None
) -> Generation:
    """Return the request for a new image, by default of the served size that is nearest to `first`, that of the first
    image. Raises as `parse_edit`.
    """
    _refuse_fields_of_masks(fields)
    is_auto = fields.size == "auto"
    resolution = _nearest(first, model.defaults.resolutions) if is_auto else parse_size(fields.size, model, limits)
    generation = generation_of(fields, resolution, model, limits, header_slo)
    pixels = read_image(images[0], "image")
    references = _seen(pixels, images[1:], fields, model, is_masked=False)
    return replace(generation, references=references, kind="image_edit")


def _seen(
    image: NDArray[np.uint8], others: Sequence[bytes], fields: Any, model: ModelFacts, *, is_masked: bool
) -> tuple[Reference, ...]:
    """Return the references of an edit, of its image and these files. Raises UsageError as `ReferenceRule.seen`."""
    rule = model.references
    if rule is None:
        return ()
    pixels = [read_image(other, "image") for other in others]
    is_low = fields.input_fidelity == "low"
    return rule.seen(image, pixels, model.size_multiple, is_masked=is_masked, is_low=is_low)


def _nearest(size: Resolution, served: Sequence[Resolution]) -> Resolution:
    """Return the served size of the nearest proportions and, among these, of the nearest number of pixels."""

    def distance(other: Resolution) -> tuple[float, float]:
        proportions = math.log(other.width / other.height) - math.log(size.width / size.height)
        return round(abs(proportions), 6), abs(math.log(other.pixels / size.pixels))

    return min(served, key=distance)


def _refuse_fields_of_masks(fields: Any) -> None:
    for name in ("reuse", "feather_px", *RECORD_FIELDS):
        if name in fields.model_fields_set and getattr(fields, name):
            raise invalid(f"{name} keeps what is outside a mask, but there is no mask", name)


def _template_of(fields: Any, model: ModelFacts) -> TemplateSpec | None:
    """Return the template of an edit that reads its record; None for an exact edit.

    Raises:
        ApiError: `reuse` is requested from a server without it, or fields of a record are given without `reuse`.
        UsageError: the template's fields contradict each other.
    """
    if fields.reuse and not model.reuses_templates:
        raise invalid("reuse is true, but edits are exact here: the server has no --reuse-templates", "reuse")
    if fields.reuse:
        return TemplateSpec(fields.template_prompt, fields.template_seed, fields.template_kind)
    for name in RECORD_FIELDS:
        if name in fields.model_fields_set:
            raise invalid(f"{name} is of the record, which only edits with reuse read", name)
    return None


def _by_name(parts: Sequence[tuple[str, Part]], kind: Body) -> tuple[dict[str, Any], list[bytes]]:
    """Return the parts of a form with the types of JSON, and its images. Raises ApiError."""
    found: dict[str, Any] = {}
    images: list[bytes] = []
    for given, part in parts:
        name = "image" if given == "image[]" else given
        if name == "image" and isinstance(part, bytes):
            images.append(part)
            continue
        if name in found:
            raise invalid(f"the field {shown(name)} comes twice", name[:MAX_NAME])
        if isinstance(part, bytes) != (name in ("image", "mask")):
            what = "a file" if isinstance(part, bytes) else "text"
            raise unsupported(name) or invalid(
                f"{shown(name)} is {what}, but image and mask are files, and all else is text", name[:MAX_NAME]
            )
        found[name] = kind.from_text(name, part) if isinstance(part, str) else part
    return found, images


def _of_json(body: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """Return the fields of a body of JSON, its mask as a file, and its images. Raises ApiError.

    Images stand in `image` or `images`, one or a list; each is base64 or a data URL, or such an URL as `image_url`.
    """
    found = parse_object(body)
    given = {name: value for name in ("image", "images") if (value := found.pop(name, None)) is not None}
    if len(given) > 1:
        raise invalid("image and images are both given, but they say the same thing: give one of them", "images")
    images = [
        _content_of(each, name)
        for name, values in given.items()
        for each in (values if isinstance(values, list) else [values])
    ]
    if len(images) > _MOST_PARTS:
        raise invalid(f"{len(images)} images were sent, but at most {_MOST_PARTS} are read", "images")
    if (mask := found.pop("mask", None)) is not None:
        found["mask"] = _content_of(mask, "mask")
    return found, images


def _content_of(value: Any, name: str) -> bytes:
    """Return the file that a body of JSON has as text. Raises ApiError."""
    if isinstance(value, dict):
        if unknown := [key for key in value if key not in ("image_url", "type")]:
            raise invalid(f"{name} has {shown(unknown[0])}, but images are sent as image_url, a data URL", name)
        value = value.get("image_url")
    if not isinstance(value, str):
        raise invalid(f"{name} is {shown(value)}, but it must be a data URL or base64", name)
    if value.startswith(("http:", "https:")):
        raise invalid(f"{name} is a web address, which is not fetched here: send the image as a data URL", name)
    kind, comma, content = value.partition(",")
    if value.startswith("data:") and not (comma and kind.endswith(";base64")):
        raise invalid(f"{name} is {shown(value)}, but a data URL must begin like data:image/png;base64,", name)
    try:
        return base64.b64decode(content if comma else value, validate=True)
    except ValueError:
        raise invalid(f"{name} is no valid base64", name) from None


def _size_of(content: bytes, name: str, most_pixels: int) -> Resolution:
    """Return the size of an image file from its header.

    Raises UsageError if it has too many pixels, and ApiError if its format is not accepted, or if it has so many pieces
    that decoding takes far longer than for an ordinary file of its size.
    """
    if not _FORMATS.match(content):
        raise invalid(f"{name} is no PNG, JPEG or WebP file", name)
    if content.startswith(b"\xff"):
        _check_jpeg(content, name)
    else:
        _check_chunks(content, name)
    return Resolution(*size_of(content, name, most_pixels))


def _check_jpeg(content: bytes, name: str) -> None:
    """Raise ApiError if the file has too many segments or scans before its first image ends."""
    at, num_segments, num_scans = 0, 0, 0
    # Between segments, and in the data of a scan, everything up to the next marker is skipped, as decoders do.
    while (marker := _JPEG_MARKER.search(content, at)) and marker[1][0] != _EOI:
        kind, at = marker[1][0], marker.end()
        if kind not in _WITHOUT_LENGTH:
            at += int.from_bytes(content[at : at + 2])
        num_segments, num_scans = num_segments + 1, num_scans + (kind == _SOS)
        if num_scans > _MOST_SCANS:
            raise invalid(f"{name} has more than {_MOST_SCANS} scans", name)
        if num_segments > _MOST_PIECES:
            raise invalid(f"{name} has more than {_MOST_PIECES:,} segments", name)


def _check_chunks(content: bytes, name: str) -> None:
    """Raise ApiError if a PNG or WebP file has too many chunks."""
    at, order, extra = (8, "big", 12) if content.startswith(b"\x89") else (12, "little", 8)
    for _ in range(_MOST_PIECES):
        if at >= len(content):
            return
        length_at = at if order == "big" else at + 4
        length = int.from_bytes(content[length_at : length_at + 4], order)
        # Chunks of WebP begin at even offsets.
        at += extra + length + (length % 2 if order == "little" else 0)
    raise invalid(f"{name} has more than {_MOST_PIECES:,} chunks", name)
