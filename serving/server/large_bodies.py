"""Limits of large bodies of one path: bytes in memory, and number of bodies parsed at a time. No torch."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from weakref import WeakValueDictionary

from .errors import overloaded

_MOST_WHOLE, _MOST_OF_KEY = 4, 3
"""Full-length bodies that fit in memory together, and those of one key, so that others always have a place."""
_MOST_ROOMS = 3
ROOM_WITHIN_S = 10.0


class LargeBodies:
    """Large bodies that may be posted to one path.

    A room is taken only once a body has been received, so that clients that send slowly, or nothing, block no others.

    Args:
        most_bytes: largest size of one body.
        within_s: seconds in which a body must be received.
    """

    def __init__(self, most_bytes: int, within_s: float) -> None:
        self.most_bytes, self.within_s = most_bytes, within_s
        self._num_bytes: Counter[str] = Counter()
        self._rooms: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @contextlib.contextmanager
    def reserve(self, key: str) -> Iterator[Callable[[int], None]]:
        """Count the bytes of a body in memory until the context ends.

        Yields a function that adds the size of a part. It raises ApiError if all bodies together, or those of this key,
        become too large.
        """
        num_bytes = 0

        def reserve_bytes(more: int) -> None:
            nonlocal num_bytes
            of_key = self._num_bytes[key] + more
            if (
                of_key > _MOST_OF_KEY * self.most_bytes
                or self._num_bytes.total() + more > _MOST_WHOLE * self.most_bytes
            ):
                raise overloaded("too much is being sent at the same time", "too_many_uploads", self.within_s)
            num_bytes += more
            self._num_bytes[key] += more

        try:
            yield reserve_bytes
        finally:
            self._num_bytes[key] -= num_bytes
            if not self._num_bytes[key]:
                del self._num_bytes[key]

    @contextlib.asynccontextmanager
    async def room(self, key: str) -> AsyncIterator[None]:
        """Wait until earlier bodies of this key have been parsed. Raises ApiError if that takes too long."""
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
