"""Whether there is room for a request: checked and reserved in one step, before any work is done for it. No torch."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from .errors import overloaded
from .limits import KeyLimits, Limits

_FULL_AFTER_S = 60.0


@dataclass(slots=True)
class Place:
    """What a request has reserved; given back once, whatever becomes of it."""

    num_images: int
    key: str
    is_held: bool = True


@dataclass(slots=True)
class Allowance:
    """An amount that grows at a rate, up to a minute's worth, and is taken from. More than that is taken when it is
    full, and is owed then.

    Attributes:
        per_s: the rate, above 0.
        amount: that was there at some time.
        at_s: the time.
    """

    per_s: float
    amount: float
    at_s: float

    @classmethod
    def full(cls, per_s: float, now_s: float) -> "Allowance":
        """One of which nothing was taken."""
        return cls(per_s, per_s * _FULL_AFTER_S, now_s)

    def wait_s(self, wanted: float, now_s: float) -> float:
        """Seconds until so much may be taken; 0 for now."""
        most = self.per_s * _FULL_AFTER_S
        self.amount = min(most, self.amount + (now_s - self.at_s) * self.per_s)
        self.at_s = now_s
        return max(0.0, (min(wanted, most) - self.amount) / self.per_s)


@dataclass(slots=True)
class Admission:
    """Counts what is open. One thread (that of the event loop) calls it.

    With several owners of keys, half of the queue is divided among them: what one of them has not taken of its share
    is kept free for it, and what takes long to draw is no reason to refuse it.

    Attributes:
        limits: of the server.
        rate: pixel steps per second that the server takes, as far as is known; None: not yet.
        pending: pixel steps that the clients with a key wait for, from the moment they are let in; of None, all.
        num_images: that are open.
        clock: seconds that never go back.
    """

    limits: Limits
    rate: Callable[[], float | None]
    pending: Callable[[str | None], float]
    num_images: int = 0
    clock: Callable[[], float] = time.monotonic
    _of_key: Counter[str] = field(default_factory=Counter)
    _allowances: dict[str, tuple[Allowance | None, Allowance | None]] = field(default_factory=dict)

    def reserve(self, num_images: int, key: str, pixel_steps: float = 0.0) -> Place:
        """Take the places of a request, and of what its key may ask for in time.

        Raises:
            ApiError: 429, with `Retry-After` of when there may be room.
        """
        limits, wait_s = self.limits, self.drain_s
        num_left = limits.max_queue - self.num_images - num_images
        num_own = self._of_key[key] + num_images
        if num_left < 0:
            raise overloaded(
                f"{self.num_images} images are waiting or being drawn, and there is room for {limits.max_queue}",
                "queue_full",
                wait_s,
            )
        of_key = limits.keys.get(key, KeyLimits())
        most = limits.max_per_key if of_key.max_open is None else of_key.max_open
        if limits.max_per_key is None and num_own > self._share and num_left < (kept := self._num_kept_from(key)):
            left_to_it = max(self._share, num_own + num_left - kept)
            most = left_to_it if most is None else min(most, left_to_it)
        if most is not None and num_own > most:
            raise overloaded(
                f"{self._of_key[key]} images of this key are open, and it may have {most}", "too_many_in_flight", wait_s
            )
        if wait_s > limits.max_queue_time_s and not self._is_behind(key):
            raise overloaded(
                f"what is waiting takes {wait_s:.0f} s, and more comes in only up to {limits.max_queue_time_s:g} s",
                "queue_too_long",
                wait_s - limits.max_queue_time_s,
            )
        self._take(key, of_key, pixel_steps)
        self.num_images += num_images
        self._of_key[key] += num_images
        return Place(num_images, key)

    def _take(self, key: str, of_key: KeyLimits, pixel_steps: float) -> None:
        now_s = self.clock()
        requests, work = of_key.requests_per_minute, of_key.pixel_steps_per_second
        if key not in self._allowances:
            self._allowances[key] = (
                None if requests is None else Allowance.full(requests / 60, now_s),
                None if work is None else Allowance.full(work, now_s),
            )
        allowances = list(zip(self._allowances[key], (1.0, pixel_steps), strict=True))
        told = f"{requests or 0:g} requests per minute", f"{work or 0:g} pixels times steps per second"
        for (allowance, wanted), what in zip(allowances, told, strict=True):
            if allowance is not None and (wait_s := allowance.wait_s(wanted, now_s)):
                raise overloaded(f"this key may ask for {what}", "rate_limit_exceeded", wait_s)
        for allowance, wanted in allowances:
            if allowance is not None:
                allowance.amount -= wanted

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
        return self._seconds_of(None)

    @property
    def _share(self) -> int:
        num_owners = len(self.limits.keys)
        return max(1, self.limits.max_queue // (2 * num_owners)) if num_owners > 1 else 0

    def _num_kept_from(self, key: str) -> int:
        """Places that are kept for others; where there are more of these than places, half of all."""
        others = sum(max(0, self._share - self._of_key[each]) for each in self.limits.keys if each != key)
        return min(others, self.limits.max_queue // 2)

    def _is_behind(self, key: str) -> bool:
        """Whether a key waits for less than its share of the time that the queue may take."""
        num_owners = len(self.limits.keys)
        return num_owners > 1 and self._seconds_of(key) < self.limits.max_queue_time_s / (2 * num_owners)

    def _seconds_of(self, key: str | None) -> float:
        rate = self.rate()
        return self.pending(key) / rate if rate else 0.0
