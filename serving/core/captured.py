"""`--cuda-graphs`: forward passes recorded once and replayed, so that the host makes few launches per step.

A recorded pass depends on a key and on the shapes of its inputs. The patch engine pads batches to buckets and passes
its layout as data, so that one recorded pass serves all mixes of sizes in a bucket; work that depends on the sizes runs
eagerly between the segments of a pass (`Pause`). Tensors that a batch keeps (text keys and values) are copied to where
the recorded pass reads them when the batch changes. The plain model keeps its conditions, and its passes have a key for
each composition.

Recording stalls the device. Passes are therefore recorded at the start or for keys that recur, and not while more
recorded passes are dropped than replayed; the memory of recorded passes is bounded. The first replay of each recorded
pass must give the result of the same pass run eagerly.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .prepared import describe

Path = tuple[Any, ...]
Results = tuple[Tensor, ...]
Pause = Callable[[Callable[..., Results], Sequence[Tensor]], Results]
"""Interrupts a recording: runs a function of tensors, now and in every replay, whose results have the same shapes each
time. Returns the tensors that hold the results from then on."""
Forward = Callable[[dict[str, Any], Any, Pause | None], Tensor]
Recorder = Callable[[Callable[[Pause], Tensor]], tuple[Callable[[], object], Tensor]]
"""Records work; returns a function that replays it on the same memory, and the tensor that then holds its result."""
PATIENCE = 4
"""Number of passes of a key that run eagerly before it is recorded, in one batch or in several."""
MEMORY_BYTES = 4_000_000_000
"""Largest size of the inputs, text keys and values, and results of all recorded passes, which share working memory,
unless the recorder knows its device's own bound.
"""
_NUM_COUNTED = 4096
"""Number of keys whose passes are counted."""
_NUM_RECENT = 256
"""Number of recent passes in which recorded passes must not be dropped more often than replayed."""
_FIRST_REST, _LONGEST_REST = 64, 16384
"""Number of eager passes after a failed recording before the next attempt: doubled with each failure."""
_ROUNDING = 16
"""Largest relative difference between a recorded pass and the same pass run eagerly, in units of the dtype's rounding
error. Kernels may differ by rounding; a recording that reads other memory than its inputs is off by about 1.
"""


def run_now(run: Callable[..., Results], inputs: Sequence[Tensor]) -> Results:
    """Run work at once: the `Pause` of a pass that is not being recorded."""
    return run(*inputs)


@dataclass(frozen=True, slots=True, eq=False)
class Stacked:
    """An input that consists of several tensors. A recorded pass reads one tensor, to which they are copied.

    Attributes:
        parts: tensors [entries, ...], which follow `num_before` entries of zeros.
        num_before: see above.
        length: number of all entries; those after the parts are zeros at first, and then keep what passes write.
    """

    parts: Sequence[Tensor]
    num_before: int
    length: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.length, *self.parts[0].shape[1:]

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def zeros(self) -> Tensor:
        """Return zeros of the shape of the whole."""
        return self.parts[0].new_zeros(self.shape)

    def tensor(self) -> Tensor:
        """Return the parts and the zeros as one tensor, which is not shared."""
        first = self.parts[0]
        parts = [first.new_zeros(self.num_before, *first.shape[1:]), *self.parts]
        if num_after := self.length - sum(map(len, parts)):
            parts.append(first.new_zeros(num_after, *first.shape[1:]))
        return torch.cat(parts)

    def copies_to(self, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over the parts, each with its place in a tensor of the shape of the whole."""
        start = self.num_before
        for part in self.parts:
            yield part, target[start : start + len(part)]
            start += len(part)


@dataclass(eq=False)
class _Buffer:
    """Memory that recorded passes read, and the batch whose values it holds; None if it changes in every pass."""

    tensor: Tensor
    filled_by: "PassBatch | None" = None


@dataclass(slots=True, eq=False)
class _RecordedPass:
    """A recorded pass and the memory that it reads and writes. `kept_alive` is not read."""

    play: Callable[[], object]
    inputs: Mapping[Path, _Buffer]
    batch_values: Mapping[Path, _Buffer]
    result: Tensor
    kept_alive: object

    @property
    def num_bytes(self) -> int:
        """Size of its result and of the memory that it reads."""
        read = (*self.inputs.values(), *self.batch_values.values())
        return self.result.nbytes + sum(buffer.tensor.nbytes for buffer in read)


@dataclass(slots=True, eq=False)
class PassBatch:
    """Rows that stay together for some passes, with the tensors that they keep.

    Attributes:
        is_complete: whether all of these tensors are present. If not, the first pass computes them, and runs eagerly.
    """

    is_complete: bool = False


