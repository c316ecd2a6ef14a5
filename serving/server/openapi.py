"""Schemas in `/openapi.json` of bodies, which `protocol` checks by hand, and of errors. No torch."""

from collections.abc import Sequence
from typing import Any, get_args

from ...data.adapters import MAX_SCALE
from ...data.edits import MAX_DILATE, MAX_FEATHER_PX
from ...data.requests import MAX_SEED, Fallback
from ...data.templates import TEMPLATE_KINDS
from .fields import LORA, MAX_USER
from .limits import Limits
from .protocol import GENERATIONS, MAX_IMAGES, MAX_PARTIALS, QUALITIES, ModelFacts

MAX_LISTED = 100
LEAST_FILE_S, MOST_FILE_S = 3600, 30 * 24 * 3600
"""Shortest and longest time for which a client may have a file kept; the longest is the default."""
_ERROR = {
    "description": "an error",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["error"],
                "properties": {
                    "error": {
                        "type": "object",
                        "required": ["message", "type", "param", "code"],
                        "properties": {
                            "message": {"type": "string"},
                            "type": {"type": "string"},
                            "param": {"type": ["string", "null"]},
                            "code": {"type": "string"},
                        },
                    }
                },
            }
        }
    },
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the error responses of a route, which share one schema."""
    return dict.fromkeys(statuses, _ERROR)


def generation_body(model: ModelFacts, limits: Limits) -> dict[str, Any]:
    """Return the body of `POST /v1/images/generations`, for `openapi_extra`."""
    sizes = ["auto", *map(str, model.defaults.resolutions)]
    properties: dict[str, Any] = {
        **_shared(model, limits),
        "size": {"type": "string", "pattern": "^(auto|[1-9][0-9]{0,5}x[1-9][0-9]{0,5})$", "examples": sizes},
        "moderation": {"enum": ["auto", "low"]},
        "style": {"enum": ["vivid", "natural"]},
    }
    schema = {"type": "object", "required": ["prompt"], "properties": properties, "additionalProperties": False}
    return body_of(schema)


def edit_body(model: ModelFacts, limits: Limits) -> dict[str, Any]:
    """Return the body of `POST /v1/images/edits`, for `openapi_extra`. Some clients call the image `image[]`."""
    file = {"type": "string", "format": "binary"}
    properties: dict[str, Any] = {
        "image": file,
        "mask": file,
        **_shared(model, limits),
        "size": {"type": "string", "description": "auto, or what the image has", "examples": ["auto"]},
        "input_fidelity": {"enum": ["low", "high"], "description": "without effect"},
        "strength": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "paste": {"type": "boolean"},
        "feather_px": _integer(0, MAX_FEATHER_PX),
        "reuse": {"type": "boolean", "default": True} if model.reuses_templates else {"enum": [False]},
    }
    if model.reuses_templates:
        properties |= {
            "template_kind": {"enum": list(TEMPLATE_KINDS)},
            "template_prompt": {"type": "string", "maxLength": limits.max_prompt},
            "template_seed": _integer(0, MAX_SEED),
            "full_steps": _integer(0, limits.max_steps),
            "dilate": _integer(0, MAX_DILATE),
        }
    schema = {"type": "object", "required": ["image", "prompt"], "properties": properties}
    return body_of(schema, "multipart/form-data")


def _shared(model: ModelFacts, limits: Limits) -> dict[str, Any]:
    own: dict[str, Any] = {
        "quality": {"enum": list(QUALITIES)},
        "num_inference_steps": _integer(1, limits.max_steps),
        "guidance_scale": {"type": "number", "minimum": 0, "maximum": 100},
    }
    if model.cascade:
        usual = [name for name, share in QUALITIES.items() if share == 1]
        own = {
            "quality": {"enum": usual},
            "partial_images": _integer(0, 0),
            "fallback": {"enum": list(get_args(Fallback))},
        }
    if model.adapters:
        own[LORA] = _lora(model.adapters)
    return {
        "prompt": {"type": "string", "pattern": r"\S", "maxLength": limits.max_prompt},
        "model": {"enum": list(model.names)},
        "n": _integer(1, MAX_IMAGES),
        "response_format": {"enum": ["b64_json", "url"]},
        "output_format": {"enum": ["png", "jpeg", "webp"]},
        "output_compression": _integer(0, 100),
        "background": {"enum": ["auto", "opaque"]},
        "stream": {"type": "boolean"},
        "partial_images": _integer(0, MAX_PARTIALS),
        "user": {"type": "string", "maxLength": MAX_USER},
        "safety_identifier": {"type": "string", "maxLength": MAX_USER, "description": "without effect"},
        "seed": _integer(0, MAX_SEED),
        **own,
        "negative_prompt": {"type": "string", "maxLength": limits.max_prompt},
        "progress": {"type": "boolean"},
        "cache": {"type": "boolean"},
        "slo": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e9},
    }


def _lora(served: Sequence[str]) -> dict[str, Any]:
    scale = {"type": "number", "minimum": -MAX_SCALE, "maximum": MAX_SCALE}
    one = {"type": "object", "required": ["name"], "properties": {"name": {"enum": list(served)}, "scale": scale}}
    text = {"type": "string", "description": "NAME[:SCALE], joined by +", "examples": [served[0]]}
    return {"anyOf": [text, {"type": "array", "items": one | {"additionalProperties": False}}]}


def batch_body() -> dict[str, Any]:
    """Return the body of `POST /v1/batches`, for `openapi_extra`."""
    properties: dict[str, Any] = {
        "input_file_id": {"type": "string"},
        "endpoint": {"enum": [GENERATIONS]},
        "completion_window": {"enum": ["24h"]},
        "metadata": {
            "type": ["object", "null"],
            "maxProperties": 16,
            "propertyNames": {"maxLength": 64},
            "additionalProperties": {"type": "string", "maxLength": 512},
        },
    }
    required = ["input_file_id", "endpoint"]
    return body_of({"type": "object", "required": required, "properties": properties, "additionalProperties": False})


def file_body() -> dict[str, Any]:
    """Return the body of `POST /v1/files`, for `openapi_extra`."""
    properties: dict[str, Any] = {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"enum": ["batch"]},
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": _integer(LEAST_FILE_S, MOST_FILE_S),
    }
    schema = {"type": "object", "required": ["file", "purpose"], "properties": properties}
    return body_of(schema, "multipart/form-data")


def page_query() -> dict[str, Any]:
    """Return the query parameters of lists, for `openapi_extra`."""
    limit, after = _integer(1, MAX_LISTED), {"type": "string"}
    fields = (("limit", limit), ("after", after))
    return {"parameters": [{"name": name, "in": "query", "schema": schema} for name, schema in fields]}


def body_of(schema: dict[str, Any], media_type: str = "application/json") -> dict[str, Any]:
    """Return a schema as the body of a route, for `openapi_extra`."""
    return {"requestBody": {"required": True, "content": {media_type: {"schema": schema}}}}


def _integer(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}
