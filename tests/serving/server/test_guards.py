"""Allowed host names, and connections whose client does not read or does not send."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from patchedserve.serving.server import connections, guards, large_bodies
from patchedserve.serving.server.address import Address
from patchedserve.serving.server.connections import TimedConnection
from patchedserve.serving.server.errors import ApiError
from patchedserve.serving.server.guards import App, Guards, Receive, Scope, Send
from patchedserve.serving.server.keys import Keys
from patchedserve.serving.server.large_bodies import LargeBodies

from ...support.waits import until


@pytest.mark.parametrize(
    ("address", "allowed", "refused"),
    [
        (Address(), ("localhost:1", "127.0.0.1", "[::1]:8000"), ("evil.example", "10.0.0.1", "")),
        (Address(allowed_hosts=("Psctl.Example",)), ("psctl.example:80", "localhost"), ("example",)),
        # Without a key, a web page could reach the server through a name that its owner points here, but not through
        # an address.
        (Address("0.0.0.0", is_open=True), ("10.0.0.1:8000", "[2001:db8::1]:8000", "localhost"), ("evil.example",)),
        (Address("0.0.0.0", keys=Keys(["key"])), ("evil.example", "10.0.0.1"), ()),
    ],
)
def test_allowed_host_names(address: Address, allowed: tuple[str, ...], refused: tuple[str, ...]) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    guards = Guards(app, keys=Keys(()), hosts=address.hosts, max_body=10)

    def status(host: str) -> int:
        found: list[int] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b""}

        async def send(message: Any) -> None:
            found.append(message.get("status", 0))

        headers = [(b"host", host.encode())]
        asyncio.run(guards({"type": "http", "method": "GET", "path": "/v1/models", "headers": headers}, receive, send))
        return found[0]

    assert [status(host) for host in allowed] == [200] * len(allowed)
    assert [status(host) for host in refused] == [403] * len(refused)


def test_clients_that_do_not_read_are_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "READ_WITHIN_S", 0.3)
    # More than the kernel buffers for a client that reads nothing.
    body = bytes(40_000_000)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        size = str(len(body)).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", size)]})
        await send({"type": "http.response.body", "body": body})

    async def whole() -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(app, http=TimedConnection, ws="none", lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        serving = asyncio.ensure_future(server.serve(sockets=[listening]))
        loop = asyncio.get_running_loop()

        def ask(reads: bool) -> int:
            with socket.create_connection(listening.getsockname(), timeout=20) as client:
                client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                if not reads:
                    until(lambda: len(server.server_state.connections) == 1)
                    until(lambda: not server.server_state.connections)
                    return 0
                num_bytes, start = 0, time.monotonic()
                while part := client.recv(1_000_000):
                    num_bytes += len(part)
                    time.sleep(0.02)
                assert time.monotonic() - start > 2 * connections.READ_WITHIN_S, "or it was not slow"
                return num_bytes

        assert await loop.run_in_executor(None, ask, False) == 0
        assert await loop.run_in_executor(None, ask, True) > len(body)
        server.should_exit = True
        await serving

    asyncio.run(whole())


@contextmanager
def guarded(app: App, *keys: str) -> Iterator[int]:
    """Run a server whose path `/large` takes up to 1,000,000 bytes; yield its port."""
    large = {"/large": LargeBodies(1_000_000, 60.0)}
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        Guards(app, keys=Keys(keys), hosts=None, max_body=100, large_paths=large),
        http=TimedConnection,
        ws="none",
        lifespan="off",
        log_config=None,
    )
    server = uvicorn.Server(config)
    serving = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    serving.start()
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        serving.join()


async def body_size_app(scope: Scope, receive: Receive, send: Send) -> None:
    body = str(len((await receive())["body"])).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def open_request(port: int, length: int) -> socket.socket:
    """Open a connection, and send the head of a large request and one byte of its body."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    connection.sendall(b"POST /large HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\nx" % length)
    return connection


def read_response(connection: socket.socket) -> tuple[int, bytes]:
    """Read until the connection is closed; return the status and the body."""
    parts = []
    while part := connection.recv(65_536):
        parts.append(part)
    head, _, body = b"".join(parts).partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def test_idle_clients_do_not_block_others() -> None:
    with ExitStack() as idle, guarded(body_size_app) as port:
        connections = [idle.enter_context(open_request(port, 900_000)) for _ in range(24)]
        for _ in range(3):
            answer = httpx.post(f"http://127.0.0.1:{port}/large", content=bytes(800_000), timeout=20)
            assert (answer.status_code, answer.text) == (200, "800000")
        # A body that has begun may still be completed.
        connections[5].sendall(bytes(899_999))
        assert connections[5].recv(65_536).startswith(b"HTTP/1.1 200")


def test_slow_senders_are_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "SENT_WITHIN_S", 1.0)
    monkeypatch.setattr(guards, "LEAST_SENT", 100)
    with guarded(body_size_app) as port, open_request(port, 1_000) as idle, open_request(port, 100_000) as slow:
        with open_request(port, 1_001) as steady:
            start = time.monotonic()
            for part in range(100):
                # A later write would go to a closed connection.
                slow.sendall(b"x" if part < 25 else b"")
                steady.sendall(bytes(10))
                time.sleep(0.02)
            assert time.monotonic() - start > 1.5, "or nothing was slow"
            assert steady.recv(65_536).startswith(b"HTTP/1.1 200")
        for connection in (idle, slow):
            status, body = read_response(connection)
            assert (status, json.loads(body)["error"]["code"]) == (408, "body_too_slow")


def test_key_waits_only_for_its_own_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_bodies, "ROOM_WITHIN_S", 0.2)
    waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        if (await receive())["body"] == b"wait":
            waiting.append((asyncio.get_running_loop(), asyncio.Event()))
            await waiting[-1][1].wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    def posted(port: int, key: str, body: bytes) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {key}"}
        answer = httpx.post(f"http://127.0.0.1:{port}/large", content=body, headers=headers, timeout=20)
        return answer.status_code, answer.json()["error"]["code"] if answer.is_error else ""

    with guarded(waits, "a", "b") as port:
        posting = [threading.Thread(target=posted, args=(port, "a", b"wait")) for _ in range(3)]
        for each in posting:
            each.start()
        until(lambda: len(waiting) == 3)
        assert posted(port, "a", b"now") == (429, "too_many_uploads")
        assert posted(port, "b", b"now") == (200, "")
        for loop, event in waiting:
            loop.call_soon_threadsafe(event.set)
        for each in posting:
            each.join()
        assert posted(port, "a", b"now") == (200, "")


def test_key_does_not_use_body_memory_of_others() -> None:
    large = LargeBodies(1_000, 30.0)
    with ExitStack() as sent:
        for _ in range(3):
            sent.enter_context(large.reserve("a"))(1_000)
        with large.reserve("a") as reserve_bytes, pytest.raises(ApiError, match="too much is being sent") as caught:
            reserve_bytes(1)
        assert (caught.value.status, caught.value.headers["Retry-After"]) == (429, "30")
        with large.reserve("b") as reserve_bytes:
            reserve_bytes(600)
            reserve_bytes(400)
            with large.reserve("c") as third, pytest.raises(ApiError):
                third(1)
    with large.reserve("a") as reserve_bytes:
        reserve_bytes(3_000)
