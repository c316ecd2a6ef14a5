"""Middleware in front of the API: checks keys and host names, and bounds the size and time of requests. Plain ASGI, no
torch.
"""

import asyncio
import contextlib
import json
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, TypeVar

from .errors import ApiError
from .keys import Keys
from .large_bodies import LargeBodies

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Result = TypeVar("Result")

BODY_WITHIN_S, SEND_WITHIN_S = 10.0, 30.0
LEAST_SENT, SENT_WITHIN_S = 16_384, 5.0
"""Bytes of a large body that a client must send within this many seconds."""
OPEN_PATHS = frozenset({"/", "/livez", "/readyz", "/health", "/ready", "/favicon.ico"})
"""Paths that need no key, as they reveal nothing about requests. The page asks for the key and sends it with its own
requests.
"""
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
ANY_ADDRESS = "*"
"""Host name that stands for every numeric address. DNS rebinding needs a name, so numeric addresses are safe."""
_IMAGE_PATH = re.compile(r"/v1/images/[^/]+/content")
"""Path that needs no key either: names of images cannot be guessed, and pages show images by URL."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}", re.ASCII)
_STATE_KEY = "psctl"
_MOST_HEAD = 32_768


@dataclass(frozen=True, slots=True)
class Caller:
    """Caller of a request, as the guards pass it on to the API.

    Attributes:
        request_id: id of the request.
        key: owner of its key: a name, or a digest of a key without a name.
        release_room: releases the room of a large body once it is parsed; otherwise the end of the response does.
    """

    request_id: str
    key: str
    release_room: Callable[[], Awaitable[None]]


class Guards:
    """Checks a request before the API receives it, and bounds the time that it takes to be read and answered.

    `caller_of` returns the caller, which is kept in the scope's state. Every response carries `X-Request-Id`.

    Args:
        app: the guarded application.
        keys: keys that are accepted.
        hosts: host names, without ports, and numeric addresses under which the server accepts requests; any other name
            is DNS rebinding. None accepts all.
        origins: origins of other sites whose pages may send requests, such as `https://app.example`.
        root_path: path under which a proxy serves this server, without a slash at its end. Requests may have it or not.
        max_body: largest size of a JSON body in bytes.
        large_paths: limits of large bodies by path, for paths to which they may be posted.
        on_answer: called with the scope, status and request id of every response.
    """

    def __init__(
        self,
        app: App,
        *,
        keys: Keys,
        hosts: Sequence[str] | None,
        origins: Sequence[str] = (),
        root_path: str = "",
        max_body: int,
        large_paths: MutableMapping[str, LargeBodies] | None = None,
        on_answer: Callable[[Scope, int, str], None] = lambda scope, status, request_id: None,
    ) -> None:
        self._app, self._keys = app, keys
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)
        self._origins, self._root_path = frozenset(origins), root_path
        self._max_body, self._large_paths, self._on_answer = max_body, large_paths or {}, on_answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # The API handles HEAD as GET; uvicorn leaves out the body.
        if is_head := scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        path = scope["path"]
        if root := self._root_path:
            if path.startswith(f"{root}/"):
                path = path.removeprefix(root)
            # As ASGI defines it, whether or not the proxy has removed it.
            scope = {**scope, "path": root + path, "root_path": root}
        headers = _Headers(scope["headers"])
        given_id = headers.get("x-request-id")
        request_id = given_id if given_id and _REQUEST_ID.fullmatch(given_id) else secrets.token_hex(8)
        has_begun = False

        async def guarded_send(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
                self._on_answer(scope, message["status"], request_id)
            elif is_head and message.get("more_body", False):
                await send({"type": "http.response.body"})
                raise DisconnectedError
            # A client that does not read its response would keep it in memory indefinitely.
            await asyncio.wait_for(send(message), SEND_WITHIN_S)

        try:
            if sum(len(name) + len(value) for name, value in scope["headers"]) > _MOST_HEAD:
                raise ApiError(400, f"the headers are longer than {_MOST_HEAD:,} bytes", code="invalid_http")
            self._check_host(headers)
            owner = (
                ""
                if path in OPEN_PATHS or _IMAGE_PATH.fullmatch(path)
                else self._keys.owner(headers.get("authorization"))
            )
            async with contextlib.AsyncExitStack() as room:
                scope.setdefault("state", {})[_STATE_KEY] = Caller(request_id, owner, room.aclose)
                body = await self._read(scope["method"], path, headers, receive, owner, room)
                await self._app(scope, _Replay(body, receive), guarded_send)
        except ApiError as error:
            if has_begun:
                raise
            await answer(error, guarded_send)
        except (TimeoutError, DisconnectedError):
            # The client does not read any more; uvicorn closes the connection.
            return

    def _check_host(self, headers: "_Headers") -> None:
        host = headers.get("host")
        if self._hosts is not None and (host is None or not self._is_accepted_host(_without_port(host).lower())):
            raise ApiError(403, "the server is not asked by this name (--allowed-host)", code="host_not_allowed")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host and origin not in self._origins:
            raise ApiError(403, "pages of other sites may not ask", code="origin_not_allowed")

    def _is_accepted_host(self, name: str) -> bool:
        assert self._hosts is not None
        if name in self._hosts:
            return True
        try:
            return bool(ip_address(name.removeprefix("[").removesuffix("]"))) and ANY_ADDRESS in self._hosts
        except ValueError:
            return False

    async def _read(
        self, method: str, path: str, headers: "_Headers", receive: Receive, owner: str, room: contextlib.AsyncExitStack
    ) -> bytes:
        """Return the whole body; for a large one, `room` holds a place among the large bodies until it is closed.

        Raises ApiError if the body is too large, too slow or compressed, or there is no room for it.
        """
        encoding = headers.get("content-encoding")
        if encoding is not None and encoding.lower() != "identity":
            raise ApiError(415, "the body must not be compressed", code="unsupported_content_encoding")
        large = self._large_paths.get(path) if method == "POST" else None
        most, within_s = (self._max_body, BODY_WITHIN_S) if large is None else (large.most_bytes, large.within_s)
        too_large = ApiError(413, f"the body is larger than {most:,} bytes", code="body_too_large")
        length = headers.get("content-length")
        if length is not None and headers.get("transfer-encoding") is not None:
            # Two servers in a row could parse it as different requests (request smuggling).
            raise ApiError(400, "Content-Length and Transfer-Encoding are both there", code="invalid_http")
        if length is not None and length.isascii() and length.isdigit() and int(length[:20]) > most:
            raise too_large
        reserve_bytes = None if large is None else room.enter_context(large.reserve(owner))
        parts, size = [], 0
        try:
            async with asyncio.timeout(within_s):
                async for part in _parts(receive, None if large is None else LEAST_SENT):
                    size += len(part)
                    if size > most:
                        raise too_large
                    if reserve_bytes is not None:
                        reserve_bytes(len(part))
                    parts.append(part)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {within_s:g} s", code="body_too_slow") from None
        if large is not None:
            await room.enter_async_context(large.room(owner))
        return b"".join(parts)


async def _parts(receive: Receive, least: int | None) -> AsyncIterator[bytes]:
    """Yield the parts of a body. Raises ApiError if fewer than `least` bytes come within `SENT_WITHIN_S`."""
    loop = asyncio.get_running_loop()
    until_s, size, has_more = loop.time() + SENT_WITHIN_S, 0, True
    while has_more:
        try:
            async with asyncio.timeout_at(None if least is None else until_s):
                message = await receive()
        except TimeoutError:
            assert least is not None
            if size < least:
                slow = f"of the body fewer than {least:,} bytes have come within {SENT_WITHIN_S:g} s"
                raise ApiError(408, slow, code="body_too_slow") from None
            until_s, size = loop.time() + SENT_WITHIN_S, 0
            continue
        if message["type"] == "http.disconnect":
            raise DisconnectedError
        part, has_more = message.get("body", b""), message.get("more_body", False)
        size += len(part)
        yield part


async def unless(event: Coroutine[Any, Any, object], error: Exception, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`; if the event comes first, cancel it and raise the error."""
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event)
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise error
    finally:
        for task in (working, waiting):
            task.cancel()


async def disconnect(receive: Receive) -> None:
    """Wait until the client of a request, whose body was read, disconnects."""
    # Waits for the event: polling several times a second, for every open request, takes time from the engine.
    while (await receive())["type"] != "http.disconnect":
        pass


def caller_of(scope: Scope) -> Caller:
    """Return the caller of a request."""
    return scope["state"][_STATE_KEY]


async def answer(error: ApiError, send: Send) -> None:
    """Send an error as the response, and close the connection."""
    body = json.dumps(error.to_json()).encode()
    # The body was not read, and a client that continued to send it would occupy the connection.
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    headers |= error.headers
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


class DisconnectedError(Exception):
    """The client has disconnected before its request was read, or it needs no more of the response."""


class _Headers:
    """Headers by name; the first one counts if a header is repeated."""

    def __init__(self, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        self._values: dict[bytes, bytes] = {}
        for name, value in pairs:
            self._values.setdefault(name.lower(), value)

    def get(self, name: str) -> str | None:
        value = self._values.get(name.encode())
        return None if value is None else value.decode("latin-1")


class _Replay:
    """Returns the body that was read, then what the client sends after it: the disconnect."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        return await self._receive()


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
