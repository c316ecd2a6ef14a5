"""A stderr that can neither stop nor fail a server: what its reader does not take is lost, and counted. No torch."""

import contextlib
import io
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TextIO, cast

_MOST_LINES = 1000
_LAST_LINES_S = 2.0
_STDERR = 2


@contextlib.contextmanager
def lossy_stderr(on_lost: Callable[[], None]) -> Iterator[None]:
    """Meanwhile, `sys.stderr` takes lines at once, and a thread of its own writes them.

    At the end the lines that are left are written, for 2 s at the most. Where that does not succeed the stream stays,
    so that the process can end although nobody reads.

    Args:
        on_lost: called for every line that is lost: so many wait already, or it cannot be written. Any thread may call.
    """
    before = sys.stderr
    # Without a stderr its number may be that of any other file.
    target = _STDERR if cast("TextIO | None", before) is not None else os.open(os.devnull, os.O_WRONLY)
    lines = _Lines(target, on_lost)
    # Straight to the lines, which each get a whole line; a buffer between them would cut long ones.
    encoding = getattr(before, "encoding", None) or "utf-8"
    sys.stderr = io.TextIOWrapper(cast("io.BufferedWriter", lines), encoding, "backslashreplace", line_buffering=True)
    try:
        yield
    finally:
        if lines.end(_LAST_LINES_S):
            sys.stderr = before


class _Lines(io.RawIOBase):
    """Lines for a file, by its number. It stays open when this is closed."""

    def __init__(self, target: int, on_lost: Callable[[], None]) -> None:
        super().__init__()
        self._target, self._on_lost = target, on_lost
        # Not one with a lock: a signal's handler may write, too.
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._can_write = True
        # Its last lines are waited for in `end`; it may hang in a write for ever.
        self._thread = threading.Thread(target=self._serve, name="psctl-log", daemon=True)
        self._thread.start()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._target

    def isatty(self) -> bool:
        return os.isatty(self._target)

    def write(self, line: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        """Queue a line, or lose it."""
        if self._queue.qsize() < _MOST_LINES:
            self._queue.put(bytes(line))
        else:
            self._on_lost()
        return len(line)

    def end(self, within_s: float) -> bool:
        """Write what is left. Returns whether all of it was written in time, and the last line without an error."""
        self._queue.put(None)
        self._thread.join(within_s)
        return not self._thread.is_alive() and self._can_write

    def _serve(self) -> None:
        while (line := self._queue.get()) is not None:
            try:
                left = memoryview(line)
                while left:
                    left = left[os.write(self._target, left) :]
                self._can_write = True
            except OSError:
                self._can_write = False
                self._on_lost()
