"""Errors of the API: JSON objects with message, type, parameter and code, as OpenAI's clients read them."""

from collections.abc import Mapping
from functools import partial
from typing import Any

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Error response to a client.

    Args:
        status: HTTP status.
        message: one line that says what was given and what is allowed.
        code: identifier of the error for programs.
        param: the wrong field; None if the error is about no single field.
        headers: headers of the response, such as `Retry-After`.
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
        # By default, pickling an exception leaves out keyword arguments.
        return partial(ApiError, code=self.code, param=self.param, headers=self.headers), (self.status, self.message)

    def to_json(self) -> dict[str, Any]:
        """Return the body of the response, or of an event of a stream."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Return the error for a request with an invalid value (400)."""
    return ApiError(400, message, code=code, param=param)


def wrong_type(given: str, wanted: str) -> ApiError:
    """Return the error for a wrong content type (415); `given` is that of the body, empty if it has none."""
    what = f"is said to be {given[:80]!r}" if given else "has no content type"
    return ApiError(415, f"the body {what}, but it must be {wanted}", code="unsupported_media_type")


def overloaded(message: str, code: str, retry_after_s: float) -> ApiError:
    """Return the error for a valid request for which there is no room now (429)."""
    # OpenAI's client retries automatically only if this is at most 120 s.
    seconds = min(120, max(1, round(retry_after_s)))
    return ApiError(429, message, code=code, headers={"Retry-After": str(seconds)})


def not_ready(reason: str) -> ApiError:
    """Return the error for a request that arrives while none can be drawn (503)."""
    return ApiError(503, reason, code="not_ready", headers={"Retry-After": "5"})


def cancelled(message: str) -> ApiError:
    """Return the error for a cancelled request (409). It forbids automatic retries, which would draw it after all."""
    return ApiError(409, message, code="cancelled", headers={"x-should-retry": "false"})


def took_too_long(limit_s: float) -> ApiError:
    """Return the error for a request that was aborted after the time limit (504)."""
    return ApiError(504, f"it took more than {limit_s:g} s", code="timeout", headers={"x-should-retry": "false"})


def too_late(reason: str) -> ApiError:
    """Return the error for a request whose deadline cannot be met (503). It forbids automatic retries."""
    return ApiError(503, reason, code="deadline_unreachable", headers={"x-should-retry": "false"})
