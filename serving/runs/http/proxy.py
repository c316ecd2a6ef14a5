"""`psctl router`: a reverse proxy before servers of OpenAI's images API, which sends each request to the one with the
least pending work. No torch.

Servers need not be ours. What is pending is known from what was sent and has not been answered: pixels times steps.
"""

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import FrameType
from typing import Any

import httpx
import uvicorn
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.exposition import generate_latest
from starlette.responses import JSONResponse, Response

from ....data.errors import UsageError
from ....data.resolution import Resolution, parse
from ...core.processes import end_at_second_signal
from ...core.request_state import RequestView
from ...fleet.book import LoadBook
from ...server.address import Address, uvicorn_config
from ...server.edits import EDITS, MAX_EDIT_BYTES
from ...server.errors import ApiError, not_ready, took_too_long
from ...server.guards import DisconnectedError, Guards, Receive, Result, Scope, Send, caller_of, disconnect, unless
from ...server.json_body import parse_object
from ...server.keys import Keys
from ...server.large_bodies import LargeBodies
from ...server.metrics import CONTENT_TYPE
from ...server.protocol import GENERATIONS

_ROUTED = (GENERATIONS, EDITS)
_API = "/v1"
_OF_ONE_SERVER = ("/v1/files", "/v1/batches")
_MAX_BODY_BYTES = 1 << 20
_PROBE_EVERY_S, _PROBE_WITHIN_S = 2.0, 2.0
_MOST_SILENT = 3
"""Probes in a row without an answer after which a server counts as lost, with the requests that it has not begun to
answer.
"""
_CONNECT_WITHIN_S = 5.0
_REFUSALS = (429, 502, 503)
"""Statuses after which another server is asked."""
_NO_RETRY = "x-should-retry"
_OF_THE_CONNECTION = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
        *("transfer-encoding", "upgrade", "x-request-id"),
    )
)
"""Headers that are not passed on, in either direction: those of one connection, and those that are set anew."""
_USUAL = Resolution(1024, 1024), 30
"""Size and steps that count for a request that does not say them."""
_FORM_FIELD = re.compile(rb'name="(\w+)"(?:\r\n[^\r\n]+)*\r\n\r\n([^\r\n]{1,32})\r\n')
_FORM_BYTES = 65_536
"""Length of the beginning and the end of a form in which its fields are looked for."""


