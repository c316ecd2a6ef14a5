"""The link that records are read through, one read at a time in a thread of its own (InstGenIE section 4.2)."""

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import NamedTuple

from ..core.threads import LoneThread
from .uploads import LoadedUnit


class RecordLink:
    """Thread that performs the reads of a process's records one at a time, in the order in which they were submitted.

    Args:
        mbps: limit of the throughput in megabytes (10^6 bytes) per second; None for no limit.
    """

    def __init__(self, mbps: float | None = None) -> None:
        self._pending: SimpleQueue[_PendingRead | None] = SimpleQueue()
        is_closed = threading.Event()
        # The end of the process would wait for a pool's thread, however slow the link is.
        LoneThread(target=_perform_reads, args=(self._pending, is_closed, mbps), name="records").start()
        weakref.finalize(self, _end, self._pending, is_closed)

    def submit(self, read: Callable[[], LoadedUnit]) -> "Future[LoadedUnit]":
        """Submit a read, and return the future of its result."""
        pending = _PendingRead(Future(), read, time.perf_counter())
        self._pending.put(pending)
        return pending.future


class _PendingRead(NamedTuple):
    future: "Future[LoadedUnit]"
    read: Callable[[], LoadedUnit]
    at_s: float


def _perform_reads(queue: "SimpleQueue[_PendingRead | None]", is_closed: threading.Event, mbps: float | None) -> None:
    free_s = 0.0
    while (pending := queue.get()) is not None:
        if not is_closed.is_set() and pending.future.set_running_or_notify_cancel():
            free_s = _perform(pending, is_closed, mbps, free_s)
        del pending  # a reference to the last read would keep the link alive while this thread waits for the next one


def _perform(pending: _PendingRead, is_closed: threading.Event, mbps: float | None, free_s: float) -> float:
    """Perform a read on a link that is free from `free_s` on, and return the time when the link is free again."""
    try:
        loaded = pending.read()
    except Exception as error:  # noqa: BLE001  the future passes it on
        pending.future.set_exception(error)
        return free_s
    if mbps is not None:
        num_bytes = sum(tensor.nbytes for row in loaded.rows.values() for tensor in row.values())
        # Counted from when the link was free, not from now, because a sleeping thread wakes up late.
        free_s = max(free_s, pending.at_s) + num_bytes / (mbps * 1e6)
        is_closed.wait(max(0.0, free_s - time.perf_counter()))
    pending.future.set_result(loaded)
    return free_s


def _end(queue: "SimpleQueue[_PendingRead | None]", is_closed: threading.Event) -> None:
    is_closed.set()
    queue.put(None)
