"""Fields of generations and edits: pydantic models from which both checks and `/openapi.json` follow. No torch.

Names and meanings are those of OpenAI's images API; `seed`, `num_inference_steps`, `guidance_scale`, `negative_prompt`,
`progress`, `slo`, `lora`, `cache`, `fallback` (cascades) and the fields of edits that OpenAI lacks are ours.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema, create_model

from ...data.adapters import MAX_SCALE, Adapters, read_adapters, require_adapters
from ...data.checks import require_prompt, require_text
from ...data.edits import MAX_DILATE, MAX_FEATHER_PX
from ...data.requests import MAX_SEED, Fallback
from ...data.templates import TEMPLATE_KINDS
from ..models.defaults import ModelDefaults
from .errors import ApiError, invalid
from .limits import Limits

OutputFormat = Literal["png", "jpeg", "webp"]
ResponseFormat = Literal["b64_json", "url"]
LORA = "lora"
"""Field in which requests name adapters (LoRA)."""
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
"""Number of steps by quality, as a multiple of the model's default."""
_OWN_STEPS = ("num_inference_steps", "guidance_scale")
"""Fields that a cascade does not accept, because each of its models has its own values."""
RECORD_FIELDS = ("template_kind", "template_prompt", "template_seed", "full_steps", "dilate")
"""Fields of edits that read a record."""
_ADAPTERS = (LORA, "loras", "adapter", "adapters")
UNSUPPORTED_FIELDS = {
    "complexity": "nothing is planned before an image is drawn; quality says how many steps it takes",
    "frame_count": "images are not animated",
    "frame_duration_ms": "images are not animated",
    "svg": "images are made of pixels: output_format is png, jpeg or webp",
    "markup": "a mask says what is edited",
}
"""OpenAI's fields that are refused, with the reason."""
_NO_EFFECT = "without effect"
_MAX_SHOWN = 60


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Properties of the served model that requests are checked against.

    Attributes:
        name: name of the served model.
        aliases: other names that clients may use.
        defaults: values of fields that a request leaves out.
        size_multiple: width and height must be multiples of it.
        dtype: dtype of the weights, for clients that ask about the model.
        reuses_templates: whether edits read the records of their templates by default.
        adapters: names of adapters that requests may use.
        cascade: names of the light and the heavy model of a cascade, each with its own steps and guidance; empty for a
            single model.
    """

    name: str
    defaults: ModelDefaults
    aliases: tuple[str, ...] = ()
    size_multiple: int = 8
    dtype: str = ""
    reuses_templates: bool = False
    adapters: tuple[str, ...] = ()
    cascade: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model, its own first."""
        return self.name, *self.aliases


