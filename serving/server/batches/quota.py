"""What files and batches of each owner take on the disk. No torch."""

import threading
from pathlib import Path

from ..errors import ApiError
from .folder import BatchFolder

_LEAST_BYTES = 4096
"""Of a file, however small it is."""


class DiskUse:
    """Bytes on the disk by owner. Any thread may use it.

    Of a batch its outputs count, and three quarters of the one with images again: they lie beside it as they are, and
    in it in base64.

    Args:
        disk: of files and batches.
    """

    def __init__(self, disk: BatchFolder) -> None:
        self._disk, self._lock = disk, threading.Lock()
        self._known: dict[str, dict[str, int]] = {}
        self._coming: dict[str, tuple[str, int]] = {}

    def count(self, owner: str) -> int:
        """Look at all that an owner has, which other processes may have changed; waits for the disk."""
        found = {each: _size_of(self._disk.file(each)) for each in self._disk.files_of(owner)}
        found |= {each: self._size_of_batch(each) for each in self._disk.batches_of(owner)}
        with self._lock:
            self._known[owner] = found
            return self._total(owner)

    def note(self, owner: str, batch_id: str) -> int:
        """Look at one batch again; of all else what was known."""
        size = self._size_of_batch(batch_id)
        with self._lock:
            self._known.setdefault(owner, {})[batch_id] = size
            return self._total(owner)

    def expect(self, owner: str, file_id: str, size: int, most_bytes: float) -> None:
        """A file is going to be written, until `settle`; waits for the disk. Raises ApiError: it is too much."""
        self.count(owner)
        with self._lock:
            if self._total(owner) + size > most_bytes:
                raise too_much(self._total(owner), most_bytes)
            self._coming[file_id] = owner, size

    def settle(self, file_id: str) -> None:
        """It is there now, or never will be."""
        with self._lock:
            self._coming.pop(file_id, None)

    def _total(self, owner: str) -> int:
        coming = sum(size for whose, size in self._coming.values() if whose == owner)
        return coming + sum(self._known.get(owner, {}).values())

    def _size_of_batch(self, batch_id: str) -> int:
        sizes = {name: _size_of(path) for name, path in self._disk.outputs(batch_id).items()}
        return sum(sizes.values()) + sizes["output"] * 3 // 4


def too_much(used: int, most_bytes: float) -> ApiError:
    """The owner of a key has more on the disk than it may have."""
    return ApiError(
        507,
        f"files and batches of this key take {used / 1e6:,.1f} MB, and they may take {most_bytes / 1e6:,.1f} MB: "
        "delete some, outputs of batches as well",
        code="quota_exceeded",
        headers={"x-should-retry": "false"},
    )


def _size_of(path: Path) -> int:
    try:
        return max(_LEAST_BYTES, path.stat().st_size)
    except FileNotFoundError:
        return 0
