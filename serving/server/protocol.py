"""What `POST /v1/images/generations` takes, checked field by field; the answers are made elsewhere.

Names and meanings are those of OpenAI's images API; `seed`, `num_inference_steps`, `guidance_scale`, `negative_prompt`,
`progress`, `slo`, `lora`, `cache` and (of cascades) `fallback` are ours. Edits take most of it, too: see `edits`.
"""

import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from ...data.adapters import Adapters, read_adapters, require_adapters
from ...data.checks import require_prompt, require_text
from ...data.errors import UsageError
from ...data.requests import MAX_SEED, Fallback, steps_taken
from ...data.resolution import Resolution
from ..models.defaults import ModelDefaults
from .errors import ApiError, invalid
from .limits import Limits

if TYPE_CHECKING:
    from ...data.edits import EditSpec

GENERATIONS = "/v1/images/generations"
OutputFormat = Literal["png", "jpeg", "webp"]
ResponseFormat = Literal["b64_json", "url"]
MAX_IMAGES, MAX_PARTIALS, MAX_USER = 10, 3, 256
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
"""Share of the model's own number of steps."""
NOT_HERE = {
    "complexity": "nothing is planned before an image is drawn; quality says how many steps it takes",
    "frame_count": "images are not animated",
    "frame_duration_ms": "images are not animated",
    "svg": "images are made of pixels: output_format is png, jpeg or webp",
    "markup": "a mask says what is edited",
}
"""OpenAI's fields that are refused, and why."""
_SIZE = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", re.ASCII)
_MAX_SHOWN = 60


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What requests are checked against.

    Attributes:
        name: of the served model.
        aliases: other names that clients may ask for.
        defaults: what a request gets that does not say.
        size_multiple: width and height must be multiples of it.
        dtype: for clients that ask about the model.
        reuses_templates: whether edits read the records of their templates, unless they say that they do not.
        adapters: that requests may name.
        cascade: of a light and a heavy model: their names, each of which takes its own steps and guidance.
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


LORA = "lora"
_ADAPTERS = (LORA, "loras", "adapter", "adapters")
"""What clients call adapters (LoRA) of a request."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A checked request for images.

    Attributes:
        seeds: one for each image: the one that was given or drawn, counting up.
        slo_s: how long it may take; None: as long as the server's own SLO.
        progress: whether a stream tells of every step.
        edit: the image to start from, and what may change in it; None for new images.
        fallback: of a cascade: whether the light model's image may be the answer.
        adapters: that change the model for these images.
        cache: whether steps may reuse what earlier ones have computed, where the server has a cache.
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
        """What OpenAI's names of its events begin with."""
        return "image_generation" if self.edit is None else "image_edit"

    @property
    def num_steps(self) -> int:
        """How many steps each image takes."""
        steps = self.num_inference_steps
        return steps if self.edit is None else steps_taken(steps, self.edit.strength)

    @property
    def pixel_steps(self) -> int:
        """Pixels times steps, over all images."""
        return len(self.seeds) * self.resolution.pixels * self.num_steps


def parse_generation(
    body: Mapping[str, Any], model: ModelFacts, limits: Limits, *, header_slo: str | None = None
) -> Generation:
    """Check a request.

    Args:
        body: as JSON gave it.
        model: that is served.
        limits: of the server.
        header_slo: `X-SLO-Seconds`; the smaller SLO counts.

    Raises:
        ApiError: a field is unknown, missing or not allowed (400), or the model is not served (404).
    """
    fields = Fields(body)
    size = fields.text("size", most=32)
    resolution = parse_size("auto" if size is None else size, model, limits)
    fields.word("moderation", "auto", ("auto", "low"))
    fields.word("style", "vivid", ("vivid", "natural"))
    return take_generation(fields, resolution, model, limits, header_slo)


