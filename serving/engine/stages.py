"""Stages beside the denoise loop, each in a thread of its own or between the steps of the loop."""

import contextlib
import functools
import queue
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch

from ..core.threads import LoneThread

Item = TypeVar("Item")
QueuedItem = TypeVar("QueuedItem", contravariant=True)


@functools.cache
def _stream_of(name: str, device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a stage. All engines share it, as torch cycles through a pool of 32 streams per device."""
    return torch.cuda.Stream(device)


STALLED_S, STALLED_TIMES = 30.0, 20.0
"""Work is stalled if it takes longer than this many seconds and this many times its usual duration."""
_RECENT = 3


class UsualDuration:
    """Median of the last three durations of repeated work, with which the current one is compared.

    A single duration would not do: after a pause of a minute, which is no fault of the work, it would take 20 minutes
    until the next stall is noticed.
    """

    def __init__(self) -> None:
        self._recent_s: deque[float] = deque(maxlen=_RECENT)
        self._usual_s = 0.0

    def note(self, duration_s: float) -> None:
        """Record a duration. Only one thread at a time may call this."""
        self._recent_s.append(duration_s)
        self._usual_s = statistics.median_low(self._recent_s)

    def is_exceeded(self, since_s: float) -> bool:
        """Return whether work that began at `since_s`, by `time.monotonic`, is stalled. Thread-safe."""
        return time.monotonic() - since_s > max(STALLED_S, STALLED_TIMES * self._usual_s)


class Pulse:
    """Progress of a stage: how long the current item takes, compared with recent ones. Thread-safe to read."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._usual = UsualDuration()

    def __enter__(self) -> None:
        self._since_s = time.monotonic()

    def __exit__(self, *exception: object) -> None:
        assert self._since_s is not None
        self._usual.note(time.monotonic() - self._since_s)
        self._since_s = None

    @property
    def is_stalled(self) -> bool:
        """Whether work on the current item is stalled."""
        since_s = self._since_s
        return since_s is not None and self._usual.is_exceeded(since_s)


class Stage(Protocol[QueuedItem]):
    """Serves items one by one, first come, first served.

    Attributes:
        error: error that has ended the stage; None if there is none.
        pulse: progress of its work.
    """

    error: BaseException | None
    pulse: Pulse

    def start(self) -> None:
        """Start to serve items."""

    def put(self, item: QueuedItem) -> None:
        """Queue an item. Thread-safe."""

    def discard_queued(self) -> None:
        """Discard the items that have not been started."""

    def finish(self) -> None:
        """Serve all queued items, then end. Blocks until it is done."""


class InlineStage(Generic[Item]):
    """A `Stage` that serves in the thread that calls `serve`, in which errors of `work` are raised.

    Args:
        work: called with each item.
    """

    def __init__(self, work: Callable[[Item], None]) -> None:
        self._work = work
        self._queue: deque[Item] = deque()
        self.error: BaseException | None = None
        self.pulse = Pulse()

    @property
    def is_due(self) -> bool:
        """Whether items are queued."""
        return bool(self._queue)

    def start(self) -> None:
        """Do nothing: `serve` does the work."""

    def put(self, item: Item) -> None:
        """Queue an item."""
        self._queue.append(item)

    def discard_queued(self) -> None:
        """Discard the queued items."""
        self._queue.clear()

    def serve(self) -> None:
        """Serve all queued items, including those that are queued meanwhile.

        An item that Ctrl-C interrupts stays in the queue, so that `finish` serves it.
        """
        while self._queue:
            item = self._queue.popleft()
            try:
                with self.pulse:
                    self._work(item)
            except KeyboardInterrupt:
                self._queue.appendleft(item)
                raise

    def finish(self) -> None:
        """Serve all queued items."""
        self.serve()


class StageThread(Generic[Item]):
    """A `Stage` that serves in a thread of its own.

    `work` must handle its own errors: an exception that it raises is a defect, is kept in `error` and ends the thread.

    Args:
        name: thread name.
        work: called with each item.
        device: device of the work. On CUDA the thread gets its own stream, so that its kernels do not queue up
            between the kernels of a denoising step.
        on_error: called, from the stage's thread, after `error` was set.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Item], None],
        *,
        device: torch.device,
        on_error: Callable[[], None] | None = None,
    ) -> None:
        self._work = work
        self._on_error = on_error
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._device = device
        self._is_discarding = False
        self.error: BaseException | None = None
        self.pulse = Pulse()
        self._thread = LoneThread(target=self._serve, name=name)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, item: Item) -> None:
        """Queue an item. Thread-safe."""
        self._queue.put(item)

    def discard_queued(self) -> None:
        """Discard all items that have not been started, now and later."""
        self._is_discarding = True

    def finish(self) -> None:
        """Serve all queued items, then end the thread. Blocks until it has ended."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _serve(self) -> None:
        try:
            stream = _stream_of(self._thread.name, self._device) if self._device.type == "cuda" else None
            while (item := self._queue.get()) is not None:
                if self._is_discarding:
                    continue
                with self.pulse, torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                    self._work(item)
        except BaseException as error:  # noqa: BLE001  passed to the engine's thread, which raises it
            self.error = error
            if self._on_error is not None:
                self._on_error()
