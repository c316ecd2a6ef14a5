"""Channel for Python values between two processes of one machine. Tensors and arrays go through shared memory."""

import io
import mmap
import os
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

import torch

from ..core.processes import memory_file

_HEADER = struct.Struct("<Q")
"""Number of bytes of the pickled value at the start of the file that is sent with it; its buffers follow there."""
_ALIGNMENT = 64


class Channel:
    """One end of a pair of connected sockets between two processes.

    Values are pickled, which is safe because both processes belong to psctl and no other process can reach the sockets.
    The data of tensors and arrays is written once, to an unnamed file, and mapped by the receiver. Tensors arrive on
    the CPU.

    Args:
        end: the socket, which the channel closes.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def limit(self, seconds: float | None) -> None:
        """Set the time without progress at the other end after which `send` and `receive` raise TimeoutError.

        None: wait without a limit.
        """
        self._socket.settimeout(seconds)

    def send(self, value: Any) -> None:
        """Send a value. Raises OSError: the other end is closed."""
        buffers: list[pickle.PickleBuffer] = []
        stream = io.BytesIO()
        _Pickler(stream, 5, buffer_callback=buffers.append).dump(value)
        raws = [buffer.raw() for buffer in buffers]
        head = pickle.dumps(([raw.nbytes for raw in raws], stream.getvalue()))
        with os.fdopen(memory_file(), "wb") as file:
            for part in (head, *raws):
                file.write(part)
                file.write(bytes(-len(part) % _ALIGNMENT))
            file.flush()
            socket.send_fds(self._socket, [_HEADER.pack(len(head))], [file.fileno()])

    def receive(self) -> Any:
        """Wait for the next value and return it. Raises EOFError or OSError: the other end is closed."""
        header, descriptors, _, _ = socket.recv_fds(self._socket, _HEADER.size, 1)
        if not descriptors:
            raise EOFError("the other process has gone")
        with os.fdopen(descriptors[0], "rb") as file:
            memory = memoryview(mmap.mmap(file.fileno(), 0))
        # The header is sent at once, and so it arrives.
        [size] = _HEADER.unpack(header)
        sizes, body = pickle.loads(memory[:size])
        buffers = []
        for num_bytes in sizes:
            start = size + -size % _ALIGNMENT
            size = start + num_bytes
            buffers.append(memory[start:size])
        return pickle.loads(body, buffers=buffers)

    def close(self) -> None:
        """Close this end; a pending `receive` at the other end raises EOFError."""
        self._socket.close()


class _Pickler(pickle.Pickler):
    """Pickler that passes the elements of tensors as buffers."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        elements = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return _tensor, (pickle.PickleBuffer(elements.numpy().data), value.dtype, tuple(value.shape))


def _tensor(buffer: Any, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    if memoryview(buffer).nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).reshape(shape)
