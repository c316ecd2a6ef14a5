"""Which replica has how much to do, as the front end that feeds them knows it: no statistics travel. No torch, no Ray.

PatchedServe, section 8: a request goes where the fewest pixels times steps are pending.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

_NOTHING = 1e-6


@dataclass(slots=True)
class _Entry:
    """A request: what it has left to do, and the replica that it is meant for, if one was chosen."""

    pixel_steps: float
    per_step: float
    replica: str | None = None


@dataclass(slots=True)
class LoadBook:
    """Counts pixels times steps by replica; any thread may ask and tell.

    A request is begun with what it takes, before anybody chooses for it, reserved when a replica is chosen, confirmed
    or moved when it is known where it really went, shrinks with every step, and is released once, however often that is
    said: an attempt that was rejected is released and begun anew. Ray chooses in a thread of its own; what it chooses
    for one that was released meanwhile is not kept.
    """

    _entries: dict[int, _Entry] = field(default_factory=dict)
    _pending: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, request_id: int, pixels: int, num_steps: int) -> None:
        """A request is about to be sent somewhere."""
        with self._lock:
            self._drop(request_id)
            self._entries[request_id] = _Entry(float(pixels * num_steps), float(pixels))

    def reserve(self, request_id: int, replicas: Iterable[str]) -> list[str]:
        """Choose for a request: the replicas in the order of what they have to do, the first one reserved.

        The same request again moves to what is least loaded without it.
        """
        with self._lock:
            entry = self._entries.get(request_id)
            if entry is not None:
                self._move(entry, None)
            ranked = sorted(replicas, key=lambda replica: (self._pending.get(replica, 0.0), replica))
            if entry is not None and ranked:
                self._move(entry, ranked[0])
            return ranked

    def confirm(self, request_id: int, replica: str) -> None:
        """A request went to this replica, whichever was chosen."""
        with self._lock:
            entry = self._entries.get(request_id)
            if entry is not None and entry.replica != replica:
                self._move(entry, replica)

    def stepped(self, request_id: int, num_left: int) -> None:
        """A request has so many steps left."""
        with self._lock:
            entry = self._entries.get(request_id)
            if entry is None:
                return
            left = min(entry.pixel_steps, entry.per_step * num_left)
            if entry.replica is not None:
                self._add(entry.replica, left - entry.pixel_steps)
            entry.pixel_steps = left

    def release(self, request_id: int) -> None:
        """A request has ended, or was rejected. Again does nothing."""
        with self._lock:
            self._drop(request_id)

    def pending(self, replica: str | None = None) -> float:
        """What a replica has to do; without one, all that is open."""
        with self._lock:
            if replica is not None:
                return self._pending.get(replica, 0.0)
            return sum(entry.pixel_steps for entry in self._entries.values())

    def _move(self, entry: _Entry, replica: str | None) -> None:
        if entry.replica is not None:
            self._add(entry.replica, -entry.pixel_steps)
        entry.replica = replica
        if replica is not None:
            self._add(replica, entry.pixel_steps)

    def _drop(self, request_id: int) -> None:
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._move(entry, None)

    def _add(self, replica: str, pixel_steps: float) -> None:
        left = self._pending.get(replica, 0.0) + pixel_steps
        # Rounding errors must leave no replica with less than nothing to do, and none that is gone with anything.
        if left > _NOTHING:
            self._pending[replica] = left
        else:
            self._pending.pop(replica, None)


BOOK = LoadBook()
"""Of this process: its front end and the router that Ray runs beside it."""