@dataclass(eq=False)
class Server:
    """A server behind the router.

    Attributes:
        url: base URL of its API, with `/v1`.
        is_up: whether it would draw now, as its probe last said.
        lost: set while the server does not answer probes.
        problem: why it is not up.
    """

    url: str
    is_up: bool = False
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    problem: str = "it has not been asked yet"
    _num_silent: int = 0

    @property
    def root(self) -> str:
        """URL of the server without the path of its API."""
        return self.url.removesuffix(_API)

    async def probe(self, client: httpx.AsyncClient) -> None:
        """Ask the server whether it would draw, by the first of three paths that it knows."""
        try:
            for url in (f"{self.root}/readyz", f"{self.root}/health", f"{self.url}/models"):
                answered = await client.get(url, timeout=_PROBE_WITHIN_S)
                if answered.status_code not in (404, 405):
                    break
        except httpx.HTTPError as error:
            self._num_silent += 1
            self.is_up, self.problem = False, str(error) or type(error).__name__
            if self._num_silent >= _MOST_SILENT:
                self.lost.set()
            return
        self._num_silent = 0
        self.lost.clear()
        # A server that wants a key for its list of models draws for those who have one.
        self.is_up = answered.status_code in (200, 401, 403)
        self.problem = "" if self.is_up else f"{answered.url.path} answers {answered.status_code}"

    async def until_lost(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of work on this server. Raises httpx.ReadError when the server is lost."""
        return await unless(self.lost.wait(), httpx.ReadError("it does not answer probes"), work)


class Router:
    """Application that sends each request on to one of several servers.

    A request is sent to another server if one cannot be reached, refuses it (429, 502, 503), or is lost before it has
    begun to answer.

    Args:
        urls: base URLs of the servers.
        router: name of the router, as in `LoadBook`.
        timeout_s: time within which a server must begin to answer.
    """

    def __init__(self, urls: Sequence[str], router: str, timeout_s: float) -> None:
        self.servers = {url: Server(url) for url in urls}
        self._book, self._numbers, self._timeout_s = LoadBook(router), count(), timeout_s
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_WITHIN_S, pool=None)
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)
        # Only what clients send: who accepts no encoding must get none.
        self._client.headers.clear()
        self._registry = registry = CollectorRegistry()
        self._answers = Counter("psctl_router_answers", "Answers of servers.", ("server", "status"), registry=registry)
        self._up = Gauge("psctl_router_server_up", "Whether a server would draw.", ("server",), registry=registry)
        pending = Gauge(
            "psctl_router_pixel_steps_pending", "Pixels times steps not answered.", ("server",), registry=registry
        )
        for url in urls:
            pending.labels(url).set_function(lambda url=url: self._book.pending(url))

    async def watch(self) -> None:
        """Probe the servers, all at the same time, until cancelled."""
        while True:
            await self.probe()
            await asyncio.sleep(_PROBE_EVERY_S)

    async def probe(self) -> None:
        """Probe every server once."""
        await asyncio.gather(*(server.probe(self._client) for server in self.servers.values()))
        self._book.set_answering(url for url, server in self.servers.items() if server.is_up)
        for url, server in self.servers.items():
            self._up.labels(url).set(server.is_up)

    async def close(self) -> None:
        """Close the connections to the servers."""
        await self._client.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path in ("/livez", "/readyz", "/health", "/metrics") and method == "GET":
            await self._probe_response(path)(scope, receive, send)
        elif path.startswith(_OF_ONE_SERVER):
            raise ApiError(404, "files and batches are kept by one server: ask it directly", code="not_found")
        elif method == "POST" and path in _ROUTED:
            body = (await receive()).get("body", b"")
            await unless(disconnect(receive), DisconnectedError(), self._route(scope, body, send))
        elif method == "GET" and path.startswith(f"{_API}/"):
            await receive()
            await unless(disconnect(receive), DisconnectedError(), self._fetch(scope, send))
        else:
            raise ApiError(404, f"the router has no {method} {path[:80]}", code="not_found")

    def _probe_response(self, path: str) -> Response:
        if path == "/metrics":
            return Response(generate_latest(self._registry), media_type=CONTENT_TYPE)
        states = {
            url: {"is_up": each.is_up, "problem": each.problem, "pixel_steps": self._book.pending(url)}
            for url, each in self.servers.items()
        }
        is_up = path == "/livez" or any(each.is_up for each in self.servers.values())
        return JSONResponse({"status": "ok" if is_up else "no server is up", "servers": states}, 200 if is_up else 503)

    async def _route(self, scope: Scope, body: bytes, send: Send) -> None:
        """Send a request for images to the server that the router chooses, or to the next one."""
        kind = next((value for name, value in scope["headers"] if name.lower() == b"content-type"), b"")
        size, steps = _work_of(kind, body)
        view = RequestView(next(self._numbers), size, asyncio.get_running_loop().time(), None, steps)
        self._book.begin(view)
        try:
            for server, is_last in self._ranked(view):
                self._book.confirm(view.request_id, server.url)
                if await self._pass_on(server, scope, body, send, refusals=() if is_last else _REFUSALS):
                    return
        finally:
            self._book.release(view.request_id)
        raise not_ready("no server answers")

    def _ranked(self, view: RequestView) -> list[tuple[Server, bool]]:
        """Return the servers in the order in which to try them, each with whether it is the last."""
        ranked = [self.servers[url] for url in self._book.reserve(view.request_id, self.servers)]
        chosen = [each for each in ranked if each.is_up] or ranked
        return [(server, server is chosen[-1]) for server in chosen]

    async def _fetch(self, scope: Scope, send: Send) -> None:
        """Answer with what the first server has that knows the path: an image is known to one of them."""
        servers = sorted(self.servers.values(), key=lambda each: not each.is_up)
        for server in servers:
            refusals = () if server is servers[-1] else (404, *_REFUSALS)
            if await self._pass_on(server, scope, b"", send, refusals=refusals):
                return
        raise not_ready("no server answers")

    async def _pass_on(self, server: Server, scope: Scope, body: bytes, send: Send, *, refusals: Sequence[int]) -> bool:
        """Send a request to a server, and its answer to the client.

        Returns False if the server cannot be reached, is lost, or answers with one of `refusals`.
        """
        path = scope["path"].removeprefix(_API) + ("?" if scope["query_string"] else "")
        url = server.url + path + scope["query_string"].decode("latin-1")
        request = self._client.build_request(scope["method"], url, headers=_to_server(scope), content=body or None)
        try:
            answered = await server.until_lost(self._client.send(request, stream=True))
        except httpx.ReadTimeout:
            raise took_too_long(self._timeout_s) from None
        except httpx.HTTPError as error:
            server.is_up, server.problem = False, str(error) or type(error).__name__
            return False
        try:
            self._answers.labels(server.url, answered.status_code).inc()
            if answered.status_code in refusals and answered.headers.get(_NO_RETRY) != "false":
                return False
            headers = [
                (name, value) for name, value in answered.headers.raw if name.decode().lower() not in _OF_THE_CONNECTION
            ]
            headers.append((b"x-psctl-server", server.url.encode()))
            await send({"type": "http.response.start", "status": answered.status_code, "headers": headers})
            parts = answered.aiter_raw()
            # If the server is lost now, the client's connection ends in the middle, too.
            with contextlib.suppress(httpx.HTTPError):
                while part := await server.until_lost(_next(parts)):
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await answered.aclose()
        return True


async def _next(parts: AsyncIterator[bytes]) -> bytes:
    """Return the next part; an empty one at the end."""
    return await anext(parts, b"")


def _to_server(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Return the headers for a server: those of the client, its address, and the id of the request."""
    headers = [
        (name, value) for name, value in scope["headers"] if name.lower().decode("latin-1") not in _OF_THE_CONNECTION
    ]
    if scope.get("client"):
        headers.append((b"x-forwarded-for", scope["client"][0].encode()))
    return [*headers, (b"x-request-id", caller_of(scope).request_id.encode())]


def _work_of(kind: bytes, body: bytes) -> tuple[Resolution, int]:
    """Return the size of a request's images, and the steps of all of them together.

    Fields have the names of OpenAI, vllm-omni and SGLang. Those that are missing or not valid count as `_USUAL`: the
    server answers for them.
    """
    if kind.startswith(b"multipart/form-data"):
        parts = (body,) if len(body) <= 2 * _FORM_BYTES else (body[:_FORM_BYTES], body[-_FORM_BYTES:])
        fields = {name.decode(): value.decode("latin-1") for part in parts for name, value in _FORM_FIELD.findall(part)}
    else:
        fields = parse_object(body)
    size, steps = _USUAL
    with contextlib.suppress(UsageError, KeyError):
        size = parse(str(fields.get("size") or f"{fields['width']}x{fields['height']}"))
    steps = _number(fields, ("num_inference_steps", "steps"), steps)
    return size, steps * _number(fields, ("n", "num_outputs_per_prompt"), 1)


def _number(fields: Mapping[str, Any], names: Sequence[str], usual: int) -> int:
    """Return the first of these fields that is a number from 1 to 1,000."""
    for name in names:
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            if 1 <= (value := int(fields.get(name, 0))) <= 1000:
                return value
    return usual


class _EndingServer(uvicorn.Server):
    """uvicorn server that ends with code 0 after a signal, and at once after a second one.

    Args:
        config: settings.
        on_listening: called when the server accepts connections.
    """

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_listening()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            end_at_second_signal()
        self.should_exit = True


async def serve_router(
    urls: Sequence[str],
    router: str,
    address: Address,
    *,
    timeout_s: float,
    on_ready: Callable[[str, Mapping[str, str]], None],
) -> None:
    """Route requests until a signal arrives, then finish the open ones.

    Args:
        urls: base URLs of the servers.
        router: name of the router, as in `LoadBook`.
        address: where to listen, and the names by which clients may call the router.
        timeout_s: time within which a server must begin to answer.
        on_ready: called with the base URL, and with the problem of each server that is not up.

    Raises:
        UsageError: there is no such router, or it needs a predictor.
        RunError: as `Address.listen`.
    """
    app, listening = Router(urls, router, timeout_s), address.listen()
    guarded = Guards(
        app,
        keys=Keys(),
        hosts=address.hosts,
        max_body=_MAX_BODY_BYTES,
        large_paths={EDITS: LargeBodies(MAX_EDIT_BYTES, 30.0)},
    )
    config = uvicorn_config(guarded, address, drain_s=max(1, round(address.drain_timeout_s)))
    await app.probe()
    watching = asyncio.ensure_future(app.watch())

    def on_listening() -> None:
        on_ready(address.url_of(listening), {each.url: each.problem for each in app.servers.values() if not each.is_up})

    try:
        await _EndingServer(config, on_listening).serve(sockets=[listening])
    finally:
        watching.cancel()
        await app.close()
