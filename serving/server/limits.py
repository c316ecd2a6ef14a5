"""How much a server takes on."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What one owner of keys may have; None: as much as there is.

    Attributes:
        max_open: images that are open at the same time.
        requests_per_minute: that are let in, generations and edits.
        pixel_steps_per_second: pixels times steps of these, on average over a minute.
        max_batches: that have not ended.
        max_disk_mb: of files that were sent and what has become of batches, in megabytes (10^6 bytes).
    """

    max_open: int | None = None
    requests_per_minute: float | None = None
    pixel_steps_per_second: float | None = None
    max_batches: int | None = None
    max_disk_mb: float | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What is refused before any work is done for it.

    Attributes:
        max_queue: images that may wait or be drawn at the same time.
        max_queue_time_s: how long the work that is there may take, by the rate that was measured, for more to come in.
        max_pixels: of an image.
        max_steps: of an image.
        keys: what the owner of each key may have, who finds room whatever the others send; none: everybody is let in,
            as one.
        max_per_key: images that an owner may have open of whom that does not say it; None: all that others leave.
        max_body_bytes, max_prompt: size of a JSON body, and characters of a prompt.
        request_timeout_s: after which a request is given up.
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
