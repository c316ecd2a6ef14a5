"""Threads beside the denoise loop, and one denoising iteration over all active requests.

Prepare and postprocess each run in a `StageThread`: a queue served first come, first served, by one thread. The
denoise stage itself is the function `denoise_step`, called by the engine's own thread.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from .model import PreparedRequest, ServedModel

if TYPE_CHECKING:
    from ..data.resolution import Resolution


Item = TypeVar("Item")


class StageThread(Generic[Item]):
    """Serves items one by one in a thread of its own.

    `work` must handle its own errors: whatever it raises is a defect. It is kept in `error` and ends the thread.

    Args:
        name: thread name.
        work: called with each item.
        device: where the work runs. On CUDA the thread gets its own stream, so that its kernels do not queue up
            between the kernels of a denoising step.
        num_threads: CPU threads for operators of this stage. One by default: more would fight with the denoise loop
            for the same cores, and OpenMP threads that spin for each other then slow both many times over.
        on_error: called, from the stage's thread, after `error` was set.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Item], None],
        *,
        device: torch.device,
        num_threads: int = 1,
        on_error: Callable[[], None] | None = None,
    ) -> None:
        self._work = work
        self._on_error = on_error
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._device = device
        self._num_threads = num_threads
        self._is_discarding = False
        self._is_ready = threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread, leaving the caller's own number of CPU threads as it was."""
        num_threads = torch.get_num_threads()
        self._thread.start()
        self._is_ready.wait()
        # `set_num_threads` is per thread with OpenMP, but threads started later inherit the last value that any
        # thread has set. Set ours again so that nobody else inherits the stage's.
        torch.set_num_threads(num_threads)

    def put(self, item: Item) -> None:
        """Queue an item."""
        self._queue.put(item)

    def discard_queued(self) -> None:
        """Let go of the items that have not been started."""
        self._is_discarding = True

    def finish(self) -> None:
        """Wait until all queued items are served, then end the thread."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _serve(self) -> None:
        torch.set_num_threads(self._num_threads)
        self._is_ready.set()
        try:
            stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
            while (item := self._queue.get()) is not None:
                if self._is_discarding:
                    continue
                with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                    self._work(item)
        except BaseException as error:  # noqa: BLE001  handed to the engine's thread, which raises it
            self.error = error
            if self._on_error is not None:
                self._on_error()


def group_by_resolution(active: Iterable[PreparedRequest]) -> "dict[Resolution, list[PreparedRequest]]":
    """Group requests by resolution, both in order of first appearance."""
    groups: dict[Resolution, list[PreparedRequest]] = {}
    for prepared in active:
        groups.setdefault(prepared.request.resolution, []).append(prepared)
    return groups


def denoise_step(model: ServedModel, active: Iterable[PreparedRequest]) -> dict[int, str]:
    """Take one denoising step of every active request: one forward pass per resolution.

    Returns:
        The requests that failed, by id, with the reason. A failing forward pass is repeated one by one, so that only
        the requests which fail alone are named; the others have taken their step.
    """
    failures: dict[int, str] = {}
    finite: dict[int, torch.Tensor] = {}
    for group in group_by_resolution(active).values():
        for prepared, prediction in _predict_each(model, group, failures):
            try:
                model.advance(prepared, prediction)
                finite[prepared.request.request_id] = prepared.latents.isfinite().all()
            except Exception as error:  # noqa: BLE001  one failing request must not take down the others
                failures[prepared.request.request_id] = describe("denoising", error)
    if finite:
        # The only wait for the device in an iteration. It makes measured step times honest, and after it no kernel
        # of this step still reads tensors that other threads allocated or are about to use.
        for request_id, is_finite in zip(finite, torch.stack(list(finite.values())).tolist(), strict=True):
            if not is_finite:
                failures[request_id] = "denoising: latents are not finite (NaN or infinity)"
    return failures


def _predict_each(
    model: ServedModel, group: list[PreparedRequest], failures: dict[int, str]
) -> list[tuple[PreparedRequest, torch.Tensor]]:
    """Predict for a group of one resolution, together if possible, else one by one."""
    try:
        return list(zip(group, model.predict(group), strict=True))
    except Exception as error:  # noqa: BLE001  as above
        if len(group) == 1:
            failures[group[0].request.request_id] = describe("denoising", error)
            return []
    return [pair for prepared in group for pair in _predict_each(model, [prepared], failures)]


def describe(stage: str, error: Exception) -> str:
    """Return one line that says which stage failed and why."""
    lines = str(error).strip().splitlines()
    return f"{stage}: {type(error).__name__}" + (f": {lines[0]}" if lines else "")
