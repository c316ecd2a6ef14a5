"""Disk use of the files and batches of each owner. No torch."""

import math
import threading
from pathlib import Path

from ..errors import ApiError
from ..keys import Keys
from .folder import BatchFolder

_LEAST_BYTES = 4096
"""Least number of bytes that any file counts."""


class DiskUse:
    """Bytes on the disk by owner. Thread-safe.

    The outputs of a batch count, and three quarters of the one with images a second time: it holds the images in
    base64, and they are stored as files beside it.

    Args:
        disk: folder of files and batches.
        keys: limits of owners.
    """

    def __init__(self, disk: BatchFolder, keys: Keys) -> None:
        self._disk, self._keys, self._lock = disk, keys, threading.Lock()
        self._sizes: dict[str, dict[str, int]] = {}
        self._reserved: dict[str, tuple[str, int]] = {}

    def count(self, owner: str) -> int:
        """Measure everything that an owner has, as other processes may have changed it, and return the total in bytes.

        Waits for the disk.
        """
        found = {each: _size_of(self._disk.file(each)) for each in self._disk.files_of(owner)}
        found |= {each: self._size_of_batch(each) for each in self._disk.batches_of(owner)}
        with self._lock:
            self._sizes[owner] = found
            return self._total(owner)

    def measure(self, owner: str, batch_id: str) -> int:
        """Measure one batch again, and return the owner's total with the known sizes of everything else."""
        size = self._size_of_batch(batch_id)
        with self._lock:
            self._sizes.setdefault(owner, {})[batch_id] = size
            return self._total(owner)

    def most_bytes(self, owner: str) -> float:
        """Return the limit of an owner; infinity if it has none."""
        most_mb = self._keys.limits_of(owner).max_disk_mb
        return math.inf if most_mb is None else most_mb * 1e6

    def reserve(self, owner: str, file_id: str, size: int) -> None:
        """Reserve room for a file that is about to be written, until `release`. Waits for the disk. Raises ApiError if
        it does not fit into the owner's limit.
        """
        self.count(owner)
        most_bytes = self.most_bytes(owner)
        with self._lock:
            if self._total(owner) + size > most_bytes:
                raise too_much(self._total(owner), most_bytes)
            self._reserved[file_id] = owner, size

    def release(self, file_id: str) -> None:
        """Release the reservation of a file, which was written or has failed."""
        with self._lock:
            self._reserved.pop(file_id, None)

    def _total(self, owner: str) -> int:
        reserved = sum(size for each, size in self._reserved.values() if each == owner)
        return reserved + sum(self._sizes.get(owner, {}).values())

    def _size_of_batch(self, batch_id: str) -> int:
        sizes = {name: _size_of(path) for name, path in self._disk.outputs(batch_id).items()}
        return sum(sizes.values()) + sizes["output"] * 3 // 4


def too_much(used: int, most_bytes: float) -> ApiError:
    """Return the error for an owner that has reached its disk limit (507)."""
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
