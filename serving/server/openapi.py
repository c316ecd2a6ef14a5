"""Bodies and errors in `/openapi.json`. No torch."""

from typing import Any

from .fields import RECORD_FIELDS, ModelFacts, edit_fields, generation_fields
from .limits import Limits
from .protocol import GENERATIONS

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
    return body_of(generation_fields(model, limits).schema)


def edit_body(model: ModelFacts, limits: Limits) -> dict[str, Any]:
    """Return the body of `POST /v1/images/edits`, for `openapi_extra`. Some clients call the image `image[]`."""
    schema = edit_fields(model, limits).schema
    file = {"type": "string", "format": "binary"}
    properties = {"image": file, "mask": file, **schema["properties"]}
    if not model.reuses_templates:
        properties["reuse"] = {"enum": [False]}
        properties = {name: each for name, each in properties.items() if name not in RECORD_FIELDS}
    required = ["image", *schema["required"]]
    return body_of({"type": "object", "required": required, "properties": properties}, "multipart/form-data")


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
