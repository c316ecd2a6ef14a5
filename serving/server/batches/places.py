"""Places in which lines of batches are drawn, and their fair assignment. No torch."""

import asyncio
import heapq
import itertools

from ...scheduling.fair_shares import FairShares


class FairPlaces:
    """Assigns places by the work that each owner has received, so that an owner with many lines does not block others.

    Among the waiting lines, the one that starts first by `FairShares` receives the next place.

    Args:
        num_places: number of lines that are drawn together.
    """

    def __init__(self, num_places: int) -> None:
        self._num_free = num_places
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._shares, self._order, self._is_assigning = FairShares(), itertools.count(), False

    async def acquire(self, owner: str, work: float, weight: float = 1.0) -> None:
        """Wait for a place for a line of the given work, whose owner has this weight."""
        start = self._shares.add(owner, work, weight)
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (start, next(self._order), turn))
        self._assign_soon()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the place was assigned at the same time
                self.release()
            raise

    def release(self) -> None:
        """Release a place."""
        self._num_free += 1
        self._assign_soon()

    def _assign_soon(self) -> None:
        # One place per iteration of the event loop, so that the owner of the last one can request its next place.
        if not self._is_assigning:
            self._is_assigning = True
            asyncio.get_running_loop().call_soon(self._assign)

    def _assign(self) -> None:
        self._is_assigning = False
        while self._num_free and self._waiting:
            start, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                self._shares.serve(start)
                self._num_free -= 1
                turn.set_result(None)
                self._assign_soon()
                return
