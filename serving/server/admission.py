"""Admission control: checks and reserves room for a request in one step, before any work is done for it. No torch."""

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from .errors import overloaded
from .limits import KeyLimits, Limits

_FULL_AFTER_S = 60.0


@dataclass(slots=True)
class Place:
    """Places that a request has reserved. They are released once, however the request ends."""

    num_images: int
    key: str
    is_held: bool = True


@dataclass(slots=True)
class TokenBucket:
    """Token bucket that holds up to one minute of its rate. A larger amount is granted when the bucket is full, and
    leaves it negative.

    Attributes:
        per_s: rate at which it fills, above 0.
        amount: amount in it at `at_s`.
        at_s: time of the last update, in seconds.
    """

    per_s: float
    amount: float
    at_s: float

    @classmethod
    def full(cls, per_s: float, now_s: float) -> "TokenBucket":
        """Return a full bucket."""
        return cls(per_s, per_s * _FULL_AFTER_S, now_s)

    def wait_s(self, needed: float, now_s: float) -> float:
        """Return the seconds until `needed` may be taken; 0 if it may be taken now."""
        most = self.per_s * _FULL_AFTER_S
        self.amount = min(most, self.amount + (now_s - self.at_s) * self.per_s)
        self.at_s = now_s
        return max(0.0, (min(needed, most) - self.amount) / self.per_s)


@dataclass(slots=True)
class Admission:
    """Counts open images and refuses requests beyond the limits. Only the event loop's thread calls it.

    With several owners of keys, half of the queue is divided among them by weight. The unused part of an owner's share
    is kept free for it, and an owner that waits for less than its share of `max_queue_time_s` is not refused for the
    time that the whole queue takes.

    Attributes:
        limits: limits of the server.
        rate: returns the pixel steps per second that the server takes; None if they are not known yet.
        pending: returns the pixel steps that the clients of a key wait for, counted from admission; for None, those of
            all clients.
        num_images: number of open images.
        clock: monotonic clock, in seconds.
    """

    limits: Limits
    rate: Callable[[], float | None]
    pending: Callable[[str | None], float]
    num_images: int = 0
    clock: Callable[[], float] = time.monotonic
    _of_key: Counter[str] = field(default_factory=Counter)
    # By key and its rates, which change when keys are read again.
    _buckets: dict[tuple[str, float | None, float | None], tuple[TokenBucket | None, TokenBucket | None]] = field(
        default_factory=dict
    )

    def reserve(self, num_images: int, key: str, pixel_steps: float = 0.0) -> Place:
        """Reserve places for a request, and charge it to the rate limits of its key.

        Raises:
            ApiError: a limit is reached (429); `Retry-After` estimates when there may be room.
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
        of_key = limits.of(key)
        most = limits.max_per_key if of_key.max_open is None else of_key.max_open
        share = self._share_of(key)
        if limits.max_per_key is None and num_own > share and num_left < (kept := self._num_kept_for_others(key)):
            most_left = max(share, num_own + num_left - kept)
            most = most_left if most is None else min(most, most_left)
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
        self._charge(key, of_key, pixel_steps)
        self.num_images += num_images
        self._of_key[key] += num_images
        return Place(num_images, key)

    def _charge(self, key: str, of_key: KeyLimits, pixel_steps: float) -> None:
        now_s = self.clock()
        requests, work = of_key.requests_per_minute, of_key.pixel_steps_per_second
        if (key, requests, work) not in self._buckets:
            self._buckets[key, requests, work] = (
                None if requests is None else TokenBucket.full(requests / 60, now_s),
                None if work is None else TokenBucket.full(work, now_s),
            )
        buckets = list(zip(self._buckets[key, requests, work], (1.0, pixel_steps), strict=True))
        units = f"{requests or 0:g} requests per minute", f"{work or 0:g} pixels times steps per second"
        for (bucket, needed), what in zip(buckets, units, strict=True):
            if bucket is not None and (wait_s := bucket.wait_s(needed, now_s)):
                raise overloaded(f"this key may ask for {what}", "rate_limit_exceeded", wait_s)
        for bucket, needed in buckets:
            if bucket is not None:
                bucket.amount -= needed

    def release(self, place: Place) -> None:
        """Release the places. A second call has no effect."""
        if place.is_held:
            place.is_held = False
            self.num_images -= place.num_images
            self._of_key[place.key] -= place.num_images
            if not self._of_key[place.key]:
                del self._of_key[place.key]

    @property
    def drain_s(self) -> float:
        """Seconds until all requests that clients wait for are drawn, at the current rate; 0 if it is not known yet."""
        return self._seconds_of(None)

    def _part_of(self, key: str, half_of: float) -> float:
        """Return a key's part, by weight, in half of an amount; 0 if there is no other owner."""
        weight = self.limits.of(key).weight if len(self.limits.keys) > 1 else 0.0
        return weight and half_of * weight / (2 * math.fsum(each.weight for each in self.limits.keys.values()))

    def _share_of(self, key: str) -> int:
        part = self._part_of(key, self.limits.max_queue)
        return max(1, int(part)) if part else 0

    def _num_kept_for_others(self, key: str) -> int:
        """Return the number of places that are kept free for other owners, at most half of all places."""
        others = sum(max(0, self._share_of(each) - self._of_key[each]) for each in self.limits.keys if each != key)
        return min(others, self.limits.max_queue // 2)

    def _is_behind(self, key: str) -> bool:
        """Return whether a key waits for less than its share of the time that the queue may take."""
        return self._seconds_of(key) < self._part_of(key, self.limits.max_queue_time_s)

    def _seconds_of(self, key: str | None) -> float:
        rate = self.rate()
        return self.pending(key) / rate if rate else 0.0
