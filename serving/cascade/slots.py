"""Workers of a cascade, and the dispatcher's state of each. No torch."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ...data.requests import Request
from .legs import Leg


class Worker(Protocol):
    """A GPU that serves one of the two models, or both at once.

    Attributes:
        num_waiting: number of requests that wait on the worker for its next batch.
    """

    @property
    def num_waiting(self) -> int: ...

    def take(self, request: Request, now_s: float) -> None:
        """Serve a request with its own number of steps, and report its end to `Dispatcher.request_ended`.

        A request that is an edit starts from its light image.
        """

    def cancel(self, request_id: int, reason: str) -> None:
        """Stop work on a request. The dispatcher ignores later reports of it."""

    def limit_batch_size(self, batch_size: int) -> None:
        """Limit the size of batches from now on."""

    def switch_model(self, leg: Leg, now_s: float) -> None:
        """Switch to the other model.

        The worker returns its waiting requests (`Dispatcher.requests_returned`), finishes its batch, and reports the
        start and the end of the switch (`Dispatcher.switch_started`, `Dispatcher.switch_finished`).
        """


class Assignment(NamedTuple):
    """A request that was sent to a worker: its model, the time when it was sent, and its pixels times steps."""

    leg: Leg
    since_s: float
    pixel_steps: int


@dataclass(slots=True)
class WorkerSlot:
    """State of a worker in the dispatcher.

    Attributes:
        index: its number.
        worker: the worker; None while it is restarted.
        leg: the model that it serves; None for both at once.
        next_leg: the model that it is switching to, until it serves that model; None if it keeps its model.
        is_away: whether it serves no model now.
        pending_pixel_steps: pixels times steps of its unfinished requests; see `HasPendingWork`.
        batch_size: batch size of the last `limit_batch_size`.
        assignments: unfinished requests that were sent to it, by id.
    """

    index: int
    worker: Worker | None
    leg: Leg | None
    next_leg: Leg | None = None
    is_away: bool = False
    pending_pixel_steps: int = 0
    batch_size: int = 0
    assignments: dict[int, Assignment] = field(default_factory=dict)

    @property
    def is_accepting(self) -> bool:
        """Whether the worker accepts requests."""
        return self.worker is not None and self.next_leg is None and not self.is_away

    @property
    def target_leg(self) -> Leg | None:
        """The model that it switches to, or else the one that it serves."""
        return self.next_leg or self.leg

    def assign(self, request_id: int, assignment: Assignment) -> None:
        """Add a request that was sent to the worker."""
        self.assignments[request_id] = assignment
        self.pending_pixel_steps += assignment.pixel_steps

    def unassign(self, request_id: int) -> Assignment | None:
        """Remove a request and return its entry; None if it was not assigned to the worker."""
        assignment = self.assignments.pop(request_id, None)
        if assignment is not None:
            self.pending_pixel_steps -= assignment.pixel_steps
        return assignment