class CapturedPasses:
    """Runs passes eagerly, or replays recorded ones. Not thread-safe.

    The first `patience` passes of a key run eagerly. Recorded passes hold at most `memory_bytes`; inputs of the same
    name and shape share memory. The least recently used passes are dropped, and must wait for `patience` passes again.
    After a failed recording, passes run eagerly for a while before the next attempt.

    Attributes:
        recorder: records the passes.
        failure: why a pass could not be recorded the last time this failed: the device or a kernel does not allow it,
            or a replay differs from an eager pass.
        is_due: whether the pass that runs eagerly now is recorded next, with the same inputs, and replayed once.
    """

    def __init__(self, recorder: Recorder, patience: int = PATIENCE, memory_bytes: int | None = None) -> None:
        self.recorder, self._patience = recorder, patience
        own = getattr(recorder, "memory_bytes", MEMORY_BYTES)
        self._memory_bytes: int = own if memory_bytes is None else memory_bytes
        self._recorded: OrderedDict[Hashable, _RecordedPass] = OrderedDict()
        self._buffers: WeakValueDictionary[Hashable, _Buffer] = WeakValueDictionary()
        self._num_eager: OrderedDict[Hashable, int] = OrderedDict()
        self._recent: deque[int] = deque(maxlen=_NUM_RECENT)
        self._rest = self._num_resting = 0
        self.failure: str | None = None
        self.is_due = False

    def for_others(self) -> "CapturedPasses":
        """Return recorded passes of their own, none yet, with the same recorder, patience and bound."""
        return CapturedPasses(self.recorder, self._patience, self._memory_bytes)

    @property
    def is_full(self) -> bool:
        """Whether another recorded pass of the size of the last one would exceed the memory."""
        last = next(reversed(self._recorded.values()), None)
        return last is not None and self._num_bytes + last.num_bytes > self._memory_bytes

    def clear(self) -> None:
        """Discard all recorded passes, after a change of what they do."""
        self._recorded.clear()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Record the passes within the context when they first run."""
        patience, self._patience = self._patience, 0
        try:
            yield
        finally:
            self._patience = patience

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
            forward: computes the pass from the inputs and `batch_values`. It must not wait for the device, except where
                it pauses the recording.
            inputs: tensors by name, or dicts or tuples of such. Where an input is `Stacked`, a recorded pass is given a
                tensor.
            kept_alive: other objects that a recorded pass reads and must keep alive (index tensors of the layout).

        Returns:
            The result; later passes leave it unchanged.
        """
        place = key, tuple((tensor.shape, tensor.dtype) for _, tensor in _tensors(inputs))
        recorded = self._recorded.get(place)
        if (
            batch.is_complete
            and recorded is not None
            and _fill(recorded.inputs, recorded.batch_values, batch, inputs, batch_values)
        ):
            self._recorded.move_to_end(place)
            self._recent.append(1)
            recorded.play()
            return recorded.result.clone()
        self._recent.append(0)
        # Passes of incomplete batches count, too.
        self.is_due = recorded is None and self._has_recurred(place) and batch.is_complete
        found = forward(inputs, batch_values, None)
        if self.is_due:
            recorded = self._record(batch, forward, inputs, batch_values, found, kept_alive)
            if recorded is not None:
                self._store(place, recorded)
        batch.is_complete = True
        return found

    def _record(
        self,
        batch: PassBatch,
        forward: Forward,
        inputs: dict[str, Any],
        batch_values: Any,
        expected: Tensor,
        kept_alive: object,
    ) -> _RecordedPass | None:
        """Record a pass whose result is `expected`; return None if this fails."""
        of_inputs, of_values = (
            {path: self._buffer(name, path, tensor) for path, tensor in _tensors(tree)}
            for name, tree in (("inputs", inputs), ("values", batch_values))
        )
        own_inputs, own_values = _replaced(inputs, of_inputs), _replaced(batch_values, of_values)
        # Before the recording: indices that are left from other passes may be out of range in this one.
        _fill(of_inputs, of_values, batch, inputs, batch_values)
        try:
            play, result = self.recorder(lambda pause: forward(own_inputs, own_values, pause))
            recorded = _RecordedPass(play, of_inputs, of_values, result, kept_alive)
            play()
            _check_equal(result, expected)
        except Exception as error:  # noqa: BLE001  the pass itself has run
            self.failure = describe("recording a pass", error)
            self._rest = self._num_resting = min(max(2 * self._rest, _FIRST_REST), _LONGEST_REST)
            return None
        return recorded

    def _buffer(self, kind: str, path: Path, given: Tensor | Stacked) -> _Buffer:
        """Return the memory for a tensor: that of others with the same path and shape, if there are any."""
        strides = given.stride() if isinstance(given, Tensor) else None
        place = kind, path, given.shape, strides, given.dtype
        found = self._buffers.get(place)
        if found is None:
            made = given.clone() if isinstance(given, Tensor) else given.zeros()
            found = self._buffers[place] = _Buffer(made)
        return found

    @property
    def _num_bytes(self) -> int:
        results = sum(recorded.result.nbytes for recorded in self._recorded.values())
        return results + sum(buffer.tensor.nbytes for buffer in self._buffers.values())

    def _has_recurred(self, place: Hashable) -> bool:
        """Count one more eager pass of a key; return whether it is to be recorded."""
        count = self._num_eager.pop(place, 0)
        self._num_eager[place] = count + 1
        if len(self._num_eager) > _NUM_COUNTED:
            self._num_eager.popitem(last=False)
        is_resting, self._num_resting = self._num_resting > 0, max(self._num_resting - 1, 0)
        return count >= self._patience and not is_resting and sum(self._recent) >= 0

    def _store(self, place: Hashable, recorded: _RecordedPass) -> None:
        self._recorded[place] = recorded
        while self._num_bytes > self._memory_bytes and len(self._recorded) > 1:
            dropped, _ = self._recorded.popitem(last=False)
            self._num_eager.pop(dropped, None)
            self._recent.append(-1)


