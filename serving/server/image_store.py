"""Images that can be fetched by their address for a while: the newest, up to so many bytes and so old. No torch."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ...data.fair_store import FairStore

DEFAULT_BYTES, DEFAULT_AGE_S = 256_000_000, 3600.0


@dataclass(frozen=True, slots=True)
class StoredImage:
    """A file, its media type, and when it was stored."""

    content: bytes
    media_type: str
    stored_s: float


@dataclass(slots=True)
class ImageStore:
    """Keeps files by name. Those that are too old go; where there is no room, the oldest of the owner who has most.

    Attributes:
        max_bytes: of all files; a larger file is not kept at all.
        max_age_s: of a file.
        clock: seconds that never go back.
    """

    max_bytes: int = DEFAULT_BYTES
    max_age_s: float = DEFAULT_AGE_S
    clock: Callable[[], float] = time.monotonic
    _kept: FairStore[StoredImage] = field(init=False)

    def __post_init__(self) -> None:
        self._kept = FairStore(self.max_bytes)

    def put(self, name: str, content: bytes, media_type: str, owner: str = "") -> None:
        """Keep a file."""
        self._let_go()
        self._kept.put(owner, name, StoredImage(content, media_type, self.clock()), len(content))

    def get(self, name: str) -> StoredImage | None:
        """A file, if it is still there."""
        self._let_go()
        return self._kept.get(name)

    def drop(self, name: str) -> None:
        """Let go of a file."""
        self._kept.pop(name)

    @property
    def num_bytes(self) -> int:
        """Total size of the stored files."""
        return int(self._kept.size)

    def __len__(self) -> int:
        return len(self._kept)

    def _let_go(self) -> None:
        oldest_s = self.clock() - self.max_age_s
        self._kept.evict_while(lambda image: image.stored_s < oldest_s)
