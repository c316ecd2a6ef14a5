"""Runs the server: uvicorn on the main thread, from loading to the end of draining. No torch."""

import asyncio
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from ...data.errors import RunError, UsageError
from ..core.processes import INTERRUPTED, end_at_once, end_at_second_signal
from .address import Address, uvicorn_config
from .app import make_app
from .backend import Health
from .batches.api import FILES
from .batches.store import MAX_FILE_BYTES, Batches
from .edit_processes import EditProcesses
from .edits import EDITS, MAX_EDIT_BYTES
from .front_end import FrontEnd
from .guards import Guards, Receive, Scope, Send
from .large_bodies import LargeBodies
from .limits import Limits
from .live import Live
from .log_stream import lossy_stderr
from .metrics import Metrics
from .protocol import GENERATIONS
from .start_up import StartUp

_LAST_ANSWERS_S = 5
_HANDLERS_EVERY_S = 0.1


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
    config = uvicorn_config(app if address.origins else guarded, address, drain_s=_LAST_ANSWERS_S)
    server = _DrainingServer(config, address.drain_timeout_s)

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
        on_ready(address.url_of(listening))

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
                signal.signal(sig, end_at_second_signal)
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
            end_at_once("Ended before the server was ready", INTERRUPTED if sig == signal.SIGINT else 0)
        if self.front_end.is_draining:
            end_at_second_signal()
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


def _route_of(scope: Scope, paths: set[str]) -> str:
    """Return the route of a response that was sent before the request was routed."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return path if path in paths or path == GENERATIONS else "other"