def _check_equal(found: Tensor, expected: Tensor) -> None:
    """Raise RuntimeError if the result of a recorded pass differs from that of the same pass run eagerly."""
    error, norm = (each.double().nan_to_num().norm() for each in (found.double() - expected.double(), expected))
    relative = float(error / norm.clamp_min(1e-30))
    if not relative <= _ROUNDING * max(torch.finfo(found.dtype).eps, 1e-4):
        raise RuntimeError(f"its replay differs from the same pass run eagerly by {relative:.2g} of the result")


def _fill(
    of_inputs: Mapping[Path, _Buffer],
    of_values: Mapping[Path, _Buffer],
    batch: PassBatch,
    inputs: dict[str, Any],
    batch_values: Any,
) -> bool:
    """Copy the inputs of a pass, and the values of its batch unless they are there, to where they are read.

    Returns False, and copies nothing, if the batch lacks a value, as its passes so far had other keys.
    """
    missing = {path: buffer for path, buffer in of_values.items() if buffer.filled_by is not batch}
    values = dict(_tensors(batch_values)) if missing else {}
    if any(path not in values or values[path].shape != buffer.tensor.shape for path, buffer in missing.items()):
        return False
    pairs: list[tuple[Tensor, Tensor]] = []
    for path, given in _tensors(inputs):
        target = of_inputs[path].tensor
        pairs += [(given, target)] if isinstance(given, Tensor) else given.copies_to(target)
    for path, buffer in missing.items():
        tensor = values[path]
        assert isinstance(tensor, Tensor), "what changes from pass to pass is an input"
        pairs.append((tensor, buffer.tensor))
        buffer.filled_by = batch
    copy_all(*zip(*pairs, strict=True))
    return True


def _parts(value: Any) -> dict[Any, Any] | None:
    """Return the parts of a dict, a tuple or a data class by name; None for other values."""
    if isinstance(value, dict):
        return value
    if isinstance(value, tuple):
        return dict(enumerate(value))
    if not is_dataclass(value):
        return None
    return {each.name: getattr(value, each.name) for each in fields(value) if each.init}


def _tensors(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor | Stacked]]:
    """Iterate over all tensors of a value, also in its parts, each with its path."""
    if isinstance(value, Tensor | Stacked):
        yield path, value
        return
    for name, part in (_parts(value) or {}).items():
        yield from _tensors(part, (*path, name))


def _replaced(value: Any, buffers: Mapping[Path, _Buffer], path: Path = ()) -> Any:
    """Return a value with all tensors replaced by those of buffers."""
    if isinstance(value, Tensor | Stacked):
        return buffers[path].tensor
    parts = _parts(value)
    if parts is None:
        return value
    found = {name: _replaced(part, buffers, (*path, name)) for name, part in parts.items()}
    if isinstance(value, dict):
        return found
    return tuple(found.values()) if isinstance(value, tuple) else type(value)(**found)


def constants_of(value: Any) -> Hashable:
    """Return the part of conditions that a recorded pass cannot read anew: shapes and dtypes in place of tensors."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, list):
        return tuple(map(constants_of, value))
    parts = _parts(value)
    return value if parts is None else tuple((name, constants_of(part)) for name, part in parts.items())


def copy_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy tensors into others, with a call for each dtype: one for several dtypes would launch for each tensor."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in sources):
        chosen = [index for index, tensor in enumerate(sources) if tensor.dtype == dtype]
        torch._foreach_copy_([targets[index] for index in chosen], [sources[index] for index in chosen])
