"""What a replica tells the front end. Plain data that travels between processes. No torch, no Ray."""

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
    """The engine of a replica has a request."""

    replica: str


@dataclass(frozen=True, slots=True)
class Refused:
    """It has not: the model cannot serve it, or (`is_busy`) there is no engine now."""

    reason: str
    is_busy: bool


@dataclass(frozen=True, slots=True)
class Stepped:
    """The request has taken so many steps."""

    steps_done: int


@dataclass(frozen=True, slots=True)
class PartialImage:
    """A partial image of it, from 0."""

    index: int
    image: "Image"


@dataclass(frozen=True, slots=True)
class Ended:
    """It has ended; with an image if it was completed. Nothing follows."""

    record: RequestRecord
    image: "Image | None"


Told = Accepted | Refused | Stepped | PartialImage | Ended


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """What a replica is at.

    Attributes:
        state: by its name, as the router knows it.
        rows: its steps since it was asked last; only the newest ones, if it was not asked for long.
        trouble: as of `Backend`.
    """

    state: ReplicaState
    rows: Sequence[StepRow]
    trouble: str = ""
