"""A stderr that can neither block nor fail a server: lines that its reader does not take are lost, and counted. No
torch.
"""

import contextlib
import io
import os
import queue
import select
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TextIO, cast

_MOST_LINES = 1000
_LAST_LINES_S = 2.0
_STDERR = 2


@contextlib.contextmanager
def lossy_stderr(on_lost: Callable[[], None]) -> Iterator[None]:
    """Replace `sys.stderr` by a stream that accepts lines without blocking and writes them in a thread of its own.

    Direct writes to the file descriptor, by libraries and by processes that are started meanwhile, fail where they
    would block: in a pipe that is not read, such a write would hold up a stage, or the whole process.

    On exit, the remaining lines are written for at most 2 s. If that fails, the stream stays in place, so that the
    process can end although its stderr is not read.

    Args:
        on_lost: called, from any thread, for every line that is lost because too many wait or it cannot be written.
    """
    before = sys.stderr
    # Without a stderr, its file descriptor may be that of any other file.
    has_stderr = cast("TextIO | None", before) is not None
    target = os.dup(_STDERR) if has_stderr else os.open(os.devnull, os.O_WRONLY)
    if has_stderr and stat.S_ISFIFO(os.fstat(_STDERR).st_mode):
        _let_direct_writes_fail()
    lines = _Lines(target, on_lost)
    # No buffer in between: each write is a whole line, and a buffer would split long ones.
    encoding = getattr(before, "encoding", None) or "utf-8"
    sys.stderr = io.TextIOWrapper(cast("io.BufferedWriter", lines), encoding, "backslashreplace", line_buffering=True)
    try:
        yield
    finally:
        # Direct writes may have filled a pipe that is not read.
        if lines.end(_LAST_LINES_S) and select.select([], [target], [], _LAST_LINES_S)[1]:
            sys.stderr = before
            if has_stderr:
                os.dup2(target, _STDERR)
            os.close(target)


def _let_direct_writes_fail() -> None:
    """Open the pipe of stderr again, so that other users of the pipe still have a descriptor that blocks."""
    # Not on systems without /proc, and not if its reader is gone, in which case no write blocks.
    with contextlib.suppress(OSError):
        opened = os.open(f"/proc/self/fd/{_STDERR}", os.O_WRONLY | os.O_NONBLOCK)
        os.dup2(opened, _STDERR)
        os.close(opened)


class _Lines(io.RawIOBase):
    """Writes lines to a file descriptor, which stays open when the stream is closed."""

    def __init__(self, target: int, on_lost: Callable[[], None]) -> None:
        super().__init__()
        self._target, self._on_lost = target, on_lost
        # Reentrant, unlike a queue with a lock: signal handlers write, too.
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._can_write = True
        # `end` waits for its last lines. It is a daemon because a write may block indefinitely.
        self._thread = threading.Thread(target=self._serve, name="psctl-log", daemon=True)
        self._thread.start()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._target

    def isatty(self) -> bool:
        return os.isatty(self._target)

    def write(self, line: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        """Queue a line, or discard it if too many wait."""
        if self._queue.qsize() < _MOST_LINES:
            self._queue.put(bytes(line))
        else:
            self._on_lost()
        return len(line)

    def end(self, within_s: float) -> bool:
        """Write the remaining lines. Returns whether this was done in time, and without an error of the last line."""
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