def take_generation(
    fields: "Fields", resolution: Resolution, model: ModelFacts, limits: Limits, header_slo: str | None
) -> Generation:
    """Check the fields that generations and edits share, which must be all that are left. Raises ApiError."""
    check_model(fields.text("model", most=MAX_USER), model)
    prompt = fields.required("prompt", most=limits.max_prompt)
    try:
        require_prompt("prompt", prompt)
    except UsageError as error:
        raise invalid(str(error), "prompt") from None
    num_images = fields.whole("n", 1, 1, MAX_IMAGES)
    quality = fields.word("quality", "auto", tuple(QUALITIES))
    if model.cascade:
        given = [name for name in ("num_inference_steps", "guidance_scale") if fields.has(name)]
        if QUALITIES[quality] != 1 or given:
            name = given[0] if given else "quality"
            own = f"each model of the cascade {model.name} takes its own steps and guidance"
            raise invalid(f"{name} is given, but {own}", name)
    usual_steps = max(1, round(model.defaults.num_inference_steps * QUALITIES[quality]))
    steps = fields.whole("num_inference_steps", min(usual_steps, limits.max_steps), 1, limits.max_steps)
    guidance_scale = fields.number("guidance_scale", model.defaults.guidance_scale, 0.0, 100.0)
    stream = fields.flag("stream")
    partial_images = fields.whole("partial_images", 0, 0, MAX_PARTIALS)
    progress = fields.flag("progress")
    for name, is_asked in (("partial_images", partial_images > 0), ("progress", progress)):
        if is_asked and not stream:
            raise invalid(f"{name} needs stream to be true", name)
    # Seed + i is the seed of image i.
    seed = fields.whole("seed", secrets.randbelow(MAX_SEED - MAX_IMAGES), 0, MAX_SEED - num_images + 1)
    generation = Generation(
        prompt,
        resolution,
        steps,
        guidance_scale,
        tuple(range(seed, seed + num_images)),
        negative_prompt=fields.text("negative_prompt", most=limits.max_prompt),
        response_format=fields.word("response_format", "b64_json", get_args(ResponseFormat)),  # type: ignore[arg-type]
        output_format=fields.word("output_format", "png", get_args(OutputFormat)),  # type: ignore[arg-type]
        output_compression=fields.whole("output_compression", 100, 0, 100),
        stream=stream,
        partial_images=partial_images,
        progress=progress,
        slo_s=_smaller(fields.seconds("slo"), _header_seconds(header_slo)),
        quality=quality,
        # Of a single model the field is unknown.
        fallback=fields.word("fallback", "light", get_args(Fallback)) if model.cascade else "light",  # type: ignore[arg-type]
        adapters=fields.adapters(LORA, model.adapters) if model.adapters else (),
        cache=fields.flag("cache", True),
    )
    if fields.word("background", "auto", ("auto", "opaque", "transparent")) == "transparent":
        raise invalid("background is 'transparent', but images have no alpha channel: auto or opaque", "background")
    for name in ("user", "safety_identifier"):
        fields.text(name, most=MAX_USER)
    if stream and generation.response_format == "url":
        raise invalid("response_format is 'url', but a stream sends b64_json", "response_format")
    fields.end()
    return generation


def check_model(name: str | None, model: ModelFacts) -> None:
    """Raise ApiError (404) unless a model is served; None is whichever there is."""
    if name is not None and name not in model.names:
        raise ApiError(
            404,
            f"the model {shown(name)} is not served here, but {', '.join(model.names)}",
            code="model_not_found",
            param="model",
        )


def parse_size(text: str, model: ModelFacts, limits: Limits) -> Resolution:
    """The size of an image as `WIDTHxHEIGHT`, or `auto` for the model's own. Raises ApiError."""
    if text == "auto":
        return model.defaults.default_resolution
    match = _SIZE.fullmatch(text)
    if match is None:
        raise invalid(f"size is {shown(text)}, but it must be WIDTHxHEIGHT in pixels, or auto", "size")
    return check_size(Resolution(int(match[1]), int(match[2])), "size", model, limits)


