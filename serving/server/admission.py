"""Whether there is room for a request: checked and reserved in one step, before any work is done for it. No torch."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from .errors import overloaded
from .limits import Limits


@dataclass(slots=True)
class Place:
    """What a request has reserved; given back once, whatever becomes of it."""

    num_images: int
    key: str
    is_held: bool = True


@dataclass(slots=True)
class Admission:
    """Counts what is open. One thread (that of the event loop) calls it.

    Attributes:
        limits: of the server.
        rate: pixel steps per second that the server takes, as far as is known; None: not yet.
        pending: pixel steps that clients wait for, from the moment they are let in.
        num_images: that are open.
    """

    limits: Limits
    rate: Callable[[], float | None]
    pending: Callable[[], float]
    num_images: int = 0
    _of_key: Counter[str] = field(default_factory=Counter)

    def reserve(self, num_images: int, key: str) -> Place:
        """Take the places of a request.

        Raises:
            ApiError: 429, with `Retry-After` of when there may be room.
        """
        limits, wait_s = self.limits, self.drain_s
        if self.num_images + num_images > limits.max_queue:
            raise overloaded(
                f"{self.num_images} images are waiting or being drawn, and there is room for {limits.max_queue}",
                "queue_full",
                wait_s,
            )
        if self._of_key[key] + num_images > limits.max_per_key:
            raise overloaded(
                f"{self._of_key[key]} images of this key are open, and it may have {limits.max_per_key}",
                "too_many_in_flight",
                wait_s,
            )
        if wait_s > limits.max_queue_time_s:
            raise overloaded(
                f"what is waiting takes {wait_s:.0f} s, and more comes in only up to {limits.max_queue_time_s:g} s",
                "queue_too_long",
                wait_s - limits.max_queue_time_s,
            )
        self.num_images += num_images
        self._of_key[key] += num_images
        return Place(num_images, key)

    def release(self, place: Place) -> None:
        """Give the places back; again does nothing."""
        if place.is_held:
            place.is_held = False
            self.num_images -= place.num_images
            self._of_key[place.key] -= place.num_images
            if not self._of_key[place.key]:
                del self._of_key[place.key]

    @property
    def drain_s(self) -> float:
        """Seconds until all that clients wait for is drawn."""
        rate = self.rate()
        return self.pending() / rate if rate else 0.0
