"""What records are read through: one read after the other, in a thread of its own, as fast as a link is (InstGenIE
section 4.2).
"""

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import NamedTuple

from ..core.threads import LoneThread
from .uploads import Loaded


class Link:
    """What the records of a process are read through: one read after the other, in the order in which they were asked
    for.

    Args:
        mbps: megabytes (10^6 bytes) per second that pass at most; None for as many as there are.
    """

    def __init__(self, mbps: float | None = None) -> None:
        self._asked: SimpleQueue[_Asked | None] = SimpleQueue()
        is_over = threading.Event()
        # A pool's thread would be waited for when the process ends, however slow the link is.
        LoneThread(target=_read_what_is_asked, args=(self._asked, is_over, mbps), name="records").start()
        weakref.finalize(self, _end, self._asked, is_over)

    def submit(self, read: Callable[[], Loaded]) -> "Future[Loaded]":
        """Have something read."""
        asked = _Asked(Future(), read, time.perf_counter())
        self._asked.put(asked)
        return asked.future


class _Asked(NamedTuple):
    future: "Future[Loaded]"
    read: Callable[[], Loaded]
    at_s: float


def _read_what_is_asked(queue: "SimpleQueue[_Asked | None]", is_over: threading.Event, mbps: float | None) -> None:
    free_s = 0.0
    while (asked := queue.get()) is not None:
        if not is_over.is_set() and asked.future.set_running_or_notify_cancel():
            free_s = _answer(asked, is_over, mbps, free_s)
        del asked  # while this thread waits for the next, nothing of the last one keeps the link alive


def _answer(asked: _Asked, is_over: threading.Event, mbps: float | None, free_s: float) -> float:
    """Read what is asked of a link that is free from some time on; returns from when on it is free then."""
    try:
        found = asked.read()
    except Exception as error:  # noqa: BLE001  whoever waits for it is told
        asked.future.set_exception(error)
        return free_s
    if mbps is not None:
        num_bytes = sum(tensor.nbytes for row in found.rows.values() for tensor in row.values())
        # From when the link was free, not from now: a thread that sleeps wakes up late.
        free_s = max(free_s, asked.at_s) + num_bytes / (mbps * 1e6)
        is_over.wait(max(0.0, free_s - time.perf_counter()))
    asked.future.set_result(found)
    return free_s


def _end(queue: "SimpleQueue[_Asked | None]", is_over: threading.Event) -> None:
    is_over.set()
    queue.put(None)
