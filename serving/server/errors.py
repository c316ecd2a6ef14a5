"""Errors of the API: a JSON object with message, type, parameter and code, as OpenAI's clients read them."""

from collections.abc import Mapping
from functools import partial
from typing import Any

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """What a client is answered instead of what it asked for.

    Args:
        status: of HTTP.
        message: one line; what was given and what is allowed.
        code: a word that programs can tell it by.
        param: the field that is wrong, if it is one.
        headers: of the answer, such as `Retry-After`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        # It may be a key of the client's JSON: halves of surrogate pairs cannot be sent.
        self.param = None if param is None else param.encode("utf-8", "backslashreplace").decode()
        self.headers = dict(headers or {})

    def __reduce__(self) -> tuple[Any, ...]:
        # As exceptions are pickled, arguments by name would be left out.
        return partial(ApiError, code=self.code, param=self.param, headers=self.headers), (self.status, self.message)

    def to_json(self) -> dict[str, Any]:
        """The body of the answer, or of an event of a stream."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Something in the request is not allowed."""
    return ApiError(400, message, code=code, param=param)


def wrong_type(given: str, wanted: str) -> ApiError:
    """The body is not said to be what it must be; `given` is its content type, empty where there is none."""
    what = f"is said to be {given[:80]!r}" if given else "has no content type"
    return ApiError(415, f"the body {what}, but it must be {wanted}", code="unsupported_media_type")


def overloaded(message: str, code: str, retry_after_s: float) -> ApiError:
    """Nothing is wrong with the request, but there is no room for it now."""
    # The client of OpenAI retries by itself only where this is at most 120 s.
    seconds = min(120, max(1, round(retry_after_s)))
    return ApiError(429, message, code=code, headers={"Retry-After": str(seconds)})


def cancelled(message: str) -> ApiError:
    """Somebody has taken it back: a client that asks again by itself would draw it all the same."""
    return ApiError(409, message, code="cancelled", headers={"x-should-retry": "false"})


def took_too_long(limit_s: float) -> ApiError:
    """The request was given up."""
    return ApiError(504, f"it took more than {limit_s:g} s", code="timeout", headers={"x-should-retry": "false"})


def too_late(reason: str) -> ApiError:
    """The request cannot be served in time any more, so that asking again would be in vain."""
    return ApiError(503, reason, code="deadline_unreachable", headers={"x-should-retry": "false"})