def check_size(size: Resolution, name: str, model: ModelFacts, limits: Limits) -> Resolution:
    """The size, which the field of this name has, if images may have it. Raises ApiError."""
    multiple = model.size_multiple
    if size.width % multiple or size.height % multiple:
        raise invalid(f"{name} is {size}, but width and height must be multiples of {multiple}", name)
    if size.pixels > limits.max_pixels:
        raise invalid(f"{name} is {size}, but an image may have at most {limits.max_pixels:,} pixels", name)
    return size


def unsupported(name: str) -> ApiError | None:
    """The refusal of a field that is one of `NOT_HERE`, or a part of one as forms name it (`svg[model]`); else None."""
    field = name.partition("[")[0]
    if field not in NOT_HERE:
        return None
    return invalid(f"the field {field} is not supported: {NOT_HERE[field]}", field, code="unsupported_parameter")


def shown(value: object) -> str:
    """A value as an error repeats it: on one line, and short."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


class Fields:
    """Takes the fields of a body one by one; null is as good as none. What nobody took is unknown."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._left = dict(body)

    def has(self, name: str) -> bool:
        """Whether a field is given and not null."""
        return self._left.get(name) is not None

    def end(self) -> None:
        """Raise ApiError if a field is left."""
        for name, value in self._left.items():
            if (refusal := unsupported(name)) is not None:
                if value is None:
                    continue
                raise refusal
            told = f"the field {shown(name)} is unknown"
            if name == LORA:
                told += ": no adapters are served here; psctl serve --adapter NAME=PATH lets requests name them"
            elif name in _ADAPTERS:
                told += f": requests name their adapters in the field {LORA}"
            raise invalid(told, name[:MAX_USER], code="unknown_parameter")

    def required(self, name: str, *, most: int) -> str:
        """Text that must be there."""
        value = self.text(name, most=most)
        if value is None:
            raise invalid(f"{name} is missing", name, code="missing_required_parameter")
        return value

    def text(self, name: str, *, most: int) -> str | None:
        """Text of at most so many characters."""
        value = self._left.pop(name, None)
        if value is None:
            return None
        if not isinstance(value, str):
            raise invalid(f"{name} is {shown(value)}, but it must be a string", name)
        if len(value) > most:
            raise invalid(f"{name} has {len(value):,} characters, but it may have at most {most:,}", name)
        try:
            require_text(name, value)
        except UsageError as error:
            raise invalid(str(error), name) from None
        return value

    def whole(self, name: str, default: int, low: int, high: int) -> int:
        """A whole number in a range."""
        value = self._left.pop(name, None)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise invalid(f"{name} is {shown(value)}, but it must be a whole number from {low} to {high}", name)
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """A number in a range."""
        value = self._left.pop(name, None)
        if value is None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
            raise invalid(f"{name} is {shown(value)}, but it must be a number from {low:g} to {high:g}", name)
        return float(value)

    def seconds(self, name: str) -> float | None:
        """A number of seconds above 0."""
        return _checked_seconds(self._left.pop(name, None), name)

    def word(self, name: str, default: str, allowed: Sequence[str]) -> str:
        """One of a few words."""
        value = self._left.pop(name, None)
        if value is None:
            return default
        if not isinstance(value, str) or value not in allowed:
            raise invalid(f"{name} is {shown(value)}, but it must be one of {', '.join(allowed)}", name)
        return value

    def adapters(self, name: str, served: Sequence[str]) -> Adapters:
        """Adapters that are served, see `read_adapters`."""
        value = self._left.pop(name, None)
        try:
            found = read_adapters("" if value is None else value)
            require_adapters(found, served)
        except UsageError as error:
            raise invalid(f"{name}: {error}", name) from None
        return found

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self._left.pop(name, None)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise invalid(f"{name} is {shown(value)}, but it must be true or false", name)
        return value


def _checked_seconds(value: object, name: str) -> float | None:
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e9:
        raise invalid(f"{name} is {shown(value)}, but it must be a number of seconds above 0", name)
    return float(value)


def _header_seconds(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    return _checked_seconds(seconds if math.isfinite(seconds) else text, "X-SLO-Seconds")


def _smaller(*seconds: float | None) -> float | None:
    return min((each for each in seconds if each is not None), default=None)
