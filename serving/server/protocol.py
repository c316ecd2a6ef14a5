"""Request parameters of `POST /v1/images/generations`, checked field by field.

Names and meanings are those of OpenAI's images API; `seed`, `num_inference_steps`, `guidance_scale`, `negative_prompt`,
`progress`, `slo`, `lora`, `cache` and (for cascades) `fallback` are ours. Edits share most of them: see `edits`.
"""

import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from ...data.adapters import Adapters
from ...data.requests import MAX_SEED, Fallback, steps_taken
from ...data.resolution import Resolution
from ..models.defaults import ModelDefaults
from .errors import ApiError, invalid
from .fields import LORA, MAX_USER, Fields, checked_seconds, shown
from .limits import Limits

if TYPE_CHECKING:
    from ...data.edits import EditSpec

GENERATIONS = "/v1/images/generations"
OutputFormat = Literal["png", "jpeg", "webp"]
ResponseFormat = Literal["b64_json", "url"]
MAX_IMAGES, MAX_PARTIALS = 10, 3
QUALITIES = {
    "low": 0.5,
    "auto": 1.0,
    "standard": 1.0,
    "medium": 1.0,
    "high": 2.0,
    "hd": 2.0,
    "xhigh": 3.0,
    "max": 4.0,
}
"""Number of steps by quality, as a multiple of the model's default."""
_SIZE = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Properties of the served model that requests are checked against.

    Attributes:
        name: name of the model.
        aliases: other names under which clients may request it.
        defaults: values of parameters that a request does not set.
        size_multiple: width and height must be multiples of it.
        dtype: dtype of the model, which `/v1/models` reports.
        reuses_templates: whether edits read the records of their templates by default.
        adapters: adapters that requests may name.
        cascade: names of the light and the heavy model of a cascade, which use their own steps and guidance; empty for
            a single model.
    """

    name: str
    defaults: ModelDefaults
    aliases: Sequence[str] = ()
    size_multiple: int = 8
    dtype: str = ""
    reuses_templates: bool = False
    adapters: tuple[str, ...] = ()
    cascade: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model, its own first."""
        return self.name, *self.aliases


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

    @property
    def kind(self) -> str:
        """Prefix of OpenAI's names of its events."""
        return "image_generation" if self.edit is None else "image_edit"

    @property
    def num_steps(self) -> int:
        """Number of steps that each image takes."""
        steps = self.num_inference_steps
        return steps if self.edit is None else steps_taken(steps, self.edit.strength)

    @property
    def pixel_steps(self) -> int:
        """Pixels times steps, over all images."""
        return len(self.seeds) * self.resolution.pixels * self.num_steps


def parse_generation(
    body: Mapping[str, Any], model: ModelFacts, limits: Limits, *, header_slo: str | None = None
) -> Generation:
    """Check the body of a request for images.

    Args:
        body: the parsed JSON object.
        model: the served model.
        limits: limits of the server.
        header_slo: value of the header `X-SLO-Seconds`; the smaller SLO counts.

    Raises:
        ApiError: a field is unknown, missing or not allowed (400), or the model is not served (404).
    """
    fields = Fields(body)
    size = fields.text("size", most=32)
    resolution = parse_size("auto" if size is None else size, model, limits)
    fields.choice("moderation", "auto", ("auto", "low"))
    fields.choice("style", "vivid", ("vivid", "natural"))
    return take_generation(fields, resolution, model, limits, header_slo)


def take_generation(
    fields: Fields, resolution: Resolution, model: ModelFacts, limits: Limits, header_slo: str | None
) -> Generation:
    """Check the fields that generations and edits share. Raises ApiError, also if any other field is left."""
    check_model(fields.text("model", most=MAX_USER), model)
    prompt = fields.prompt("prompt", most=limits.max_prompt)
    num_images = fields.integer("n", 1, 1, MAX_IMAGES)
    quality = fields.choice("quality", "auto", tuple(QUALITIES))
    if model.cascade:
        given = [name for name in ("num_inference_steps", "guidance_scale") if fields.has(name)]
        if QUALITIES[quality] != 1 or given:
            name = given[0] if given else "quality"
            own = f"each model of the cascade {model.name} takes its own steps and guidance"
            raise invalid(f"{name} is given, but {own}", name)
    usual_steps = max(1, round(model.defaults.num_inference_steps * QUALITIES[quality]))
    steps = fields.integer("num_inference_steps", min(usual_steps, limits.max_steps), 1, limits.max_steps)
    guidance_scale = fields.number("guidance_scale", model.defaults.guidance_scale, 0.0, 100.0)
    stream = fields.flag("stream")
    partial_images = fields.integer("partial_images", 0, 0, MAX_PARTIALS)
    progress = fields.flag("progress")
    for name, is_asked in (("partial_images", partial_images > 0), ("progress", progress)):
        if is_asked and not stream:
            raise invalid(f"{name} needs stream to be true", name)
    # Seed + i is the seed of image i.
    seed = fields.integer("seed", secrets.randbelow(MAX_SEED - MAX_IMAGES), 0, MAX_SEED - num_images + 1)
    generation = Generation(
        prompt,
        resolution,
        steps,
        guidance_scale,
        tuple(range(seed, seed + num_images)),
        negative_prompt=fields.text("negative_prompt", most=limits.max_prompt),
        response_format=fields.choice("response_format", "b64_json", get_args(ResponseFormat)),  # type: ignore[arg-type]
        output_format=fields.choice("output_format", "png", get_args(OutputFormat)),  # type: ignore[arg-type]
        output_compression=fields.integer("output_compression", 100, 0, 100),
        stream=stream,
        partial_images=partial_images,
        progress=progress,
        slo_s=_smaller(fields.seconds("slo"), _header_seconds(header_slo)),
        quality=quality,
        # Without a cascade, the field is unknown.
        fallback=fields.choice("fallback", "light", get_args(Fallback)) if model.cascade else "light",  # type: ignore[arg-type]
        adapters=fields.adapters(LORA, model.adapters) if model.adapters else (),
        cache=fields.flag("cache", True),
    )
    if fields.choice("background", "auto", ("auto", "opaque", "transparent")) == "transparent":
        raise invalid("background is 'transparent', but images have no alpha channel: auto or opaque", "background")
    for name in ("user", "safety_identifier"):
        fields.text(name, most=MAX_USER)
    if stream and generation.response_format == "url":
        raise invalid("response_format is 'url', but a stream sends b64_json", "response_format")
    fields.end()
    return generation


def check_model(name: str | None, model: ModelFacts) -> None:
    """Raise ApiError (404) unless a model of this name is served; None accepts any."""
    if name is not None and name not in model.names:
        raise ApiError(
            404,
            f"the model {shown(name)} is not served here, but {', '.join(model.names)}",
            code="model_not_found",
            param="model",
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
    return checked_seconds(seconds if math.isfinite(seconds) else text, "X-SLO-Seconds")


def _smaller(*seconds: float | None) -> float | None:
    return min((each for each in seconds if each is not None), default=None)
