"""Fair shares of several owners by weight: start-time fair queueing. No torch."""

_MOST_IDLE = 100
"""Number of owners that are kept before those without any claim are forgotten."""


class FairShares:
    """Tells whose turn it is, by the work that each owner has received.

    This is start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996): an item of work starts where its owner's last
    one ends, or where the newest item that was served starts, whichever is later; the item with the smallest start is
    next. An owner that was idle thus has no credit. Work counts divided by the owner's weight.
    """

    def __init__(self) -> None:
        self._start = 0.0
        self._ends: dict[str, float] = {}

    def start_of(self, owner: str) -> float:
        """Return where the next item of an owner starts, in units of work."""
        return max(self._start, self._ends.get(owner, 0.0))

    def add(self, owner: str, work: float, weight: float = 1.0) -> float:
        """Add an item of an owner, and return where it starts."""
        start = self.start_of(owner)
        self._ends[owner] = start + work / weight
        return start

    def serve(self, start: float) -> None:
        """Record that an item is served which starts here."""
        self._start = max(self._start, start)
        if len(self._ends) > _MOST_IDLE:
            self._ends = {owner: end for owner, end in self._ends.items() if end > self._start}
