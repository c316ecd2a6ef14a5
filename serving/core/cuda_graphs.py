"""Recording of passes as CUDA graphs."""

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from .captured import Pause, Results, copy_all

_MEMORY_SHARE = 0.1
"""Share of a GPU's memory for what recorded passes keep, see `CapturedPasses`."""
_ONE_RECORDING = threading.Lock()
"""Held while a thread records: it waits for the device, which the recording of another thread would forbid."""


class CudaRecorder:
    """Records CUDA graphs on a device; they share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()
        # High priority: torch takes such streams from another pool than those of the stages, which run meanwhile.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self.memory_bytes = int(_MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory)

    def __call__(self, work: Callable[[Pause], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """Record work in graphs; return its replay function, and the tensor that then holds the result. Thread-safe."""
        with _ONE_RECORDING:
            return self._recorded(work)

    def _recorded(self, work: Callable[[Pause], Tensor]) -> tuple[Callable[[], object], Tensor]:
        parts: list[Callable[[], object]] = []
        graph = torch.cuda.CUDAGraph()

        def begin() -> None:
            nonlocal graph
            graph = torch.cuda.CUDAGraph()
            # Other threads encode prompts and decode images meanwhile; their allocations do not belong to the graph.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def end() -> None:
            graph.capture_end()
            parts.append(graph.replay)

        def pause(run: Callable[..., Results], inputs: Sequence[Tensor]) -> Results:
            end()
            shapes = run(*inputs)
            begin()
            # In the memory of the graphs, so that passes share it.
            results = tuple(torch.empty_like(each) for each in shapes)
            own, targets = (tuple(map(_borrowed, each)) for each in (inputs, results))
            parts.append(lambda: copy_all(run(*own), targets))
            return results

        torch.cuda.synchronize(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream), _no_collections():
            begin()
            try:
                result = work(pause)
            except BaseException:
                with suppress(RuntimeError):  # the failure has ended the recording
                    graph.capture_end()
                raise
            end()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

        def replay() -> None:
            for part in parts:
                part()

        return replay, result


@contextmanager
def _no_collections() -> Iterator[None]:
    """Collect garbage now and not meanwhile: freeing memory of the device would invalidate a recording."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _borrowed(tensor: Tensor) -> Tensor:
    """Return the same tensor on the device without keeping its memory, which later segments may use."""
    whole = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(whole.data_ptr(), tensor.device, whole.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[arg-type]
