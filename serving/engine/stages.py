"""What runs beside the denoise loop: prepare and postprocess in a thread each, or between its steps."""

import contextlib
import functools
import queue
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch

from ..core.threads import LoneThread

Item = TypeVar("Item")
Taken = TypeVar("Taken", contravariant=True)


@functools.cache
def _stream_of(name: str, device: torch.device) -> torch.cuda.Stream:
    """The stream of a stage. One for all engines: torch hands out 32 of a device in turn, and then the same again."""
    return torch.cuda.Stream(device)


STALLED_S, STALLED_TIMES = 30.0, 20.0
"""What takes longer than so many seconds, and so many times as long as the last time, stands still."""


class Pulse:
    """Whether work goes on: how long the present item takes, beside the one before. Any thread may ask."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._last_s = 0.0

    def __enter__(self) -> None:
        self._since_s = time.monotonic()

    def __exit__(self, *exception: object) -> None:
        assert self._since_s is not None
        self._last_s, self._since_s = time.monotonic() - self._since_s, None

    @property
    def is_stalled(self) -> bool:
        """Whether the present item stands still."""
        since_s = self._since_s
        return since_s is not None and is_stalled(since_s, self._last_s)


def is_stalled(since_s: float, last_s: float) -> bool:
    """Whether what has begun at that time, by `time.monotonic`, stands still; the last time it took `last_s`."""
    return time.monotonic() - since_s > max(STALLED_S, STALLED_TIMES * last_s)


class Stage(Protocol[Taken]):
    """Serves items one by one, first come, first served.

    Attributes:
        error: what has ended it.
        pulse: of its work.
    """

    error: BaseException | None
    pulse: Pulse

    def start(self) -> None:
        """Begin to serve."""

    def put(self, item: Taken) -> None:
        """Queue an item; any thread may."""

    def discard_queued(self) -> None:
        """Let go of the items that have not been started."""

    def finish(self) -> None:
        """Return when all queued items are served; it serves no others then."""


class InlineStage(Generic[Item]):
    """See `Stage`: serves in the thread that calls `serve`, to which `work` raises.

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
        """See `Stage`."""

    def put(self, item: Item) -> None:
        """See `Stage`."""
        self._queue.append(item)

    def discard_queued(self) -> None:
        """See `Stage`."""
        self._queue.clear()

    def serve(self) -> None:
        """Serve what is queued, and what is queued meanwhile."""
        while self._queue:
            with self.pulse:
                self._work(self._queue.popleft())

    def finish(self) -> None:
        """See `Stage`."""
        self.serve()


class StageThread(Generic[Item]):
    """See `Stage`: serves in a thread of its own.

    `work` must handle its own errors: whatever it raises is a defect. It is kept in `error` and ends the thread.

    Args:
        name: thread name.
        work: called with each item.
        device: where the work runs. On CUDA the thread gets its own stream, so that its kernels do not queue up
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
        """See `Stage`."""
        self._thread.start()

    def put(self, item: Item) -> None:
        """See `Stage`."""
        self._queue.put(item)

    def discard_queued(self) -> None:
        """See `Stage`."""
        self._is_discarding = True

    def finish(self) -> None:
        """See `Stage`. The thread ends."""
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
        except BaseException as error:  # noqa: BLE001  handed to the engine's thread, which raises it
            self.error = error
            if self._on_error is not None:
                self._on_error()
