"""Transport between processes of one machine: tensors through shared memory, and a short record each through a socket.

The sender copies a tensor into a block of shared memory and announces it in 24 bytes; the receiver copies it out and
returns the block. The memory has no name and is freed with the processes. Sending never blocks.
"""

import contextlib
import mmap
import os
import select
import shutil
import socket
import struct
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ...data.run_facts import usable_cores
from ..core.processes import memory_file
from .group import GroupError

_WORD = struct.Struct("<IIQQ")
"""Record of a block: tag, number of the memory, offset in it and number of bytes. A returned block has tag `_BACK`."""
_BACK = (1 << 32) - 1
_RANK = struct.Struct("<I")
"""First record on a connection: the number of the rank that has connected."""
_MIN_BYTES = 4096
_MEMORY_BYTES = 16 << 20
"""Size of a memory from which blocks are cut. The system allocates only the pages that are used."""
_MAX_FILES = 16
"""Largest number of files received at once. A record comes with at most one."""
_LARGE_BYTES = 1 << 16
_MAX_KEPT = 16
_LOOK_S = 60.0
_SPIN_S = 2e-4
"""How long an idle processor polls before it sleeps, as waking it takes longer than that."""


def is_available() -> bool:
    """Return whether processes of this system can pass memory to each other."""
    return hasattr(socket, "AF_UNIX") and hasattr(socket, "send_fds")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of shared memory.

    Attributes:
        number, start: number of the memory, and offset in it.
        bytes: contents of the block.
    """

    number: int
    start: int
    bytes: Tensor


class Peer:
    """Connection of a rank to another one.

    Attributes:
        rank, socket: number of the other rank, and socket to it.
        error: error that has ended the connection; empty while it is open.
        arrived: received blocks that have not been taken yet, by tag.
        unsent: records, with their files, that the socket had no room for yet.
    """

    def __init__(self, rank: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.rank, self.socket = rank, connection
        self.error = ""
        self.arrived: defaultdict[int, deque[Block]] = defaultdict(deque)
        self.unsent: deque[tuple[bytes, int | None]] = deque()
        self._free: defaultdict[int, list[Block]] = defaultdict(list)
        self._lent: dict[tuple[int, int], Block] = {}
        self._own, self._theirs = list[Tensor](), list[Tensor]()
        self._used = 0
        self._returned = bytearray()
        self._left = b""

    def block_for(self, num_bytes: int) -> tuple[Block, int | None]:
        """Return a free block, and the file of its memory if the other rank does not have it yet."""
        size, file = max(_MIN_BYTES, 1 << max(0, num_bytes - 1).bit_length()), None
        if not self._free[size]:
            self.read_all()
        if free := self._free[size]:
            block = free.pop()
        else:
            if not self._own or self._used + size > len(self._own[-1]):
                file = memory_file()
                os.ftruncate(file, max(_MEMORY_BYTES, size))
                self._own.append(_mapped(file))
                self._used = 0
            block = Block(len(self._own) - 1, self._used, self._own[-1][self._used : self._used + size])
            self._used += size
        self._lent[block.number, block.start] = block
        return block, file

    def return_block(self, block: Block) -> None:
        """Return a block to the other rank for reuse: large blocks immediately, small ones a few at a time."""
        self._returned += _WORD.pack(_BACK, block.number, block.start, 0)
        if len(block.bytes) >= _LARGE_BYTES or len(self._returned) >= _MAX_KEPT * _WORD.size:
            self.send_unsent(with_returns=True)

    def send_record(self, word: bytes, file: int | None = None) -> None:
        """Send a record and, with it, a file, which is then closed: now, or when the socket has room again."""
        self.unsent.append((word, file))
        self.send_unsent()

    def send_unsent(self, *, with_returns: bool = False) -> None:
        """Send the unsent records while the socket has room; then, if `with_returns`, the blocks to return."""
        while self.unsent and not self.error:
            word, file = self.unsent[0]
            if not (done := self._try_send(word, file)):
                return
            self.unsent.popleft()
            if done < len(word):
                self.unsent.appendleft((word[done:], None))
        if with_returns and self._returned and not self.error:
            done = self._try_send(self._returned)
            if done % _WORD.size:
                # The rest of a record must precede any other.
                whole = -(-done // _WORD.size) * _WORD.size
                self.unsent.append((bytes(self._returned[done:whole]), None))
                done = whole
            del self._returned[:done]

    def _try_send(self, words: bytes | bytearray, file: int | None = None) -> int:
        """Send records and a file, which is then closed; return the number of bytes that there was room for."""
        try:
            done = self.socket.send(words) if file is None else socket.send_fds(self.socket, [words], [file])
        except BlockingIOError:
            return 0
        except OSError as error:
            self.error = error.strerror or str(error)
            return 0
        if file is not None:
            os.close(file)
        return done

    def read_all(self) -> None:
        """Call `read` until nothing is left."""
        while not self.error and self.read():
            pass

    def read(self) -> bool:
        """Receive the records that have arrived; return False if there are none."""
        try:
            data, files, _, _ = socket.recv_fds(self.socket, 64 * _WORD.size, _MAX_FILES)
        except BlockingIOError:
            return False
        except OSError as error:
            self.error = error.strerror or str(error)
            return True
        for file in files:
            self._theirs.append(_mapped(file))
            os.close(file)
        if not data:
            self.error = "its connection is closed"
            return True
        self._left += data
        whole = len(self._left) // _WORD.size * _WORD.size
        for tag, number, start, num_bytes in _WORD.iter_unpack(self._left[:whole]):
            if tag == _BACK:
                block = self._lent.pop((number, start))
                self._free[len(block.bytes)].append(block)
            else:
                self.arrived[tag].append(Block(number, start, self._theirs[number][start : start + num_bytes]))
        self._left = self._left[whole:]
        return True


class SharedMemory:
    """A `Transport` over shared memory. Takes the arguments of `connect_ranks`, and raises what it raises."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        timeout_s = timeout.total_seconds()
        self._peers: dict[int, Peer] = {}
        self._spin_s = _SPIN_S if size <= usable_cores() else 0.0
        folder = Path(tempfile.mkdtemp(prefix="psctl-"))
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.settimeout(timeout_s)
                listener.bind(str(folder / "rank"))
                listener.listen(size)
                store.set(f"place/{rank}", str(folder / "rank"))
                for other in range(rank):
                    connection = socket.socket(socket.AF_UNIX)
                    connection.settimeout(timeout_s)
                    connection.connect(_place_of(store, other, timeout_s))
                    connection.sendall(_RANK.pack(rank))
                    self._peers[other] = Peer(other, connection)
                for _ in range(rank + 1, size):
                    connection, _ = listener.accept()
                    connection.settimeout(timeout_s)
                    [other] = _RANK.unpack(connection.recv(_RANK.size, socket.MSG_WAITALL))
                    self._peers[other] = Peer(other, connection)
        except (OSError, struct.error, dist.DistError) as error:
            self.disconnect()
            raise GroupError(f"ranks do not meet: {error}") from error
        finally:
            shutil.rmtree(folder)

    # Blocks are views, which remain valid views only if all writes to them happen in inference mode.
    @torch.inference_mode()
    def send(self, rank: int, tensor: Tensor, tag: int) -> "SendTransfer":
        """Copy a CPU tensor into shared memory and announce it to a rank. Raises GroupError."""
        peer = self._peers[rank]
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        block, file = peer.block_for(flat.numel())
        block.bytes[: flat.numel()].copy_(flat)
        peer.send_record(_WORD.pack(tag, block.number, block.start, flat.numel()), file)
        self._check(peer)
        return SendTransfer(self, rank, tensor)

    def receive(self, rank: int, shape: Sequence[int], dtype: torch.dtype, tag: int) -> "ReceiveTransfer":
        """Return a transfer that receives a tensor of a rank."""
        return ReceiveTransfer(self, rank, torch.empty(tuple(shape), dtype=dtype), tag)

    @torch.inference_mode()
    def take(self, rank: int, into: Tensor, tag: int, timeout_s: float) -> None:
        """Wait for a tensor of a rank, and copy it. Raises GroupError."""
        peer = self._peers[rank]
        arrived = peer.arrived[tag]
        self._wait_until(lambda: bool(arrived), peer, timeout_s)
        block = arrived.popleft()
        if not arrived:
            del peer.arrived[tag]
        flat = into.view(-1).view(torch.uint8)
        if flat.numel() != block.bytes.numel():
            raise GroupError(f"rank {rank} has sent {block.bytes.numel()} bytes, but {flat.numel()} are due")
        flat.copy_(block.bytes)
        peer.return_block(block)

    def flush(self, rank: int, timeout_s: float) -> None:
        """Wait until the socket has accepted all records for a rank. Raises GroupError."""
        peer = self._peers[rank]
        self._wait_until(lambda: not peer.unsent, peer, timeout_s)

    def check_peer(self, rank: int) -> None:
        """Raise GroupError if a rank is known to have gone. Does not wait."""
        peer = self._peers[rank]
        peer.read_all()
        self._check(peer)

    def disconnect(self) -> None:
        """Close all connections. Thread-safe."""
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.socket.shutdown(socket.SHUT_RDWR)

    def _wait_until(self, is_so: Callable[[], bool], peer: Peer, timeout_s: float) -> None:
        """Wait until a condition on a peer holds, and serve all peers meanwhile. Raises GroupError."""
        start_s = now_s = time.monotonic()
        while not is_so():
            self._check(peer)
            if now_s - start_s > timeout_s:
                raise GroupError(f"rank {peer.rank} does not answer within {timeout_s:g} s")
            if now_s - start_s > self._spin_s:
                self._poll(min(_LOOK_S, start_s + timeout_s - now_s))
            else:
                peer.send_unsent()
                peer.read()
            now_s = time.monotonic()

    def _poll(self, timeout_s: float) -> None:
        """Sleep until a peer has sent records or has room for unsent ones; then receive and send."""
        poll = select.poll()
        for peer in self._peers.values():
            peer.send_unsent(with_returns=True)
            if not peer.error:
                poll.register(peer.socket, select.POLLIN | (select.POLLOUT if peer.unsent else 0))
        ready = {file for file, _ in poll.poll(max(0.0, 1e3 * timeout_s))}
        for peer in self._peers.values():
            if peer.socket.fileno() in ready:
                peer.read()
                peer.send_unsent()

    @staticmethod
    def _check(peer: Peer) -> None:
        if peer.error:
            raise GroupError(f"rank {peer.rank} has gone: {peer.error}")


