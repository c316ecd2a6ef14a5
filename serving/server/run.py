"""Runs the server: uvicorn on the main thread, from loading to the end of draining. No torch."""

import asyncio
import logging
import re
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_network
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from ...data.errors import RunError, UsageError
from ..core.processes import end_at_once
from .app import make_app
from .backend import Health
from .batches.api import FILES
from .batches.store import MAX_FILE_BYTES, Batches
from .connections import TimedConnection
from .edit_processes import EditProcesses
from .edits import EDITS, MAX_EDIT_BYTES
from .front_end import FrontEnd
from .guards import ANY_ADDRESS, LOOPBACK, Guards, Receive, Scope, Send
from .keys import Keys
from .large_bodies import LargeBodies
from .limits import Limits
from .live import Live
from .log_stream import lossy_stderr
from .metrics import Metrics
from .protocol import GENERATIONS
from .start_up import StartUp

_BACKLOG = 256
KEEP_ALIVE_S = 90.0
"""Longer than the 60 s for which nginx and load balancers keep connections. If the server closed a connection first, a
request on its way would be answered with 502.
"""
_LAST_ANSWERS_S = 5
_HANDLERS_EVERY_S = 0.1
_ORIGIN = re.compile(r"https?://[\w.-]+(:\d+)?|https?://\[[\da-f:]+\](:\d+)?", re.ASCII)
_ROOT_PATH = re.compile(r"(/[\w.~-]+)+", re.ASCII)
_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Address:
    """Address on which a server listens, and the requests that it accepts.

    Attributes:
        host: host name or address.
        port: port; 0 for any free port.
        keys: accepted keys; if there are none, no key is needed.
        allowed_hosts: host names under which it accepts requests besides `host`. If there are none on another host than
            loopback, it accepts any name with keys, and the names of this machine without.
        drain_timeout_s: seconds that open requests may still take after a signal.
        is_open: whether it may listen on other hosts than loopback without keys.
        keep_alive_s: seconds after which an idle connection is closed.
        origins: origins of other sites whose pages may send requests.
        root_path: path under which a proxy serves it, such as `/images`; "" for none.
        proxies: addresses and networks of proxies whose `X-Forwarded-Proto` and `X-Forwarded-For` count.
        read_keys: reads the keys again, on SIGHUP; raises UsageError.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    keys: Keys = field(default_factory=Keys, repr=False)
    allowed_hosts: Sequence[str] = ()
    drain_timeout_s: float = 30.0
    is_open: bool = False
    keep_alive_s: float = KEEP_ALIVE_S
    origins: Sequence[str] = ()
    root_path: str = ""
    proxies: Sequence[str] = ()
    read_keys: Callable[[], Keys] | None = None

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return self.host in ("localhost", "127.0.0.1", "::1")

    def check(self) -> None:
        """Raise UsageError if anyone on the network could send requests, unless `is_open` allows it, or if an origin,
        the path or a proxy is not valid.
        """
        if wrong := [origin for origin in self.origins if not _ORIGIN.fullmatch(origin)]:
            raise UsageError(f"--cors-origin is {wrong[0]!r}, but it must be like https://app.example, with no path")
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            raise UsageError(f"--root-path is {self.root_path!r}, but it must be like /images, with no / at its end")
        for proxy in self.proxies:
            try:
                ip_network(proxy)
            except ValueError as error:
                raise UsageError(f"--trusted-proxy: {error}; give addresses or networks like 10.0.0.0/8") from None
        if not self.is_loopback and not self.keys and not self.is_open:
            raise UsageError(
                f"--host is {self.host}, where others can ask: set PSCTL_API_KEY or --api-key-file, or say --insecure"
            )

    def listen(self) -> socket.socket:
        """Return the bound socket, so that a port in use is reported before anything is loaded. Raises RunError."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        # With IPPROTO_TCP, asyncio sends small responses at once: without, each took 40 ms longer on kept connections.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((self.host, self.port))
        except OSError as error:
            listening.close()
            raise RunError(f"cannot listen on {self.host}:{self.port}: {error.strerror}") from error
        return listening

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """Host names under which requests are accepted; None for any, as pages of other sites do not have the key."""
        if self.is_loopback or self.allowed_hosts:
            return (*LOOPBACK, self.host, *self.allowed_hosts)
        return None if self.keys else (*LOOPBACK, self.host, socket.gethostname(), socket.getfqdn(), ANY_ADDRESS)


