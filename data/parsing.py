"""Validation of external input by pydantic against the types of a class, with errors of one line."""

import json
import reprlib
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import PlainValidator, TypeAdapter, ValidationError

from .errors import UsageError
from .resolution import Resolution
from .resolution import parse as parse_resolution

T = TypeVar("T")
NamedResolution = Annotated[Resolution, PlainValidator(lambda text: parse_resolution(str(text)))]
"""A resolution that files name, as "128x192"."""

_IN_OUR_WORDS = {
    "be an object": "be a mapping",
    "be a valid array": "be a list",
    "be a valid string": "be text",
    "be a valid boolean": "be true or false",
    "be a valid number": "be a number",
    "be a valid integer": "be a whole number",
    "be greater than or equal to 0": "not be negative",
    "have at least 1 character": "not be empty",
}
"""Wording of pydantic's messages, mapped to that of our own."""


def parse(kind: type[T], content: Any, where: str = "", remedy: str = "") -> T:
    """Return the content of a JSON or TOML file as an instance of a class. Validation is strict: text is not a number.

    Args:
        kind: a dataclass or a pydantic model.
        content: mappings, lists, text and numbers.
        where: beginning of messages, such as the name of the file.
        remedy: end of messages, such as how to make the file again.

    Raises:
        UsageError: a field is missing, unknown to a class that forbids others, or not of its type.
    """
    try:
        return _adapter(kind).validate_json(json.dumps(content, default=str), strict=True)
    except ValidationError as error:
        message = ": ".join(filter(None, (where, _first_problem(error, kind))))
        raise UsageError("; ".join(filter(None, (message, remedy)))) from error


@cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind)


def _first_problem(error: ValidationError, kind: type) -> str:
    problem = error.errors(include_url=False)[0]
    place = ".".join(map(str, problem["loc"]))
    if problem["type"] == "value_error":
        message = problem["msg"].removeprefix("Value error, ")
        return f"{place}: {message}" if place else message
    if problem["type"] == "missing":
        return f"{place!r} is missing"
    if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        names = getattr(kind, "__dataclass_fields__", kind.__annotations__)
        fields = ", ".join(name for name in names if not name.startswith("_"))
        return f"unknown key {place!r}" + (f"; known: {fields}" if len(problem["loc"]) == 1 else "")
    given, allowed = reprlib.repr(problem["input"]), problem["msg"].partition(" should ")[2]
    return f"{place or 'content'} is {given}, but it must {_IN_OUR_WORDS.get(allowed, allowed)}"
