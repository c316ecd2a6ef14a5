"""A worker process's end of the connection to the front end. No torch."""

import contextlib
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from .messages import Alive, Command, Event, Stop

ALIVE_EVERY_S = 1.0


class WorkerEnd:
    """Receives commands, and sends events and heartbeats."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._sending = connection, threading.Lock()
        self._is_stopped = threading.Event()

    def receive(self) -> Command:
        """Wait for the next command; it is `Stop` if the front end has gone."""
        try:
            command = self._connection.recv()
        except (EOFError, OSError):
            command = Stop()
        if isinstance(command, Stop):
            self._is_stopped.set()
        return command

    def send(self, event: Event) -> None:
        """Send an event; do nothing if the front end has gone, as `receive` notices it too. Thread-safe."""
        with contextlib.suppress(OSError), self._sending:
            self._connection.send(event)

    def send_heartbeats(self, beat: Callable[[], Alive | None]) -> None:
        """Send what `beat` returns, unless it is None, every `ALIVE_EVERY_S` until `Stop` is received."""
        while True:
            if (alive := beat()) is not None:
                self.send(alive)
            if self._is_stopped.wait(ALIVE_EVERY_S):
                return
