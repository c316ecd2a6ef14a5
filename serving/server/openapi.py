"""Requests and errors in `/openapi.json`, from the fields that check them (`body`). No torch."""

from typing import Any

from .body import Body
from .fields import RECORD_FIELDS, ModelFacts, edit_fields
from .limits import Limits

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


def body_of(body: Body) -> dict[str, Any]:
    """Return a body of JSON, for `openapi_extra`."""
    return _request_body(body.schema, "application/json")


def form_of(body: Body, *files: str) -> dict[str, Any]:
    """Return a form, for `openapi_extra`: its files, of which the first is required, and its fields."""
    return _request_body(_with_files(body, {"type": "string", "format": "binary"}, *files), "multipart/form-data")


def _with_files(body: Body, file: dict[str, Any], *names: str) -> dict[str, Any]:
    properties = dict.fromkeys(names, file) | body.schema["properties"]
    return {"type": "object", "required": [names[0], *body.schema["required"]], "properties": properties}


def edit_bodies(model: ModelFacts, limits: Limits) -> dict[str, Any]:
    """Return the bodies of `POST /v1/images/edits`, for `openapi_extra`: a form, in which some clients call the image
    `image[]`, and JSON, in which some call it `images`.
    """
    fields = edit_fields(model, limits)
    as_text = {"type": "string", "description": "a data URL, or base64", "contentEncoding": "base64"}
    bodies = form_of(fields, "image", "mask")
    contents = bodies["requestBody"]["content"]
    contents["application/json"] = {"schema": _with_files(fields, as_text, "image", "mask")}
    for content in contents.values():
        properties = content["schema"]["properties"]
        if model.references is not None:
            properties["image"] = {"type": "array", "items": properties["image"], "maxItems": model.references.most}
        if not model.reuses_templates:
            properties["reuse"] = {"enum": [False]}
            for name in RECORD_FIELDS:
                del properties[name]
    return bodies


def query_of(fields: Body) -> dict[str, Any]:
    """Return query parameters, for `openapi_extra`."""
    found = fields.schema["properties"].items()
    return {"parameters": [{"name": name, "in": "query", "schema": schema} for name, schema in found]}


def _request_body(schema: dict[str, Any], media_type: str) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {media_type: {"schema": schema}}}}
