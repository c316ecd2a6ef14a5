"""Images that can be fetched by their address for a while: the newest, up to so many bytes and so old. No torch."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

DEFAULT_BYTES, DEFAULT_AGE_S = 256_000_000, 3600.0


@dataclass(frozen=True, slots=True)
class StoredImage:
    """A file, its media type, and when it was stored."""

    content: bytes
    media_type: str
    stored_s: float


@dataclass(slots=True)
class ImageStore:
    """Keeps files by name; the oldest go first, whether there is room or not once they are too old.

    Attributes:
        max_bytes: of all files; a larger file is not kept at all.
        max_age_s: of a file.
        clock: seconds that never go back.
        num_bytes: of what is kept.
    """

    max_bytes: int = DEFAULT_BYTES
    max_age_s: float = DEFAULT_AGE_S
    clock: Callable[[], float] = time.monotonic
    num_bytes: int = 0
    _kept: OrderedDict[str, StoredImage] = field(default_factory=OrderedDict)

    def put(self, name: str, content: bytes, media_type: str) -> None:
        """Keep a file."""
        self.drop(name)
        self._kept[name] = StoredImage(content, media_type, self.clock())
        self.num_bytes += len(content)
        self._let_go()

    def get(self, name: str) -> StoredImage | None:
        """A file, if it is still there."""
        self._let_go()
        return self._kept.get(name)

    def drop(self, name: str) -> None:
        """Let go of a file."""
        found = self._kept.pop(name, None)
        self.num_bytes -= 0 if found is None else len(found.content)

    def __len__(self) -> int:
        return len(self._kept)

    def _let_go(self) -> None:
        oldest_s = self.clock() - self.max_age_s
        while self._kept:
            name, first = next(iter(self._kept.items()))
            if self.num_bytes <= self.max_bytes and first.stored_s >= oldest_s:
                return
            self.drop(name)
