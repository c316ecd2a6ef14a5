"""Uploads of records to a CUDA device, unit by unit, from pinned memory and on a separate stream while the device
computes (InstGenIE section 4.2).
"""

import functools
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ...data.errors import RunError
from ..core.prepared import RecordedRow

_ALIGNED = 16
"""Alignment of each tensor in bytes, for fast access by kernels."""


class LoadedUnit(NamedTuple):
    """Tensors of a unit after a read.

    Attributes:
        rows: recorded tensors, by row number and operator name.
        ready: event that completes with the copies to the device; None if there is nothing to wait for.
    """

    rows: Mapping[int, RecordedRow]
    ready: torch.cuda.Event | None = None

    def take(self, row: int, operator: str) -> Tensor:
        """Return a tensor for use by kernels launched from now on. Raises KeyError: it was not recorded."""
        found = self.rows[row][operator]
        if self.ready is not None:
            stream = torch.cuda.current_stream(found.device)
            stream.wait_event(self.ready)
            # The allocator does not reuse its memory before the work queued on this stream is done.
            found.record_stream(stream)
        return found


class PackedRows:
    """Tensors packed into one piece of memory.

    Args:
        rows: the tensors, by row and name.
        is_pinned: whether the memory is pinned, so that a CUDA device can copy from it asynchronously.

    Raises:
        RunError: the memory cannot be allocated.
    """

    def __init__(self, rows: Mapping[int, RecordedRow], *, is_pinned: bool) -> None:
        self._places: dict[tuple[int, str], tuple[int, torch.Size, torch.dtype]] = {}
        tensors = {(row, name): tensor for row, seen in rows.items() for name, tensor in seen.items()}
        end = 0
        for key, tensor in tensors.items():
            self._places[key] = end, tensor.shape, tensor.dtype
            end += math.ceil(tensor.nbytes / _ALIGNED) * _ALIGNED
        try:
            self.memory = torch.empty(end, dtype=torch.uint8, pin_memory=is_pinned)
        except RuntimeError as error:
            what = str(error).splitlines()[0]
            raise RunError(
                f"{end / 1e6:,.1f} MB of a template's record find no memory that a GPU reads: {what}"
            ) from error
        own = self.rows()
        for (row, name), tensor in tensors.items():
            own[row][name].copy_(tensor)

    def rows(self, memory: Tensor | None = None) -> Mapping[int, RecordedRow]:
        """Return views of the tensors in this memory, or in a copy of it."""
        memory = self.memory if memory is None else memory
        found: dict[int, dict[str, Tensor]] = defaultdict(dict)
        for (row, name), (start, shape, dtype) in self._places.items():
            part = memory[start : start + shape.numel() * dtype.itemsize]
            found[row][name] = part.view(dtype).view(shape)
        return found


def upload(packed: PackedRows, device: torch.device) -> LoadedUnit:
    """Start an asynchronous copy from pinned memory to a CUDA device."""
    stream = _stream_to(device)
    with torch.cuda.stream(stream):
        memory = packed.memory.to(device, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record(stream)
    return LoadedUnit(packed.rows(memory), ready)


@functools.cache
def _stream_to(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