@dataclass(frozen=True, slots=True)
class Served:
    """Parts of a server, once its model is loaded.

    Attributes:
        front_end: front end that handles the requests.
        metrics: metrics that `/metrics` returns.
        live: state of the live page.
        batches: files and batches of the workspace.
    """

    front_end: FrontEnd
    metrics: Metrics
    live: Live
    batches: Batches


async def serve_forever(
    make: Callable[[], Served],
    limits: Limits,
    address: Address,
    listening: socket.socket,
    start_up: StartUp,
    *,
    on_ready: Callable[[str], None],
) -> None:
    """Serve until a signal arrives, then drain; a second signal ends the process at once, with exit code 130.

    The port answers while `make` runs: probes with the progress of the start, everything else with 503. A signal ends
    the process then at once, as nothing is open.

    Args:
        make: loads the model and returns the server's parts; called in a thread.
        limits: limits of requests.
        address: the requests that are accepted, and the time limit of draining.
        listening: the bound socket.
        start_up: progress of the start, which `make` reports to.
        on_ready: called with the base URL when the backend is ready.

    Raises:
        RunError: the backend could not start, or has stopped for good.
        Exception: as `make`.
    """
    gate = _Gate(start_up)
    guarded = Guards(
        gate,
        keys=address.keys,
        hosts=address.hosts,
        origins=address.origins,
        root_path=address.root_path,
        max_body=limits.max_body_bytes,
        large_paths={FILES: LargeBodies(MAX_FILE_BYTES, 300.0), EDITS: LargeBodies(MAX_EDIT_BYTES, 30.0)},
        on_answer=gate.on_answer,
    )
    # Outside the guards, so that pages can also read what these refuse.
    app = CORSMiddleware(
        guarded,  # type: ignore[arg-type]
        allow_origins=address.origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", "X-Generation-Id", "Retry-After"],
    )
    config = uvicorn.Config(
        app if address.origins else guarded,
        http=TimedConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(address.proxies),
        forwarded_allow_ips=list(address.proxies),
        backlog=_BACKLOG,
        timeout_keep_alive=address.keep_alive_s,  # type: ignore[arg-type]
        timeout_graceful_shutdown=_LAST_ANSWERS_S,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    server = _DrainingServer(config, address.drain_timeout_s)
    port = listening.getsockname()[1]
    host = f"[{address.host}]" if ":" in address.host else address.host

    async def start() -> None:
        making, is_made = asyncio.get_running_loop().run_in_executor(None, make), False
        while not is_made:
            is_made = making.done()
            # Ray replaces the handlers while it starts, with one that writes a stack trace and may abort the process.
            for sig in (signal.SIGINT, signal.SIGTERM):
                signal.signal(sig, server.handle_exit)
            await asyncio.wait([making], timeout=_HANDLERS_EVERY_S)
        served = making.result()
        front_end = server.front_end = served.front_end
        front_end.backend.on_stopped = server.on_backend_stopped
        served.metrics.operator = address.keys.operator
        edits = EditProcesses(front_end.model, front_end.limits)
        gate.open(served, make_app(front_end, served.metrics, served.live, served.batches, edits, start_up))
        start_up("warming up")
        # A cascade takes no edits.
        others = [] if front_end.model.cascade else [edits.start()]
        await asyncio.gather(front_end.backend.start(), *others)
        await served.batches.start()
        start_up.end()
        on_ready(f"http://{host}:{port}/v1")

    def read_keys() -> None:
        _read_keys_again(address)
        if gate.served is not None:
            gate.served.metrics.operator = address.keys.operator

    with lossy_stderr(gate.on_line_lost):
        if hasattr(signal, "SIGHUP"):  # not on Windows
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, read_keys)
        starting = asyncio.ensure_future(start())
        starting.add_done_callback(server.on_backend_started)
        await server.serve(sockets=[listening])
        if server.front_end is not None and server.front_end.is_draining:
            # Until the process has ended: the awaited ends of batches and the backend may never come.
            for sig in (signal.SIGINT, signal.SIGTERM):
                signal.signal(sig, _end_at_second_signal)
        if not starting.done():
            starting.cancel()
        if gate.served is not None:
            await gate.served.batches.stop()
            # Also if nothing was drained: the process must not end while a thread computes.
            await gate.served.front_end.backend.stop()
    if server.failure is not None:
        raise server.failure


