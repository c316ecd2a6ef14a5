"""Who may ask by which name, and connections whose client does not read."""

import asyncio
import socket
import time
from typing import Any

import pytest
import uvicorn

from patchedserve.serving.server import connections
from patchedserve.serving.server.connections import TimedConnection
from patchedserve.serving.server.guards import Guards, Keys, Receive, Scope, Send
from patchedserve.serving.server.run import Address

from ...support.waits import until


@pytest.mark.parametrize(
    ("address", "allowed", "refused"),
    [
        (Address(), ("localhost:1", "127.0.0.1", "[::1]:8000"), ("evil.example", "10.0.0.1", "")),
        (Address(allowed_hosts=("Psctl.Example",)), ("psctl.example:80", "localhost"), ("example",)),
        # Without a key, a page could ask by a name that its owner points here; by a number it cannot.
        (Address("0.0.0.0", is_open=True), ("10.0.0.1:8000", "[2001:db8::1]:8000", "localhost"), ("evil.example",)),
        (Address("0.0.0.0", keys=("key",)), ("evil.example", "10.0.0.1"), ()),
    ],
)
def test_names_that_a_server_may_be_asked_by(
    address: Address, allowed: tuple[str, ...], refused: tuple[str, ...]
) -> None:
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


def test_who_does_not_read_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "READ_WITHIN_S", 0.3)
    # More than the kernel takes for a client that reads nothing.
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
