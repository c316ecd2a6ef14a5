"""How much a server takes on."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What is refused before any work is done for it.

    Attributes:
        max_queue: images that may wait or be drawn at the same time.
        max_queue_time_s: how long the work that is there may take, by the rate that was measured, for more to come in.
        max_pixels: of an image.
        max_steps: of an image.
        owners: of keys, each of which finds room whatever the others send; none: everybody is let in, as one.
        max_per_key: images that one owner may have open at the same time; None: all that others leave.
        max_body_bytes, max_prompt: size of a JSON body, and characters of a prompt.
        request_timeout_s: after which a request is given up.
    """

    max_queue: int = 64
    max_queue_time_s: float = 60.0
    max_pixels: int = 1024 * 1024
    max_steps: int = 200
    owners: Sequence[str] = ()
    max_per_key: int | None = None
    max_body_bytes: int = 256 * 1024
    max_prompt: int = 32_000
    request_timeout_s: float = 600.0
