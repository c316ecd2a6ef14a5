"""Interface of backends, through which the front end uses an engine of this process, or replicas. No torch."""

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
"""First id of the front end's requests. Backends use smaller ids for requests of their own, such as the warm-up."""


class Health(enum.Enum):
    """State of a backend: `starting` (loading, warming up), `ready`, `stalled` (working without progress), `restarting`
    (its engine has crashed) or `stopped` (for good).
    """

    STARTING = "starting"
    READY = "ready"
    STALLED = "stalled"
    RESTARTING = "restarting"
    STOPPED = "stopped"


class Follower(Protocol):
    """Receives the progress of a request, on the event loop and in order."""

    def on_step(self, request_id: int, steps_done: int) -> None:
        """Called with the number of steps that the request has taken."""

    def on_partial(self, request_id: int, index: int, image: "Image") -> None:
        """Called with a partial image and its index, from 0."""

    def on_end(self, record: RequestRecord, image: "Image | None") -> None:
        """Called last, when the request has ended; with an image if it was completed."""


@dataclass(frozen=True, slots=True)
class Load:
    """Current load of a backend.

    Attributes:
        num_running, num_waiting: number of requests in the batch, and of those that are not in it yet.
        pixel_steps: pixels times remaining steps, summed over all requests.
        rate: pixel steps per second of the largest batches so far; None until enough steps have run.
    """

    num_running: int = 0
    num_waiting: int = 0
    pixel_steps: float = 0.0
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """State of one replica.

    Attributes:
        name: name of the replica.
        process_id: id of its process.
        health: its state.
        load: its load.
        num_drawn: number of requests that it has drawn since it started; None if they are not counted by replica.
    """

    name: str
    process_id: int
    health: Health
    load: Load
    num_drawn: int | None = None


class Backend(Protocol):
    """Draws requests. Everything is called on the event loop, and nothing blocks it.

    Attributes:
        on_stopped: called with the reason when the backend has stopped for good.
        on_row: called with every step.
    """

    on_stopped: Callable[[str], None]
    on_row: Callable[[StepRow], None]

    @property
    def health(self) -> Health: ...

    @property
    def trouble(self) -> str:
        """Reason why the backend does not draw, or draws with failures; "" if there is none."""
        ...

    @property
    def load(self) -> Load: ...

    @property
    def replicas(self) -> Sequence[ReplicaState]: ...

    @property
    def plan(self) -> str:
        """Description of the current routing of requests; "" if there is nothing to decide."""
        ...

    async def start(self) -> None:
        """Load and warm up. Raises the error that prevents it."""

    async def submit(
        self, request: Request, follower: Follower, *, num_partials: int = 0, follows_steps: bool = False
    ) -> None:
        """Submit a request, whose `arrival_s` is on the event loop's clock.

        The follower receives steps several times a second, or with `follows_steps` each one at once.

        Raises:
            UsageError: the model cannot serve it.
            ApiError: the backend takes no requests now.
        """

    def cancel(self, request_id: int, reason: str) -> None:
        """End a request as soon as possible; its follower is notified. Does nothing unless the request is open."""

    async def stop(self) -> None:
        """Cancel open requests and release all resources."""
