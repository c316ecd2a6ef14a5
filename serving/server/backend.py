"""What draws: an engine of this process, or replicas. The front end knows no more of it than this. No torch."""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ...data.requests import Request
from ..core.request_state import RequestRecord
from ..core.step_row import StepRow

if TYPE_CHECKING:
    from PIL.Image import Image


FIRST_ID = 1000
"""Of the front end's requests; smaller ids are for what a backend does by itself, such as its warm-up."""


class Health(enum.Enum):
    """What a backend is at: `starting` (loading, warming up), `ready`, `stalled` (at work, but nothing comes of it),
    `restarting` (its engine has crashed) and `stopped` (for good).
    """

    STARTING = "starting"
    READY = "ready"
    STALLED = "stalled"
    RESTARTING = "restarting"
    STOPPED = "stopped"


class Follower(Protocol):
    """Told what becomes of a request, on the event loop, in the order in which it happens."""

    def on_step(self, request_id: int, steps_done: int) -> None:
        """It has taken so many steps."""

    def on_partial(self, request_id: int, index: int, image: "Image") -> None:
        """A partial image, from 0."""

    def on_end(self, record: RequestRecord, image: "Image | None") -> None:
        """It has ended; with an image if it was completed. Nothing follows."""


@dataclass(frozen=True, slots=True)
class Load:
    """How much a backend has to do.

    Attributes:
        num_running, num_waiting: requests in the batch, and those that are not in it yet.
        pixel_steps: what is still to be denoised.
        rate: pixel steps per second of full batches, as far as it has had any; None before it has taken some steps.
    """

    num_running: int = 0
    num_waiting: int = 0
    pixel_steps: float = 0.0
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One of those that draw, and what it has to do.

    Attributes:
        name, process_id, health, load: as they are.
        num_drawn: requests that it has drawn since it began; None where that is not counted by worker.
    """

    name: str
    process_id: int
    health: Health
    load: Load
    num_drawn: int | None = None


class Backend(Protocol):
    """Draws requests. All of it is called on the event loop; nothing blocks it.

    Attributes:
        on_stopped: called with the reason when it has given up for good.
        on_row: called with every step that was taken.
    """

    on_stopped: Callable[[str], None]
    on_row: Callable[[StepRow], None]

    @property
    def health(self) -> Health: ...

    @property
    def trouble(self) -> str:
        """Why it does not draw, or not as it should; "" else."""
        ...

    @property
    def load(self) -> Load: ...

    @property
    def replicas(self) -> Sequence[ReplicaState]: ...

    @property
    def plan(self) -> str:
        """By what requests are routed now, in words; "" where nothing is decided."""
        ...

    async def start(self) -> None:
        """Get ready: load, warm up. Raises what prevents it."""

    async def submit(
        self, request: Request, follower: Follower, *, num_partials: int = 0, follows_steps: bool = False
    ) -> None:
        """Hand in a request, whose `arrival_s` is the loop's time at which it came in.

        Its follower is told of steps some times a second, or with `follows_steps` of every one at once.

        Raises:
            UsageError: the model cannot serve it.
            ApiError: there is nobody to draw it now.
        """

    def cancel(self, request_id: int, reason: str) -> None:
        """End a request as soon as that can be; its follower is told. One that is not open does nothing."""

    async def stop(self) -> None:
        """Cancel what is open, and let go of everything."""
