"""The link that records are read through, one read at a time in a thread of its own (InstGenIE section 4.2)."""

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
    """Thread that performs the reads of a process's records one at a time, in the order in which they were submitted.

    Args:
        mbps: limit of the throughput in megabytes (10^6 bytes) per second; None for no limit.
    """

    def __init__(self, mbps: float | None = None) -> None:
        self._asked: SimpleQueue[_Asked | None] = SimpleQueue()
        is_over = threading.Event()
        # The end of the process would wait for a pool's thread, however slow the link is.
        LoneThread(target=_read_what_is_asked, args=(self._asked, is_over, mbps), name="records").start()
        weakref.finalize(self, _end, self._asked, is_over)

    def submit(self, read: Callable[[], Loaded]) -> "Future[Loaded]":
        """Submit a read, and return the future of its result."""
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
        del asked  # a reference to the last read would keep the link alive while this thread waits for the next one


def _answer(asked: _Asked, is_over: threading.Event, mbps: float | None, free_s: float) -> float:
    """Perform a read on a link that is free from `free_s` on, and return the time when the link is free again."""
    try:
        found = asked.read()
    except Exception as error:  # noqa: BLE001  the future passes it on
        asked.future.set_exception(error)
        return free_s
    if mbps is not None:
        num_bytes = sum(tensor.nbytes for row in found.rows.values() for tensor in row.values())
        # Counted from when the link was free, not from now, because a sleeping thread wakes up late.
        free_s = max(free_s, asked.at_s) + num_bytes / (mbps * 1e6)
        is_over.wait(max(0.0, free_s - time.perf_counter()))
    asked.future.set_result(found)
    return free_s


def _end(queue: "SimpleQueue[_Asked | None]", is_over: threading.Event) -> None:
    is_over.set()
    queue.put(None)
