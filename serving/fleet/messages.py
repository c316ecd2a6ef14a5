"""Messages between the front end of a fleet and its workers: plain data that is sent between processes.

A replica answers each call with the messages of one request. A worker process receives commands and sends events.
This module imports neither torch nor Ray.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...data.requests import Request
from ..core.request_state import RequestRecord
from ..core.step_row import StepRow
from ..server.backend import ReplicaState

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class Accepted:
    """The replica's engine has accepted the request."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The replica refuses the request: the model cannot serve it, or (`is_busy`) there is no engine now."""

    reason: str
    is_busy: bool


@dataclass(frozen=True, slots=True)
class Stepped:
    """Number of steps that a request has taken."""

    request_id: int
    steps_done: int


@dataclass(frozen=True, slots=True)
class PartialImage:
    """A partial image of a request; `index` counts from 0."""

    request_id: int
    index: int
    image: "Image"


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a request, its last message. There is an image if a replica completed it; others write files."""

    record: RequestRecord
    image: "Image | None" = None


ReplicaMessage = Accepted | Refused | Stepped | PartialImage | Ended


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """State of a replica, and its recent steps.

    Attributes:
        state: health and load, under the name by which the router knows the replica.
        rows: steps since the last poll; only the newest ones if that was long ago.
        trouble: reason why it does not draw as it should, as in `Backend`; "" if there is none.
    """

    state: ReplicaState
    rows: Sequence[StepRow]
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Begin:
    """Start to serve. All times count from `zero_s` on the clock of the machine, which its processes share."""

    zero_s: float


@dataclass(frozen=True, slots=True)
class Draw:
    """Draw a request, and report its end."""

    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop work on a request."""

    request_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class LimitBatchSize:
    """Limit the size of batches from now on."""

    batch_size: int


@dataclass(frozen=True, slots=True)
class SwitchModel:
    """Switch to another model: return the waiting requests (`Returned`), finish the batch, and report `Switched`."""

    model: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End without finishing the requests."""


Command = Begin | Draw | Cancel | LimitBatchSize | SwitchModel | Stop


@dataclass(frozen=True, slots=True)
class Loaded:
    """The worker has loaded its models; or, with an error, it cannot load them, and ends."""

    error: str | None = None


@dataclass(frozen=True, slots=True)
class Alive:
    """Number of requests that wait at the worker: when it changes, and as a heartbeat unless the engine is stalled."""

    num_waiting: int


@dataclass(frozen=True, slots=True)
class Returned:
    """Requests that the worker has not begun and leaves to others."""

    request_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Switched:
    """The worker has finished its batch, and serves the next model."""


@dataclass(frozen=True, slots=True)
class Died:
    """The process has ended, as noticed at the front end's end of its connection."""

    reason: str


Event = Loaded | Alive | Stepped | Ended | Returned | Switched | Died
