"""`--cuda-graphs`: whole forward passes recorded once and played back, so that the host launches one thing per step.

A pass is recorded for each composition of rows: attention runs once per resolution, so a number of patches alone would
not say which kernels run. The first pass of a batch runs eagerly; it works out what the batch keeps (text keys and
values), which is then copied to where the recorded pass reads it.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Forward = Callable[[dict[str, Any], dict[Any, Any]], Tensor]
CAPACITY = 32
"""Recorded passes that are kept. They share their working memory; each has its own inputs and result."""


class Recorder(Protocol):
    """Records work on a device."""

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """Record `work`.

        Returns:
            What plays it back on the same memory, and the tensor that then holds its result.
        """
        ...


class CudaRecorder:
    """Records CUDA graphs that share one pool of memory."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """See `Recorder`."""
        graph = torch.cuda.CUDAGraph()
        # Other threads encode prompts and decode images meanwhile; their allocations are none of the graph's business.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = work()
        return graph.replay, result


@dataclass(slots=True, eq=False)
class _Recorded:
    """A pass and the memory that it reads and writes. `held` is kept alive only."""

    play: Callable[[], object]
    inputs: dict[str, Any]
    kept: dict[Any, Any]
    result: Tensor
    held: object
    filled_by: int


class CapturedPasses:
    """Runs passes eagerly or by playing them back. One thread at a time.

    Args:
        recorder: of the device.
        capacity: recorded passes to keep; the one that was not used for longest goes.
    """

    def __init__(self, recorder: Recorder, capacity: int = CAPACITY) -> None:
        self._recorder, self._capacity = recorder, capacity
        self._recorded: OrderedDict[Hashable, _Recorded] = OrderedDict()
        self._batch = 0
        self._is_first = True

    def begin(self) -> None:
        """A new batch: what it keeps has to be worked out."""
        self._batch += 1
        self._is_first = True

    def clear(self) -> None:
        """Forget all recorded passes, as what they do has changed."""
        self._recorded.clear()

    def run(
        self,
        key: Hashable,
        kept: dict[Any, Any],
        forward: Forward,
        inputs: dict[str, Any],
        held: object = None,
    ) -> Tensor:
        """Do one pass.

        Args:
            key: what decides which kernels run, beside the shapes of the inputs.
            kept: what the batch keeps from pass to pass; the first pass fills it.
            forward: the pass, of inputs and `kept`. It must not wait for the device.
            inputs: tensors by name, or dicts of such.
            held: what a recorded pass reads and nobody else may keep alive (index tensors of the layout).

        Returns:
            The result; it stays as it is when other passes run.
        """
        if self._is_first:
            self._is_first = False
            return forward(inputs, kept)
        place = key, tuple((tensor.shape, tensor.dtype) for tensor in _tensors(inputs))
        recorded = self._recorded.get(place)
        if recorded is None:
            recorded = self._recorded[place] = self._record(forward, inputs, kept, held)
            if len(self._recorded) > self._capacity:
                self._recorded.popitem(last=False)
        else:
            self._recorded.move_to_end(place)
            _copy(inputs, recorded.inputs)
            if recorded.filled_by != self._batch:
                _copy(kept, recorded.kept)
                recorded.filled_by = self._batch
        recorded.play()
        return recorded.result.clone()

    def _record(
        self,
        forward: Forward,
        inputs: dict[str, Any],
        kept: dict[Any, Any],
        held: object,
    ) -> _Recorded:
        own_inputs, own_kept = _cloned(inputs), _cloned(kept)
        play, result = self._recorder(lambda: forward(own_inputs, own_kept))
        return _Recorded(play, own_inputs, own_kept, result, held, self._batch)


def _cloned(value: Any) -> Any:
    """The same with tensors of its own, in dicts and tuples too."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: _cloned(part) for name, part in value.items()}
    return tuple(map(_cloned, value)) if isinstance(value, tuple) else value


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in it, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


def _copy(source: Any, target: Any) -> None:
    """Copy the tensors of one into those of the other, all in few launches."""
    if targets := list(_tensors(target)):
        torch._foreach_copy_(targets, list(_tensors(source)))
