"""The state of an engine that its stages share."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ..core.prepared import PreparedRequest
from ..core.request_state import RequestState
from ..scheduling.scheduler import Scheduler
from .watch import Watch


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request that has not been reported to the collector yet.

    Attributes:
        state: its state in the scheduler.
        watch: receives its progress; None if nothing does.
        prepared: its encoded text and latents, from the end of preparing until the last step.
    """

    state: RequestState
    watch: Watch | None
    prepared: PreparedRequest | None = None


@dataclass(slots=True, eq=False)
class OpenRequests:
    """The open requests of an engine, which owns them, and the lock that guards them and the scheduler.

    Attributes:
        scheduler: the scheduler.
        now_s: returns the time on the engine's clock.
        changed: condition that is notified when the denoise loop may have something to do, and when nothing is open any
            more.
        by_id: the requests.
    """

    scheduler: Scheduler
    now_s: Callable[[], float]
    changed: threading.Condition = field(default_factory=threading.Condition)
    by_id: dict[int, OpenRequest] = field(default_factory=dict)

    def wake(self) -> None:
        """Notify `changed`."""
        with self.changed:
            self.changed.notify_all()

    def release(self, state: RequestState) -> PreparedRequest | None:
        """Return the tensors of a request, and release them. Thread-safe."""
        with self.changed:
            found = self.by_id.get(state.request.request_id)
            if found is None:
                return None
            prepared, found.prepared = found.prepared, None
        return prepared
