"""`--cuda-graphs`: whole forward passes recorded once and replayed, so that the host makes one launch per step.

A pass is recorded for each composition of rows: attention runs once per resolution, so that the number of patches alone
does not determine the kernels. The first pass of a patched batch runs eagerly; it computes the tensors that the batch
keeps (text keys and values), which are then copied to where the recorded pass reads them. The plain model keeps its
conditions and has nothing to compute beforehand.

Recording stalls the device, and there are hundreds of compositions. Passes are therefore recorded only for batches that
stay for a while and for compositions that recur, and the memory of recorded passes is bounded.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from .prepared import describe

Forward = Callable[[dict[str, Any], Any], Tensor]
Recorder = Callable[[Callable[[], Tensor]], tuple[Callable[[], object], Tensor]]
"""Records work; returns a function that replays it on the same memory, and the tensor that then holds its result."""
PATIENCE = 4
"""Number of passes of a composition that run eagerly before it is recorded, in one batch or in several."""
MEMORY_BYTES = 4_000_000_000
"""Largest size of the inputs, text keys and values, and results of all recorded passes, which share working memory."""
_NUM_COUNTED = 4096
"""Number of compositions whose passes are counted."""


class CudaRecorder:
    """Records CUDA graphs on a device; they share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()
        # High priority: torch takes such streams from another pool than those of the stages, which run meanwhile.
        self._stream = torch.cuda.Stream(device, priority=-1)

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """Record work in a graph; return its replay function, and the tensor that then holds the result."""
        graph = torch.cuda.CUDAGraph()
        # Other threads encode prompts and decode images meanwhile; their allocations do not belong to the graph.
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            result = work()
        return graph.replay, result


@dataclass(slots=True, eq=False)
class _RecordedPass:
    """A recorded pass and the memory that it reads and writes. `kept_alive` is not read."""

    play: Callable[[], object]
    inputs: dict[str, Any]
    batch_values: Any
    result: Tensor
    kept_alive: object
    filled_by: "PassBatch"

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for part in (self.inputs, self.batch_values, self.result) for tensor in _tensors(part))


@dataclass(slots=True, eq=False)
class PassBatch:
    """Rows that stay together for some passes, with the tensors that they keep.

    Attributes:
        is_complete: whether all of these tensors are present. If not, the first pass computes them, and runs eagerly.
    """

    is_complete: bool = False


class CapturedPasses:
    """Runs passes eagerly, or replays recorded ones. Not thread-safe.

    The first `patience` passes of a composition run eagerly. Recorded passes hold at most `memory_bytes`; the least
    recently used ones are dropped, and must wait for `patience` passes again.

    Attributes:
        recorder: records the passes.
        failure: why a pass could not be recorded: the device or a kernel does not allow it. From then on, recorded
            passes are replayed and all others run eagerly.
    """

    def __init__(self, recorder: Recorder, patience: int = PATIENCE, memory_bytes: int = MEMORY_BYTES) -> None:
        self.recorder, self._patience, self._memory_bytes = recorder, patience, memory_bytes
        self._recorded: OrderedDict[Hashable, _RecordedPass] = OrderedDict()
        self._num_bytes = 0
        self._num_eager: OrderedDict[Hashable, int] = OrderedDict()
        self.failure: str | None = None

    def clear(self) -> None:
        """Discard all recorded passes, after a change of what they do."""
        self._recorded.clear()
        self._num_bytes = 0

    def run(
        self,
        batch: PassBatch,
        key: Hashable,
        batch_values: Any,
        forward: Forward,
        inputs: dict[str, Any],
        kept_alive: object = None,
    ) -> Tensor:
        """Run one pass.

        Args:
            batch: batch of the pass.
            key: determines, with the shapes of the inputs, which kernels run.
            batch_values: tensors that the batch keeps from pass to pass, in dicts, tuples or data classes; the first
                pass fills it, unless the batch is complete.
            forward: computes the pass from the inputs and `batch_values`. It must not wait for the device.
            inputs: tensors by name, or dicts of such.
            kept_alive: other objects that a recorded pass reads and must keep alive (index tensors of the layout).

        Returns:
            The result; later passes leave it unchanged.
        """
        place = key, tuple((tensor.shape, tensor.dtype) for tensor in _tensors(inputs))
        recorded = self._recorded.get(place)
        is_due = recorded is not None or self._is_due(place)
        if not batch.is_complete or not is_due:
            found = forward(inputs, batch_values)
            batch.is_complete = True
            return found
        if recorded is None:
            recorded = self._record(batch, forward, inputs, batch_values, kept_alive)
            if recorded is None:
                return forward(inputs, batch_values)
            self._store(place, recorded)
        else:
            self._recorded.move_to_end(place)
            _copy(inputs, recorded.inputs)
            if recorded.filled_by is not batch:
                _copy(batch_values, recorded.batch_values)
                recorded.filled_by = batch
        recorded.play()
        return recorded.result.clone()

    def _record(
        self,
        batch: PassBatch,
        forward: Forward,
        inputs: dict[str, Any],
        batch_values: Any,
        kept_alive: object,
    ) -> _RecordedPass | None:
        own_inputs, own_values = _cloned(inputs), _cloned(batch_values)
        try:
            play, result = self.recorder(lambda: forward(own_inputs, own_values))
        except Exception as error:  # noqa: BLE001  the pass itself may still run eagerly
            self.failure = describe("recording a pass", error)
            return None
        return _RecordedPass(play, own_inputs, own_values, result, kept_alive, batch)

    def _is_due(self, place: Hashable) -> bool:
        """Count one more pass of a composition; return whether it has run often enough to be recorded."""
        count = self._num_eager.pop(place, 0)
        self._num_eager[place] = count + 1
        if len(self._num_eager) > _NUM_COUNTED:
            self._num_eager.popitem(last=False)
        return count >= self._patience and self.failure is None

    def _store(self, place: Hashable, recorded: _RecordedPass) -> None:
        self._recorded[place] = recorded
        self._num_bytes += recorded.num_bytes
        while self._num_bytes > self._memory_bytes and len(self._recorded) > 1:
            dropped, old = self._recorded.popitem(last=False)
            self._num_bytes -= old.num_bytes
            self._num_eager.pop(dropped, None)


def _cloned(value: Any) -> Any:
    """Clone all tensors of a value, also in dicts, tuples and data classes."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: _cloned(part) for name, part in value.items()}
    if is_dataclass(value):
        return type(value)(*map(_cloned, _fields_of(value)))  # type: ignore[operator]  it is an instance
    return tuple(map(_cloned, value)) if isinstance(value, tuple) else value


def _tensors(value: Any) -> Iterator[Tensor]:
    """Iterate over all tensors of a value, in order."""
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, dict | tuple):
        parts = value.values() if isinstance(value, dict) else value
    else:
        parts = _fields_of(value) if is_dataclass(value) else ()
    for part in parts:
        yield from _tensors(part)


def _fields_of(value: Any) -> list[Any]:
    return [getattr(value, each.name) for each in fields(value)]


def _copy(source: Any, target: Any) -> None:
    """Copy the tensors of one value into those of another, in few launches."""
    if targets := list(_tensors(target)):
        torch._foreach_copy_(targets, list(_tensors(source)))
