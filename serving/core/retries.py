"""Bounds on retries: of requests whose worker dies, and of engines and workers that are restarted."""

from collections import deque

MAX_DEATHS = 2
"""Workers that may die, or whose engine may crash, while they draw a request. It then fails, as it may be the cause."""
MAX_RESTARTS, RESTARTS_WITHIN_S = 3, 600.0


class Restarts:
    """Restarts of an engine or a worker: at most `MAX_RESTARTS` within `RESTARTS_WITHIN_S`.

    Attributes:
        ended_s: times at which it has ended, the last ones.
    """

    def __init__(self) -> None:
        self.ended_s = deque[float](maxlen=MAX_RESTARTS + 1)

    def allow(self, now_s: float) -> bool:
        """Record that it has ended; return whether it may be restarted."""
        self.ended_s.append(now_s)
        return len(self.ended_s) <= MAX_RESTARTS or now_s - self.ended_s[0] >= RESTARTS_WITHIN_S
