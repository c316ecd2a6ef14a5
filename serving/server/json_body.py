"""Strict parsing of JSON bodies: whatever two parsers could read differently is refused."""

import json
from typing import Any

from starlette.requests import Request

from .errors import invalid, wrong_type


async def read_object(request: Request) -> dict[str, Any]:
    """Return the object in the body of a request. Raises ApiError as `parse_object` does, or if its type is not JSON.

    Pages of other sites cannot send this content type without a CORS preflight.
    """
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise wrong_type(content_type, "JSON (curl: -H 'Content-Type: application/json')")
    return parse_object(await request.body())


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a body that must be a JSON object.

    Raises:
        ApiError: the body is not valid UTF-8 or JSON (NaN, Infinity and repeated keys are refused), is nested too
            deeply, or is no object.
    """
    if body.startswith(b"\xef\xbb\xbf"):
        raise invalid("the body begins with a byte order mark, but it must be plain UTF-8", code="invalid_json")
    try:
        content = json.loads(body.decode(), parse_constant=_refuse_constant, object_pairs_hook=_refuse_repeated_keys)
    except RecursionError:
        raise invalid("the body is nested too deeply", code="invalid_json") from None
    except UnicodeDecodeError:
        raise invalid("the body is not valid UTF-8", code="invalid_json") from None
    except ValueError as error:
        raise invalid(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(content, dict):
        raise invalid(
            f"the body is a {_NAMES.get(type(content), 'value')}, but it must be an object", code="invalid_json"
        )
    return content


_NAMES = {list: "list", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {name[:80]!r} comes twice")
        found[name] = value
    return found