def _read_keys_again(address: Address) -> None:
    """Replace the keys by those that the file has now, or keep them and say why."""
    try:
        if address.read_keys is None:
            raise UsageError("there is no --api-key-file")
        address.keys.become(address.read_keys())
    except UsageError as error:
        sys.stderr.write(f"SIGHUP: the keys are as before: {error}\n")
    else:
        sys.stderr.write(f"SIGHUP: read the keys again, of {len(address.keys.limits)} owners\n")


class _Gate:
    """Application that answers with the progress of the start until the real one is there.

    Attributes:
        served: parts of the server; None until they are there.
    """

    def __init__(self, start_up: StartUp) -> None:
        self._start_up = start_up
        self._app: FastAPI | None = None
        self._paths: set[str] = set()
        self.served: Served | None = None

    def open(self, served: Served, app: FastAPI) -> None:
        """Pass all requests to this application from now on."""
        self.served, self._app = served, app
        self._paths = {route.path for route in app.routes if hasattr(route, "path")}  # type: ignore[attr-defined]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._start_up.answer(scope["path"])(scope, receive, send)

    def on_answer(self, scope: Scope, status: int, request_id: str) -> None:
        """Report a response to the watchers."""
        if self.served is None:
            return
        found = scope.get("route")
        route = getattr(found, "path", "other") if found is not None else _route_of(scope, self._paths)
        for watcher in self.served.front_end.watchers:
            watcher.on_answer(route, status, request_id)

    def on_line_lost(self) -> None:
        """Count a line of the log that is lost."""
        if self.served is not None:
            self.served.metrics.log_lines_lost.inc()


class _DrainingServer(uvicorn.Server):
    """uvicorn server that drains before it stops listening: meanwhile `/ready` returns 503, and new work is refused.

    Attributes:
        front_end: front end that drains; None while the model is being loaded.
        failure: the error with which the server ends.
    """

    def __init__(self, config: uvicorn.Config, drain_timeout_s: float) -> None:
        super().__init__(config)
        self.failure: BaseException | None = None
        self.front_end: FrontEnd | None = None
        self._drain_timeout_s = drain_timeout_s
        self._draining: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal: the first one drains, a second one ends the process at once."""
        if self.front_end is None:
            # The thread that loads the model cannot be stopped, and nothing is open.
            end_at_once("Ended before the server was ready", _INTERRUPTED if sig == signal.SIGINT else 0)
        if self.front_end.is_draining:
            _end_at_second_signal()
        self.front_end.is_draining = True
        self._loop.call_soon_threadsafe(self._begin_draining)

    def on_backend_stopped(self, reason: str) -> None:
        """End with an error, as the backend has stopped for good; at once if its threads hang and cannot be ended."""
        if self.front_end is not None and self.front_end.backend.health is Health.STALLED:
            end_at_once(f"Error: {reason}; open requests are lost", 1)
        self.failure = RunError(reason)
        self.should_exit = True

    def on_backend_started(self, starting: "asyncio.Future[Any]") -> None:
        """End with the error of a backend that could not start."""
        error = None if starting.cancelled() else starting.exception()
        if error is not None and not (self.front_end is not None and self.front_end.is_draining):
            self.failure = error
            self.should_exit = True

    def _begin_draining(self) -> None:
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        assert self.front_end is not None
        try:
            await self.front_end.drain(self._drain_timeout_s)
        finally:
            self.should_exit = True


def _end_at_second_signal(*_: object) -> None:
    end_at_once("Ended at once by a second signal; what was open is lost", _INTERRUPTED)


def _route_of(scope: Scope, paths: set[str]) -> str:
    """Return the route of a response that was sent before the request was routed."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return path if path in paths or path == GENERATIONS else "other"
