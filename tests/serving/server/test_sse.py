"""Streams of requests that make no progress: comments while the client waits, then an error."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from patchedserve.data.resolution import Resolution
from patchedserve.serving.server import sse
from patchedserve.serving.server.protocol import Generation
from patchedserve.serving.server.sse import events_of
from patchedserve.serving.server.tickets import Ticket


def test_stream_sends_comments_then_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "COMMENT_EVERY_S", 0.02)

    async def events_of_a_hanging_engine() -> list[bytes]:
        cancelled: list[int] = []
        wanted = Generation("a cat", Resolution(32, 32), 4, 3.0, (1,), stream=True)
        with ThreadPoolExecutor(1) as pool:
            ticket = Ticket(wanted, None, lambda number, reason: cancelled.append(number), pool, lambda ticket: None)
            ticket.numbers, ticket.events = [7], asyncio.Queue()
            # A hanging engine ignores the cancellation, and the stream ends all the same.
            found = [part async for part in events_of(ticket, 0.1)]
        assert cancelled == [7]
        return found

    *comments, last = asyncio.run(events_of_a_hanging_engine())
    assert 2 <= len(comments) <= 5
    assert {*comments} == {b": waiting\n\n"}
    name, data, *_ = last.decode().split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["code"] == "timeout"
