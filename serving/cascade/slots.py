"""A cascade's workers, as its dispatcher knows them. No torch."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ...data.requests import Request
from .legs import Leg


class Worker(Protocol):
    """A GPU that serves one of both models, or both at once.

    Attributes:
        num_waiting: how many requests wait there for its next batch.
    """

    @property
    def num_waiting(self) -> int: ...

    def take(self, request: Request, now_s: float) -> None:
        """Serve a request with the steps that it names; one that is an edit starts from its light image.
        `Dispatcher.ended` is told how it went.
        """

    def cancel(self, request_id: int, reason: str) -> None:
        """Draw a request no further. What is told of it afterwards is not listened to."""

    def limit(self, batch_size: int) -> None:
        """From now on, batches are this large at most."""

    def change(self, leg: Leg, now_s: float) -> None:
        """Hand back who waits (`Dispatcher.handed_back`), end the batch, and change to the other model, of which
        `Dispatcher.left` and `Dispatcher.changed` are told.
        """


class Given(NamedTuple):
    """A request that was sent to a worker: for which model, when, and its pixels times steps."""

    leg: Leg
    since_s: float
    pixel_steps: int


@dataclass(slots=True)
class Slot:
    """What is known of a worker.

    Attributes:
        index, worker: its number, and itself; None while it is started anew.
        leg: the model that it serves; None for both at once.
        next_leg: the model that it is bound to change to, until it serves it.
        is_away: whether it serves none now.
        pending: pixels times steps of what it has been given and has not ended; see `Pending`.
        batch_size: of the last `limit`.
        given: what was sent there and has not ended, by its id.
    """

    index: int
    worker: Worker | None
    leg: Leg | None
    next_leg: Leg | None = None
    is_away: bool = False
    pending: int = 0
    batch_size: int = 0
    given: dict[int, Given] = field(default_factory=dict)

    @property
    def takes(self) -> bool:
        """Whether requests may be sent there."""
        return self.worker is not None and self.next_leg is None and not self.is_away

    @property
    def bound(self) -> Leg | None:
        """The model that it has or is going to have."""
        return self.next_leg or self.leg

    def give(self, request_id: int, given: Given) -> None:
        """A request was sent there."""
        self.given[request_id] = given
        self.pending += given.pixel_steps

    def taken_back(self, request_id: int) -> Given | None:
        """A request is no longer there; what was known of it, None if it was not there."""
        given = self.given.pop(request_id, None)
        if given is not None:
            self.pending -= given.pixel_steps
        return given
