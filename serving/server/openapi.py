"""Bodies and errors in `/openapi.json`. No torch."""

from typing import Any

from .fields import OF_RECORDS, ModelFacts, edit_fields, generation_fields
from .limits import Limits
from .protocol import GENERATIONS

MAX_LISTED = 100
LEAST_FILE_S, MOST_FILE_S = 3600, 30 * 24 * 3600
"""How long a client may want a file to be kept; if it does not say it, the longest."""
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
    """The errors of a route, in the one form that they all have."""
    return dict.fromkeys(statuses, _ERROR)


def generation_body(model: ModelFacts, limits: Limits) -> dict[str, Any]:
    """The body of `POST /v1/images/generations`, for `openapi_extra`."""
    return body_of(generation_fields(model, limits).schema)


def edit_body(model: ModelFacts, limits: Limits) -> dict[str, Any]:
    """The body of `POST /v1/images/edits`; several clients call the image `image[]`."""
    schema = edit_fields(model, limits).schema
    file = {"type": "string", "format": "binary"}
    properties = {"image": file, "mask": file, **schema["properties"]}
    if not model.reuses_templates:
        properties["reuse"] = {"enum": [False]}
        properties = {name: each for name, each in properties.items() if name not in OF_RECORDS}
    required = ["image", *schema["required"]]
    return body_of({"type": "object", "required": required, "properties": properties}, "multipart/form-data")


def batch_body() -> dict[str, Any]:
    """The body of `POST /v1/batches`."""
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
    """The body of `POST /v1/files`."""
    properties: dict[str, Any] = {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"enum": ["batch"]},
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": _whole(LEAST_FILE_S, MOST_FILE_S),
    }
    schema = {"type": "object", "required": ["file", "purpose"], "properties": properties}
    return body_of(schema, "multipart/form-data")


def page_query() -> dict[str, Any]:
    """The query of lists."""
    limit, after = _whole(1, MAX_LISTED), {"type": "string"}
    fields = (("limit", limit), ("after", after))
    return {"parameters": [{"name": name, "in": "query", "schema": schema} for name, schema in fields]}


def body_of(schema: dict[str, Any], media_type: str = "application/json") -> dict[str, Any]:
    """A schema as the body of a route, for `openapi_extra`."""
    return {"requestBody": {"required": True, "content": {media_type: {"schema": schema}}}}


def _whole(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}
