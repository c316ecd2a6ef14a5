"""Newest images, which clients can fetch by URL: bounded in total size and age. No torch."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ...data.fair_store import FairStore

DEFAULT_BYTES, DEFAULT_AGE_S = 256_000_000, 3600.0


@dataclass(frozen=True, slots=True)
class StoredImage:
    """File of an image, its media type, and the time when it was stored."""

    content: bytes
    media_type: str
    stored_s: float


@dataclass(slots=True)
class ImageStore:
    """Keeps files by name. Expired files are evicted and, if there is no room, the oldest ones of the owner whose files
    are the largest together.

    Attributes:
        max_bytes: largest total size of the files; a file above it is not kept.
        max_age_s: age in seconds at which a file expires.
        clock: monotonic clock, in seconds.
    """

    max_bytes: int = DEFAULT_BYTES
    max_age_s: float = DEFAULT_AGE_S
    clock: Callable[[], float] = time.monotonic
    _files: FairStore[StoredImage] = field(init=False)

    def __post_init__(self) -> None:
        self._files = FairStore(self.max_bytes)

    def put(self, name: str, content: bytes, media_type: str, owner: str = "") -> None:
        """Store a file."""
        self._evict_expired()
        self._files.put(owner, name, StoredImage(content, media_type, self.clock()), len(content))

    def get(self, name: str) -> StoredImage | None:
        """Return a file; None if it is not stored, or no longer."""
        self._evict_expired()
        return self._files.get(name)

    def drop(self, name: str) -> None:
        """Remove a file."""
        self._files.pop(name)

    @property
    def num_bytes(self) -> int:
        """Total size of the stored files."""
        return int(self._files.size)

    def __len__(self) -> int:
        return len(self._files)

    def _evict_expired(self) -> None:
        oldest_s = self.clock() - self.max_age_s
        self._files.evict_while(lambda image: image.stored_s < oldest_s)
