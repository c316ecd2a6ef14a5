"""Workers of a cascade, and the dispatcher's state of each. No torch."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ..core.request_state import RequestView
from ..fleet.book import Workload
from ..fleet.messages import Command
from .legs import Leg


class Worker(Protocol):
    """A GPU that serves one of the two models, or both at once.

    Attributes:
        num_waiting: number of requests that wait on the worker for its next batch.
    """

    @property
    def num_waiting(self) -> int: ...

    def send(self, command: Command) -> None:
        """Send a command. A `Draw` of an edit starts from the request's light image.

        The end of a request is reported to `Dispatcher.request_ended`, which ignores it after a `Cancel`. For
        `SwitchModel`, the worker's waiting requests go to `Dispatcher.requests_returned`, and the start and the end of
        the switch are reported to `Dispatcher.switch_started` and `Dispatcher.switch_finished`.
        """


class Assignment(NamedTuple):
    """A request that was sent to a worker: its model, and the time when it was sent."""

    leg: Leg
    since_s: float


@dataclass(slots=True)
class WorkerSlot:
    """State of a worker in the dispatcher.

    Attributes:
        index: its number.
        worker: the worker; None while it is restarted.
        leg: the model that it serves; None for both at once.
        next_leg: the model that it is switching to, until it serves that model; None if it keeps its model.
        is_away: whether it serves no model now.
        work: its unfinished requests, whose steps count until they end, and its batch size.
        assignments: unfinished requests that were sent to it, by id.
    """

    index: int
    worker: Worker | None
    leg: Leg | None
    next_leg: Leg | None = None
    is_away: bool = False
    work: Workload = field(default_factory=Workload)
    assignments: dict[int, Assignment] = field(default_factory=dict)

    @property
    def is_accepting(self) -> bool:
        """Whether the worker accepts requests."""
        return self.worker is not None and self.next_leg is None and not self.is_away

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait on the worker for its next batch."""
        return 0 if self.worker is None else self.worker.num_waiting

    @property
    def target_leg(self) -> Leg | None:
        """The model that it switches to, or else the one that it serves."""
        return self.next_leg or self.leg

    def assign(self, leg: Leg, view: RequestView) -> None:
        """Add a request that was sent to the worker when it arrived by its view."""
        self.assignments[view.request_id] = Assignment(leg, view.arrival_s)
        self.work.take(view)

    def unassign(self, request_id: int) -> Assignment | None:
        """Remove a request and return its entry; None if it was not assigned to the worker."""
        self.work.drop(request_id)
        return self.assignments.pop(request_id, None)