class SendTransfer:
    """The `Transfer` of a sent tensor, which has already been copied."""

    def __init__(self, transport: SharedMemory, rank: int, tensor: Tensor) -> None:
        self._transport, self._rank, self._tensor = transport, rank, tensor

    def wait(self, timeout: timedelta) -> Tensor:
        """Wait until the tensor has been announced, and return it. Raises GroupError."""
        self._transport.flush(self._rank, timeout.total_seconds())
        return self._tensor


class ReceiveTransfer:
    """The `Transfer` of a tensor that is being received."""

    def __init__(self, transport: SharedMemory, rank: int, into: Tensor, tag: int) -> None:
        self._transport, self._rank, self._into, self._tag = transport, rank, into, tag

    def wait(self, timeout: timedelta) -> Tensor:
        """Wait for the tensor and return it. Raises GroupError."""
        self._transport.take(self._rank, self._into, self._tag, timeout.total_seconds())
        return self._into


def _mapped(file: int) -> Tensor:
    """Map the memory of a file as a tensor of bytes."""
    return torch.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=torch.uint8)


def _place_of(store: dist.Store, rank: int, timeout_s: float) -> str:
    """Wait for the address at which a rank listens, and return it. Raises OSError."""
    until_s = time.monotonic() + timeout_s
    # The store's own `wait` writes to stderr when it times out.
    while not store.check([f"place/{rank}"]):
        if time.monotonic() > until_s:
            raise TimeoutError(f"rank {rank} does not come")
        time.sleep(0.002)
    return store.get(f"place/{rank}").decode()
