"""Large bodies of one path: how much of them is in memory, and how many are taken apart at a time. No torch."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from weakref import WeakValueDictionary

from .errors import overloaded

_MOST_WHOLE, _MOST_OF_KEY = 4, 3
"""So many bodies of full length are in memory together, and so many of one key: others always have a place."""
_MOST_ROOMS = 3
ROOM_WITHIN_S = 10.0


class LargeBodies:
    """What may be posted to a path that takes more than JSON.

    A client that only sends has no room, so that those who send slowly, or nothing, are in nobody's way.

    Args:
        most_bytes, within_s: of one body, and how long it may take to come.
    """

    def __init__(self, most_bytes: int, within_s: float) -> None:
        self.most_bytes, self.within_s = most_bytes, within_s
        self._held: Counter[str] = Counter()
        self._rooms: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @contextlib.contextmanager
    def holding(self, key: str) -> Iterator[Callable[[int], None]]:
        """Count a body of a key: gives what is told of each part's bytes, and raises ApiError where they are too many
        together with what others have sent.
        """
        num_bytes = 0

        def hold(more: int) -> None:
            nonlocal num_bytes
            of_key = self._held[key] + more
            if of_key > _MOST_OF_KEY * self.most_bytes or self._held.total() + more > _MOST_WHOLE * self.most_bytes:
                raise overloaded("too much is being sent at the same time", "too_many_uploads", self.within_s)
            num_bytes += more
            self._held[key] += more

        try:
            yield hold
        finally:
            self._held[key] -= num_bytes
            if not self._held[key]:
                del self._held[key]

    @contextlib.asynccontextmanager
    async def room(self, key: str) -> AsyncIterator[None]:
        """Wait until bodies of this key that came before are taken apart. Raises ApiError: that takes too long."""
        semaphore = self._rooms.setdefault(key, asyncio.Semaphore(_MOST_ROOMS))
        try:
            async with asyncio.timeout(ROOM_WITHIN_S):
                await semaphore.acquire()
        except TimeoutError:
            message = f"{_MOST_ROOMS} large bodies of this key are being read"
            raise overloaded(message, "too_many_uploads", ROOM_WITHIN_S) from None
        try:
            yield
        finally:
            semaphore.release()
