"""Requests for images, built from checked fields (`fields`). No torch."""

import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ...data.adapters import Adapters
from ...data.requests import MAX_SEED, Fallback, pixels_seen, steps_taken
from ...data.resolution import Resolution
from .body import shown
from .errors import invalid
from .fields import LORA, MAX_IMAGES, QUALITIES, ModelFacts, OutputFormat, ResponseFormat, generation_fields
from .limits import Limits

if TYPE_CHECKING:
    from ...data.edits import EditSpec, Reference

GENERATIONS = "/v1/images/generations"
_SIZE = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", re.ASCII)


Kind = Literal["image_generation", "image_edit"]


@dataclass(frozen=True, slots=True)
class Generation:
    """A checked request for images.

    Attributes:
        seeds: one seed for each image, counting up from the one that was given or drawn.
        slo_s: seconds that it may take; None for the server's default SLO.
        progress: whether a stream reports every step.
        edit: the image to start from, and what may change in it; None for new images.
        fallback: whether the light model's image may be the answer, for a cascade.
        adapters: adapters that change the model for these images.
        cache: whether steps may reuse results of earlier steps, if the server has a cache.
        priority: rank among the waiting requests of the same key; lower ones are drawn earlier.
        references: images that the model sees beside the prompt, until the request has ended.
        forgotten_pixels: pixels of references that are no longer kept.
        kind: prefix of OpenAI's names of its events.
    """

    prompt: str
    resolution: Resolution
    num_inference_steps: int
    guidance_scale: float
    seeds: tuple[int, ...]
    negative_prompt: str | None = None
    response_format: ResponseFormat = "b64_json"
    output_format: OutputFormat = "png"
    output_compression: int = 100
    stream: bool = False
    partial_images: int = 0
    progress: bool = False
    slo_s: float | None = None
    quality: str = "auto"
    edit: "EditSpec | None" = None
    fallback: Fallback = "light"
    adapters: Adapters = ()
    cache: bool = True
    priority: int = 0
    references: "tuple[Reference, ...]" = ()
    forgotten_pixels: int = 0
    kind: Kind = "image_generation"

    @property
    def num_steps(self) -> int:
        """Number of steps that each image takes."""
        steps = self.num_inference_steps
        return steps if self.edit is None else steps_taken(steps, self.edit.strength)

    @property
    def pixel_steps(self) -> int:
        """Pixels times steps, over all images."""
        return len(self.seeds) * self.pixels_seen * self.num_steps

    @property
    def pixels_seen(self) -> int:
        """Number of pixels that a step of an image computes, as `Request.pixels_seen`."""
        return pixels_seen(self.resolution, self.references) + self.forgotten_pixels

    def without_references(self) -> "Generation":
        """Return the same without the references' pixels, which still count."""
        pixels = self.pixels_seen - self.resolution.pixels
        return replace(self, references=(), forgotten_pixels=pixels)


def parse_generation(
    body: Mapping[str, Any], model: ModelFacts, limits: Limits, *, header_slo: str | None = None
) -> Generation:
    """Check the body of a request for images.

    Args:
        body: the parsed JSON object.
        model: properties of the served model.
        limits: limits of the server.
        header_slo: value of the header `X-SLO-Seconds`; the smaller SLO counts.

    Raises:
        ApiError: a field is unknown, missing or not allowed (400), or the model is not served (404).
    """
    fields = generation_fields(model, limits).read(body)
    return generation_of(fields, parse_size(fields.size, model, limits), model, limits, header_slo)


def generation_of(
    fields: Any, resolution: Resolution, model: ModelFacts, limits: Limits, header_slo: str | None
) -> Generation:
    """Return the request that the fields of a body describe. Raises ApiError if two of them contradict each other."""
    for name in ("partial_images", "progress"):
        if getattr(fields, name) and not fields.stream:
            raise invalid(f"{name} needs stream to be true", name)
    if fields.stream and fields.response_format == "url":
        raise invalid("response_format is 'url', but a stream sends b64_json", "response_format")
    # Seed + i is the seed of image i.
    highest = MAX_SEED - fields.n + 1
    seed = secrets.randbelow(MAX_SEED - MAX_IMAGES) if fields.seed is None else fields.seed
    if seed > highest:
        raise invalid(f"seed is {seed}, but with n {fields.n} it must be a whole number from 0 to {highest}", "seed")
    usual_steps = max(1, round(model.defaults.num_inference_steps * QUALITIES[fields.quality]))
    return Generation(
        fields.prompt,
        resolution,
        # A cascade has neither field.
        getattr(fields, "num_inference_steps", None) or min(usual_steps, limits.max_steps),
        getattr(fields, "guidance_scale", model.defaults.guidance_scale),
        tuple(range(seed, seed + fields.n)),
        negative_prompt=fields.negative_prompt,
        response_format=fields.response_format,
        output_format=fields.output_format,
        output_compression=fields.output_compression,
        stream=fields.stream,
        partial_images=fields.partial_images,
        progress=fields.progress,
        slo_s=_smaller(fields.slo, _header_seconds(header_slo)),
        quality=fields.quality,
        fallback=getattr(fields, "fallback", "light"),
        adapters=getattr(fields, LORA, ()),
        cache=fields.cache,
        priority=fields.priority,
    )


def parse_size(text: str, model: ModelFacts, limits: Limits) -> Resolution:
    """Parse the size of an image, `WIDTHxHEIGHT`, or `auto` for the model's default. Raises ApiError."""
    if text == "auto":
        return model.defaults.default_resolution
    match = _SIZE.fullmatch(text)
    if match is None:
        raise invalid(f"size is {shown(text)}, but it must be WIDTHxHEIGHT in pixels, or auto", "size")
    return check_size(Resolution(int(match[1]), int(match[2])), "size", model, limits)


def check_size(size: Resolution, name: str, model: ModelFacts, limits: Limits) -> Resolution:
    """Return the size, the value of the field `name`. Raises ApiError if images may not have it."""
    multiple = model.size_multiple
    if size.width % multiple or size.height % multiple:
        raise invalid(f"{name} is {size}, but width and height must be multiples of {multiple}", name)
    if size.pixels > limits.max_pixels:
        raise invalid(f"{name} is {size}, but an image may have at most {limits.max_pixels:,} pixels", name)
    return size


def _header_seconds(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < 1e9:
        name = "X-SLO-Seconds"
        raise invalid(f"{name} is {shown(text)}, but it must be a number of seconds above 0", name)
    return seconds


def _smaller(*seconds: float | None) -> float | None:
    return min((each for each in seconds if each is not None), default=None)
