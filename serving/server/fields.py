"""Fields of generations and edits. No torch.

Names and meanings are those of OpenAI's images API; `seed`, `num_inference_steps`, `guidance_scale`, `negative_prompt`,
`progress`, `slo`, `priority`, `lora`, `cache`, `fallback` (cascades) and the fields of edits that OpenAI lacks are our
own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, WithJsonSchema

from ...data.adapters import MAX_SCALE, Adapters, read_adapters, require_adapters
from ...data.checks import require_prompt
from ...data.edits import MAX_DILATE, MAX_FEATHER_PX
from ...data.requests import MAX_PRIORITY, MAX_SEED, Fallback
from ...data.templates import TEMPLATE_KINDS
from ..families.references import ReferenceRule
from ..models.defaults import ModelDefaults
from .body import MAX_NAME, NO_EFFECT, Body, FieldType, choice, integer, number, shown, text
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


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Properties of the served model that requests are checked against.

    Attributes:
        name: name of the served model.
        aliases: other names that clients may use.
        defaults: values of fields that a request leaves out.
        size_multiple: width and height must be multiples of it.
        references: which references it takes; None if it takes none.
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
    references: ReferenceRule | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model, its own first."""
        return self.name, *self.aliases


class ImageBody(Body):
    """Body of a request for images from a model.

    Args:
        model: facts about the served model.
        fields: as in `Body`.
    """

    def __init__(self, model: ModelFacts, fields: Mapping[str, FieldType]) -> None:
        super().__init__(fields)
        self._facts = model

    def read(self, body: Mapping[str, Any]) -> Any:
        """Check a body as `Body.read`; raise ApiError (404) first if its model is not served."""
        check_model(body.get("model"), self._facts)
        return super().read(body)

    def refuse(self, name: str, value: Any) -> None:
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
        raise invalid(message, name[:MAX_NAME], code="unknown_parameter")


def check_model(name: object, model: ModelFacts) -> None:
    """Raise ApiError (404) if this is the name of a model that is not served; what is no text is checked elsewhere."""
    if isinstance(name, str) and name not in model.names:
        raise ApiError(
            404,
            f"the model {shown(name)} is not served here, but {', '.join(model.names)}",
            code="model_not_found",
            param="model",
        )


@cache
def generation_fields(model: ModelFacts, limits: Limits) -> ImageBody:
    """Return the fields of `POST /v1/images/generations`."""
    sizes = ["auto", *map(str, model.defaults.resolutions)]
    size = {"pattern": "^(auto|[1-9][0-9]{0,5}x[1-9][0-9]{0,5})$", "examples": sizes}
    own = {
        "size": text("size", 32, default="auto", schema=size),
        "moderation": choice("auto", "low"),
        "style": choice("vivid", "natural"),
    }
    return ImageBody(model, _shared(model, limits) | own)


@cache
def edit_fields(model: ModelFacts, limits: Limits) -> ImageBody:
    """Return the fields of `POST /v1/images/edits`, without its files."""
    about = "auto, or that of the image"
    if model.references is not None:
        about += "; any size if the images are references"
    own: dict[str, FieldType] = {
        "size": text("size", 32, default="auto", schema={"description": about, "examples": ["auto"]}),
        "input_fidelity": _fidelity(model),
        "strength": number(above=0, high=1, default=None),
        "paste": (bool, True),
        "feather_px": integer(0, MAX_FEATHER_PX, 0),
        "reuse": (bool, model.reuses_templates),
        "template_kind": choice(*TEMPLATE_KINDS),
        "template_prompt": text("template_prompt", limits.max_prompt, default=""),
        "template_seed": integer(0, MAX_SEED, 0),
        "full_steps": integer(0, limits.max_steps, 0),
        "dilate": integer(0, MAX_DILATE, 0),
    }
    return ImageBody(model, _shared(model, limits) | own)


def _fidelity(model: ModelFacts) -> FieldType:
    if model.references is None or model.references.fit_low is None:
        return choice("low", "high", description=NO_EFFECT)
    return choice("low", "high", default="high", description="low: references have at most 512x512 pixels")


def _shared(model: ModelFacts, limits: Limits) -> dict[str, FieldType]:
    """Return the fields that generations and edits share."""
    if model.cascade:
        usual = [name for name, share in QUALITIES.items() if share == 1]
        own = {
            "quality": choice(*usual, description="each model of a cascade takes its own steps"),
            "partial_images": integer(0, 0, 0, description="a cascade has none"),
            "fallback": choice(*get_args(Fallback)),
        }
    else:
        own = {
            "quality": choice(*QUALITIES, default="auto"),
            "partial_images": integer(0, MAX_PARTIALS, 0),
            "num_inference_steps": integer(1, limits.max_steps, None),
            "guidance_scale": number(low=0, high=100, default=model.defaults.guidance_scale),
        }
    if model.adapters:
        own[LORA] = _adapters(model.adapters)
    return {
        "prompt": text("prompt", limits.max_prompt, default=..., check=require_prompt, schema={"pattern": r"\S"}),
        "model": text("model", MAX_USER, schema={"enum": list(model.names)}),
        "n": integer(1, MAX_IMAGES, 1),
        "response_format": choice(*get_args(ResponseFormat)),
        "output_format": choice(*get_args(OutputFormat)),
        "output_compression": integer(0, 100, 100),
        "background": choice("auto", "opaque", description="images have no alpha channel"),
        "stream": (bool, False),
        "user": text("user", MAX_USER),
        "safety_identifier": text("safety_identifier", MAX_USER, schema={"description": NO_EFFECT}),
        "seed": integer(0, MAX_SEED, None),
        "negative_prompt": text("negative_prompt", limits.max_prompt),
        "progress": (bool, False),
        "cache": (bool, True),
        "slo": number(above=0, below=1e9, default=None),
        "priority": integer(-MAX_PRIORITY, MAX_PRIORITY, 0),
        **own,
    }


def _adapters(served: Sequence[str]) -> FieldType:
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


def unsupported(name: str) -> ApiError | None:
    """Return the error for an unsupported field of OpenAI, or for a part of one (`svg[model]` in forms); else None."""
    field = name.partition("[")[0]
    if field not in UNSUPPORTED_FIELDS:
        return None
    return invalid(
        f"the field {field} is not supported: {UNSUPPORTED_FIELDS[field]}", field, code="unsupported_parameter"
    )
