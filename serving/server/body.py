"""Bodies of requests: pydantic models from which both checks and the JSON schema follow. No torch."""

import json
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from ...data.checks import require_text
from .errors import ApiError, invalid

FieldType = tuple[Any, Any]
"""Type and default of a field, as `pydantic.create_model` takes them."""
NO_EFFECT = "without effect"
"""Description of fields that are accepted and ignored; other descriptions give the reason of an error."""
MAX_NAME = 256
"""Characters of a field's name that an error repeats."""
_MAX_SHOWN = 60
_VALUE = re.compile(r"true|false|-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,30})?([eE][-+]?[0-9]{1,3})?", re.ASCII)


class Body:
    """A kind of body: its fields, with the checks and the schema that follow from them.

    Args:
        fields: type and default of every field, as `integer` and the like return them.
    """

    def __init__(self, fields: Mapping[str, FieldType]) -> None:
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
        del schema["title"]
        return schema

    def from_text(self, name: str, text: str) -> Any:
        """Return the value of a field that a form or a query has as text: a number, true or false if it is one."""
        kind = self.schema["properties"].get(name, {}).get("type")
        return json.loads(text) if kind in ("integer", "number", "boolean") and _VALUE.fullmatch(text) else text

    def read_texts(self, texts: Mapping[str, Any]) -> Any:
        """Check fields of a form or a query, as `read` does. Unknown fields, and files, are ignored."""
        found = {name: texts.get(name) for name in self._model.model_fields}
        return self.read({name: self.from_text(name, each) for name, each in found.items() if isinstance(each, str)})

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
                self.refuse(name, value)
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

    def refuse(self, name: str, value: Any) -> None:
        """Raise ApiError for a field that is not among these."""
        raise invalid(f"the field {shown(name)} is unknown", name[:MAX_NAME], code="unknown_parameter")


def integer(low: int, high: int, default: int | None, *, description: str | None = None) -> FieldType:
    """Return a field of a whole number in a range."""
    return Annotated[int, Field(ge=low, le=high, description=description)], default


def number(
    *,
    default: float | None,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
) -> FieldType:
    """Return a field of a finite number: from `low` to `high`, or above `above` and at most `high` or below `below`."""
    return Annotated[float, Field(ge=low, gt=above, le=high, lt=below)], default


def choice(*allowed: str, default: Any = None, description: str | None = None) -> FieldType:
    """Return a field of one of a few words; the default is the first."""
    return Annotated[Literal[allowed], Field(description=description)], default or allowed[0]  # type: ignore[valid-type]


def text(
    name: str,
    most: int,
    *,
    default: Any = None,
    check: Callable[[str, str], None] | None = None,
    schema: dict[str, Any] | None = None,
) -> FieldType:
    """Return a field of text. `check` may raise UsageError; `schema` has additional entries of the JSON schema."""

    def checked(value: object) -> object:
        if isinstance(value, str):
            require_text(name, value)
            if check is not None:
                check(name, value)
        return value

    return Annotated[str, Field(max_length=most, json_schema_extra=schema), BeforeValidator(checked)], default


def _allowed(schema: Mapping[str, Any]) -> str:
    """Return a phrase that describes the allowed values of a schema and the reason, for error messages."""
    if "const" in schema:
        allowed = schema["const"]
    elif "enum" in schema:
        allowed = f"one of {', '.join(schema['enum'])}"
    elif schema["type"] == "integer":
        allowed = f"a whole number from {schema['minimum']} to {schema['maximum']}"
    elif schema["type"] == "number":
        low, high = schema.get("minimum"), schema.get("maximum")
        if low is not None:
            allowed = f"a number from {low:g} to {high:g}"
        else:
            end = f"below {schema['exclusiveMaximum']:g}" if high is None else f"at most {high:g}"
            allowed = f"a number above {schema['exclusiveMinimum']:g} and {end}"
    else:
        allowed = {"boolean": "true or false", "string": "a string"}[schema["type"]]
    reason = schema.get("description", NO_EFFECT)
    return allowed if reason == NO_EFFECT else f"{allowed}: {reason}"


def shown(value: object) -> str:
    """Return a value as error messages show it: on one line, and short."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
