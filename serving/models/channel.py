"""Channel for Python values between two processes of one machine. Tensors and arrays go through shared memory."""

import io
import mmap
import os
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any, BinaryIO

import torch

from ..core.processes import memory_file

_HEADER = struct.Struct("<Q")
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
        message = pickle.dumps(([raw.nbytes for raw in raws], stream.getvalue()))
        with os.fdopen(memory_file(), "wb") as file:
            for raw in raws:
                file.write(raw)
                file.write(bytes(-raw.nbytes % _ALIGNMENT))
            file.flush()
            socket.send_fds(self._socket, [_HEADER.pack(len(message))], [file.fileno()])
        self._socket.sendall(message)

    def receive(self) -> Any:
        """Wait for the next value and return it. Raises EOFError or OSError: the other end is closed."""
        header, descriptors, _, _ = socket.recv_fds(self._socket, _HEADER.size, 1)
        if not descriptors:
            raise EOFError("the other process has gone")
        with os.fdopen(descriptors[0], "rb") as file:
            header += self._read(_HEADER.size - len(header))
            sizes, body = pickle.loads(self._read(*_HEADER.unpack(header)))
            return pickle.loads(body, buffers=_mapped(file, sizes))

    def close(self) -> None:
        """Close this end; a pending `receive` at the other end raises EOFError."""
        self._socket.close()

    def _read(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            more = self._socket.recv(size - len(found))
            if not more:
                raise EOFError("the other process has gone")
            found += more
        return bytes(found)


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


def _mapped(file: BinaryIO, sizes: Sequence[int]) -> list[memoryview]:
    """Map a file, and return its parts as memory that lives as long as a part is in use."""
    if not sum(sizes):
        return [memoryview(bytearray()) for _ in sizes]
    memory, start, pieces = memoryview(mmap.mmap(file.fileno(), 0)), 0, []
    for size in sizes:
        pieces.append(memory[start : start + size])
        start += size + -size % _ALIGNMENT
    return pieces
