"""One HTTP request is n requests of the backend, all or nothing; a ticket holds them together. No torch."""

import asyncio
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ..core.request_state import RequestRecord
from .admission import Place
from .backend import Follower
from .errors import ApiError, too_late
from .images import encode
from .protocol import Generation

if TYPE_CHECKING:
    from PIL.Image import Image

TicketStatus = Literal["queued", "in_progress", "completed", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A finished image: its file, and the record of its request."""

    content: bytes
    record: RequestRecord


@dataclass(frozen=True, slots=True)
class Partial:
    """A partial image of image `image_index`, from 0; of each image these come in the order of `index`."""

    image_index: int
    index: int
    content: bytes


@dataclass(frozen=True, slots=True)
class Progress:
    """An image has taken so many of its steps."""

    image_index: int
    steps_done: int
    num_steps: int


Event = Partial | Progress | Drawn | ApiError | None
"""What a stream tells; None: all is said."""


@dataclass(eq=False)
class Ticket(Follower):
    """A request of a client, from the moment it was let in.

    Attributes:
        generation: what was asked for.
        place: what it has reserved.
        cancel_one: ends a request of the backend, with a reason.
        pool: encodes images.
        on_over: called once, when all its requests have ended.
        key: whose it is.
        arrival_s, slo_s: when it came in, by the loop's clock, and how long its images may take.
        id: unguessable.
        created_s: seconds since 1970.
        numbers: ids of its requests, in the order of the images.
        drawn: the images, as far as they are there.
        steps_done: of each image.
        error: why there are none.
        over: set when it has ended.
        events: for the stream, if there is one.
    """

    generation: Generation
    place: Place
    cancel_one: Callable[[int, str], None]
    pool: Executor
    on_over: "Callable[[Ticket], None]"
    key: str = ""
    arrival_s: float = 0.0
    slo_s: float | None = None
    id: str = field(default_factory=lambda: f"img_{secrets.token_hex(16)}")
    created_s: float = field(default_factory=time.time)
    numbers: list[int] = field(default_factory=list)
    drawn: dict[int, Drawn] = field(default_factory=dict)
    records: list[RequestRecord] = field(default_factory=list)
    steps_done: dict[int, int] = field(default_factory=dict)
    error: ApiError | None = None
    is_cancelled: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)
    events: "asyncio.Queue[Event] | None" = None
    _num_ended: int = 0
    _tail: "asyncio.Future[None] | None" = None

    @property
    def status(self) -> TicketStatus:
        """Where it is."""
        if self.over.is_set():
            if self.is_cancelled:
                return "cancelled"
            return "failed" if self.error is not None else "completed"
        return "in_progress" if self.steps_done or self.drawn else "queued"

    @property
    def num_bytes(self) -> int:
        """Of its images."""
        return sum(len(drawn.content) for drawn in self.drawn.values())

    def on_step(self, request_id: int, steps_done: int) -> None:
        """See `Follower`."""
        index = self.numbers.index(request_id)
        self.steps_done[index] = steps_done
        if self.generation.progress:
            self._in_turn(self._say(Progress(index, steps_done, self.generation.num_inference_steps)))

    def on_partial(self, request_id: int, index: int, image: "Image") -> None:
        """See `Follower`."""
        self._in_turn(self._say_partial(self.numbers.index(request_id), index, image))

    def on_end(self, record: RequestRecord, image: "Image | None") -> None:
        """See `Follower`."""
        self.records.append(record)
        self._in_turn(self._end_one(self.numbers.index(record.request_id), record, image))

    def cancel(self, reason: str, error: ApiError | None = None) -> None:
        """End what is open of it. The error is what it ends with; without one, its client has taken it back."""
        if self.over.is_set():
            return
        if error is None:
            self.is_cancelled = True
        self.error = self.error or error
        for index, number in enumerate(self.numbers):
            if index not in self.drawn:
                self.cancel_one(number, reason)

    def fail(self, error: ApiError, num_missing: int) -> None:
        """It could not be handed in as a whole: so many of its requests will never end, as they never began."""
        self.error = self.error or error
        self._num_ended += num_missing
        self.cancel("another image of the request could not be handed in", error)
        self._end_if_all_have()

    def _in_turn(self, work: Any) -> None:
        """Do the work of events one after the other: a partial image must not come after the last one."""
        before = self._tail

        async def after() -> None:
            if before is not None:
                await asyncio.wait([before])
            await work

        self._tail = asyncio.ensure_future(after())

    async def _say(self, event: Event) -> None:
        if self.events is not None:
            self.events.put_nowait(event)

    async def _encoded(self, image: "Image") -> bytes:
        wanted = self.generation
        work = partial(encode, image, wanted.output_format, wanted.output_compression)
        return await asyncio.get_running_loop().run_in_executor(self.pool, work)

    async def _say_partial(self, image_index: int, index: int, image: "Image") -> None:
        if self.events is not None and not self.over.is_set():
            await self._say(Partial(image_index, index, await self._encoded(image)))

    async def _end_one(self, index: int, record: RequestRecord, image: "Image | None") -> None:
        error = None
        if image is None:
            error = error_of(record)
        else:
            try:
                drawn = self.drawn[index] = Drawn(await self._encoded(image), record)
                await self._say(drawn)
            except Exception as failure:  # noqa: BLE001  whatever it is, its client must not wait for ever
                error = ApiError(500, f"the image could not be encoded: {failure}", code="generation_failed")
        if error is not None and self.error is None and not self.is_cancelled:
            self.cancel("another image of the request has failed", error)
        self._num_ended += 1
        self._end_if_all_have()

    def _end_if_all_have(self) -> None:
        if self._num_ended < len(self.generation.seeds) or self.over.is_set():
            return
        if self.events is not None:
            if self.error is not None:
                self.events.put_nowait(self.error)
            self.events.put_nowait(None)
        self.over.set()
        self.on_over(self)


def error_of(record: RequestRecord) -> ApiError:
    """What a client is told of a request without an image."""
    if record.status == "discarded":
        return too_late(f"the deadline cannot be met: {record.reason}")
    if record.status == "failed":
        return ApiError(500, f"the image could not be drawn: {record.reason}", code="generation_failed")
    return ApiError(500, "the engine has stopped; the request may be sent again", code="engine_error")
