"""Places in which lines of batches are drawn, and whose line gets the next one. No torch."""

import asyncio
import heapq
import itertools


class FairPlaces:
    """Gives places to owners by the work that each has had, so that one with many lines does not keep others waiting.

    This is start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996): a line starts, in work, where its owner's last
    one ends, or where the newest line that has a place starts, whichever is later; who starts first has the next place.

    Args:
        num_places: lines that are drawn together.
    """

    def __init__(self, num_places: int) -> None:
        self._num_free = num_places
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._ends: dict[str, float] = {}
        self._start, self._order, self._is_giving = 0.0, itertools.count(), False

    async def acquire(self, owner: str, work: float) -> None:
        """Wait for a place, for a line of so much work."""
        start = max(self._start, self._ends.get(owner, 0.0))
        self._ends[owner] = start + work
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (start, next(self._order), turn))
        self._give_soon()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was given at the same time
                self.release()
            raise

    def release(self) -> None:
        """Give a place back."""
        self._num_free += 1
        self._give_soon()

    def _give_soon(self) -> None:
        # One place at a turn of the loop: meanwhile the owner of the last one asks for its next line.
        if not self._is_giving:
            self._is_giving = True
            asyncio.get_running_loop().call_soon(self._give)

    def _give(self) -> None:
        self._is_giving = False
        while self._num_free and self._waiting:
            start, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                self._start, self._num_free = start, self._num_free - 1
                turn.set_result(None)
                self._give_soon()
                return