class Fields:
    """Fields of one kind of body, for one model and its limits.

    Args:
        model: properties of the served model.
        fields: type and default of every field, as `pydantic.create_model` takes them.
    """

    def __init__(self, model: ModelFacts, fields: Mapping[str, tuple[Any, Any]]) -> None:
        self._facts = model
        config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())
        self._model: type[BaseModel] = create_model("Body", __config__=config, **dict(fields))  # type: ignore[call-overload]

    @cached_property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the body."""
        schema = self._model.model_json_schema()
        for each in schema["properties"].values():
            each.pop("title", None)
            if each.get("default", ...) is None:
                del each["default"]
        return {name: schema[name] for name in ("type", "properties", "required", "additionalProperties")}

    @cached_property
    def values(self) -> frozenset[str]:
        """Names of the fields that are numbers, true or false, which a form holds as text."""
        kinds = {"integer", "number", "boolean"}
        return frozenset(name for name, each in self.schema["properties"].items() if each.get("type") in kinds)

    def read(self, body: Mapping[str, Any]) -> Any:
        """Check a body; null is the same as a missing field.

        Returns:
            An object with all fields as attributes; `model_fields_set` has the names of those that were given.

        Raises:
            ApiError: a field is missing, not allowed or unknown.
        """
        known = {name: value for name, value in body.items() if name in self._model.model_fields and value is not None}
        try:
            found = self._model.model_validate(known)
        except ValidationError as error:
            raise self._refusal(error.errors(include_url=False)[0]) from None
        for name, value in body.items():
            if name not in self._model.model_fields:
                self._refuse(name, value)
        return found

    def _refusal(self, problem: Mapping[str, Any]) -> ApiError:
        name, value = str(problem["loc"][0]), problem["input"]
        if problem["type"] == "missing":
            return invalid(f"{name} is missing", name, code="missing_required_parameter")
        if problem["type"] == "value_error":
            return invalid(str(problem["ctx"]["error"]), name)
        schema = self.schema["properties"][name]
        if problem["type"] == "string_too_long":
            most = schema["maxLength"]
            return invalid(f"{name} has {len(value):,} characters, but it may have at most {most:,}", name)
        return invalid(f"{name} is {shown(value)}, but it must be {_allowed(schema)}", name)

    def _refuse(self, name: str, value: Any) -> None:
        """Raise ApiError for a field that is not among these, unless it is null and taken by other servers."""
        if (refusal := unsupported(name)) is not None:
            if value is None:
                return
            raise refusal
        if name in _OWN_STEPS and self._facts.cascade:
            if value is None:
                return
            own = f"each model of the cascade {self._facts.name} takes its own steps and guidance"
            raise invalid(f"{name} is given, but {own}", name)
        message = f"the field {shown(name)} is unknown"
        if name == LORA:
            message += ": no adapters are served here; psctl serve --adapter NAME=PATH lets requests name them"
        elif name in _ADAPTERS:
            message += f": requests name their adapters in the field {LORA}"
        raise invalid(message, name[:MAX_USER], code="unknown_parameter")


@cache
def generation_fields(model: ModelFacts, limits: Limits) -> Fields:
    """Return the fields of `POST /v1/images/generations`."""
    sizes = ["auto", *map(str, model.defaults.resolutions)]
    size = {"pattern": "^(auto|[1-9][0-9]{0,5}x[1-9][0-9]{0,5})$", "examples": sizes}
    own = {
        "size": _text("size", 32, default="auto", schema=size),
        "moderation": _choice("auto", "low"),
        "style": _choice("vivid", "natural"),
    }
    return Fields(model, _shared(model, limits) | own)


@cache
def edit_fields(model: ModelFacts, limits: Limits) -> Fields:
    """Return the fields of `POST /v1/images/edits`, without its files."""
    own: dict[str, tuple[Any, Any]] = {
        "size": _text(
            "size", 32, default="auto", schema={"description": "auto, or that of the image", "examples": ["auto"]}
        ),
        "input_fidelity": _choice("low", "high", description=_NO_EFFECT),
        "strength": _number(above=0, high=1, default=1.0),
        "paste": (bool, True),
        "feather_px": _integer(0, MAX_FEATHER_PX, 0),
        "reuse": (bool, model.reuses_templates),
        "template_kind": _choice(*TEMPLATE_KINDS),
        "template_prompt": _text("template_prompt", limits.max_prompt, default=""),
        "template_seed": _integer(0, MAX_SEED, 0),
        "full_steps": _integer(0, limits.max_steps, 0),
        "dilate": _integer(0, MAX_DILATE, 0),
    }
    return Fields(model, _shared(model, limits) | own)


def _shared(model: ModelFacts, limits: Limits) -> dict[str, tuple[Any, Any]]:
    """Return the fields that generations and edits share."""
    if model.cascade:
        usual = [name for name, share in QUALITIES.items() if share == 1]
        own = {
            "quality": _choice(*usual, description="each model of a cascade takes its own steps"),
            "partial_images": _integer(0, 0, 0, description="a cascade has none"),
            "fallback": _choice(*get_args(Fallback)),
        }
    else:
        own = {
            "quality": _choice(*QUALITIES, default="auto"),
            "partial_images": _integer(0, MAX_PARTIALS, 0),
            "num_inference_steps": _integer(1, limits.max_steps, None),
            "guidance_scale": _number(low=0, high=100, default=model.defaults.guidance_scale),
        }
    if model.adapters:
        own[LORA] = _adapters(model.adapters)
    return {
        "prompt": _text("prompt", limits.max_prompt, default=..., check=require_prompt, schema={"pattern": r"\S"}),
        "model": _text("model", MAX_USER, schema={"enum": list(model.names)}),
        "n": _integer(1, MAX_IMAGES, 1),
        "response_format": _choice(*get_args(ResponseFormat)),
        "output_format": _choice(*get_args(OutputFormat)),
        "output_compression": _integer(0, 100, 100),
        "background": _choice("auto", "opaque", description="images have no alpha channel"),
        "stream": (bool, False),
        "user": _text("user", MAX_USER),
        "safety_identifier": _text("safety_identifier", MAX_USER, schema={"description": _NO_EFFECT}),
        "seed": _integer(0, MAX_SEED, None),
        "negative_prompt": _text("negative_prompt", limits.max_prompt),
        "progress": (bool, False),
        "cache": (bool, True),
        "slo": _number(above=0, below=1e9, default=None),
        **own,
    }


def _integer(low: int, high: int, default: int | None, *, description: str | None = None) -> tuple[Any, Any]:
    return Annotated[int, Field(ge=low, le=high, description=description)], default


def _number(
    *,
    default: float | None,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
) -> tuple[Any, Any]:
    return Annotated[float, Field(ge=low, gt=above, le=high, lt=below)], default


def _choice(*allowed: str, default: str | None = None, description: str | None = None) -> tuple[Any, Any]:
    """Return a field of one of a few words; the default is the first."""
    return Annotated[Literal[allowed], Field(description=description)], default or allowed[0]  # type: ignore[valid-type]


def _text(
    name: str,
    most: int,
    *,
    default: Any = None,
    check: Callable[[str, str], None] | None = None,
    schema: dict[str, Any] | None = None,
) -> tuple[Any, Any]:
    """Return a field of text. `check` may raise UsageError; `schema` has additional entries of the JSON schema."""

    def checked(value: object) -> object:
        if isinstance(value, str):
            require_text(name, value)
            if check is not None:
                check(name, value)
        return value

    return Annotated[str, Field(max_length=most, json_schema_extra=schema), BeforeValidator(checked)], default


def _adapters(served: Sequence[str]) -> tuple[Any, Any]:
    def read(value: object) -> Adapters:
        try:
            found = read_adapters(value)
            require_adapters(found, served)
        except ValueError as error:
            raise ValueError(f"{LORA}: {error}") from None
        return found

    scale = {"type": "number", "minimum": -MAX_SCALE, "maximum": MAX_SCALE}
    one = {"type": "object", "required": ["name"], "properties": {"name": {"enum": list(served)}, "scale": scale}}
    text = {"type": "string", "description": "NAME[:SCALE], joined by +", "examples": [served[0]]}
    schema = {"anyOf": [text, {"type": "array", "items": one | {"additionalProperties": False}}]}
    return Annotated[Any, BeforeValidator(read), WithJsonSchema(schema)], ()


def _allowed(schema: Mapping[str, Any]) -> str:
    """Return a phrase that describes the allowed values of a schema and the reason, for error messages."""
    if "enum" in schema or "const" in schema:
        allowed = f"one of {', '.join(schema.get('enum') or [schema['const']])}"
    elif schema["type"] == "integer":
        allowed = f"a whole number from {schema['minimum']} to {schema['maximum']}"
    elif schema["type"] == "number":
        low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
        high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
        begin = f"from {low:g} to" if above is None else f"above {above:g} and"
        allowed = f"a number {begin} " + (f"{high:g}" if above is None else "")
        if above is not None:
            allowed += f"below {below:g}" if high is None else f"at most {high:g}"
    else:
        allowed = {"boolean": "true or false", "string": "a string"}[schema["type"]]
    reason = schema.get("description", _NO_EFFECT)
    return allowed if reason == _NO_EFFECT else f"{allowed}: {reason}"


def unsupported(name: str) -> ApiError | None:
    """Return the error for an unsupported field of OpenAI, or for a part of one (`svg[model]` in forms); else None."""
    field = name.partition("[")[0]
    if field not in UNSUPPORTED_FIELDS:
        return None
    return invalid(
        f"the field {field} is not supported: {UNSUPPORTED_FIELDS[field]}", field, code="unsupported_parameter"
    )


def shown(value: object) -> str:
    """Return a value as error messages show it: on one line, and short."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
