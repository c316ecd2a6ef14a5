"""uvicorn's connections with time limits for a request's head and for reading responses, and with errors in JSON."""

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import invalid

HEAD_WITHIN_S, READ_WITHIN_S = 10.0, 30.0
LEAST_READ = 65_536
"""Bytes of its response that a client must read within `READ_WITHIN_S`."""


class TimedConnection(H11Protocol):
    """Closes a new connection that sends nothing, one whose request's head is not complete in time, and one that does
    not read its response.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # Calls `pause_writing` as soon as the client does not read everything, and `resume_writing` when it has.
        transport.set_write_buffer_limits(0)
        self._start_head_timer()

    def pause_writing(self) -> None:
        """Start the timer: the client reads more slowly than it is sent data. Closing would wait until it has read."""
        super().pause_writing()
        if self._send_timer is None:
            self._start_send_timer()

    def resume_writing(self) -> None:
        """Stop the timer: the client has read everything."""
        super().resume_writing()
        self._stop_send_timer()

    def data_received(self, data: bytes) -> None:
        if self._head_timer is None and self.conn.their_state is h11.IDLE:
            self._start_head_timer()
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_head_timer()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is not HTTP, and close the connection, as the start of a next request is unknown."""
        body = json.dumps(invalid("what was sent is not valid HTTP", code="invalid_http").to_json()).encode()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            parts = (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage())
            self.transport.write(b"".join(self.conn.send(part) or b"" for part in parts))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_send_timer()
        super().connection_lost(exc)

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_WITHIN_S, self._close_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _start_send_timer(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._send_timer = self.loop.call_later(READ_WITHIN_S, self._check_reading, left)

    def _check_reading(self, left_before: int) -> None:
        if self.transport.get_write_buffer_size() > left_before - LEAST_READ:
            self.transport.abort()
        else:
            self._start_send_timer()

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _close_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()
