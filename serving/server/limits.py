"""Limits of a server, and of each owner of keys."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one owner of keys. None means no limit of its own.

    Attributes:
        max_open: largest number of images that are open at the same time.
        requests_per_minute: admitted generations and edits per minute.
        pixel_steps_per_second: their pixels times steps per second, on average over a minute.
        max_batches: largest number of batches that have not ended.
        max_disk_mb: size of uploaded files and of outputs of batches, in megabytes (10^6 bytes).
        weight: part in what owners share (the queue, the batch, and the places for lines of batches), relative to other
            owners.
    """

    max_open: int | None = None
    requests_per_minute: float | None = None
    pixel_steps_per_second: float | None = None
    max_batches: int | None = None
    max_disk_mb: float | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that are checked before any work is done for a request.

    Attributes:
        max_queue: largest number of images that wait or are drawn at the same time.
        max_queue_time_s: seconds that the queued work may take, at the measured rate, for more requests to be admitted.
        max_pixels: largest number of pixels of an image.
        max_steps: largest number of steps of an image.
        keys: limits by owner of keys. Each owner finds room whatever the others send. If empty, no key is needed, and
            all clients count as one owner.
        max_per_key: number of images that an owner without `max_open` may have open; None: all that the others leave.
        max_body_bytes, max_prompt: size of a JSON body, and characters of a prompt.
        request_timeout_s: seconds after which a request is aborted.
    """

    max_queue: int = 64
    max_queue_time_s: float = 60.0
    max_pixels: int = 1024 * 1024
    max_steps: int = 200
    keys: Mapping[str, KeyLimits] = field(default_factory=dict, hash=False)
    max_per_key: int | None = None
    max_body_bytes: int = 256 * 1024
    max_prompt: int = 32_000
    request_timeout_s: float = 600.0

    def of(self, owner: str) -> KeyLimits:
        """Return the limits of an owner; an unknown owner, and "" if there are no keys, has none."""
        return self.keys.get(owner, KeyLimits())
