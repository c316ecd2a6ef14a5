"""Messages from a replica to the front end: plain data that is sent between processes.

This module imports neither torch nor Ray.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.request_state import RequestRecord
from ..core.step_row import StepRow
from ..server.backend import ReplicaState

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class Accepted:
    """The replica's engine has accepted the request."""

    replica: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The replica refuses the request: the model cannot serve it, or (`is_busy`) there is no engine now."""

    reason: str
    is_busy: bool


@dataclass(frozen=True, slots=True)
class Stepped:
    """Number of steps that the request has taken."""

    steps_done: int


@dataclass(frozen=True, slots=True)
class PartialImage:
    """A partial image of the request; `index` counts from 0."""

    index: int
    image: "Image"


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of the request, with an image if it was completed. It is the last message."""

    record: RequestRecord
    image: "Image | None"


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
