"""Tickets: each represents one HTTP request as n requests of the backend that succeed or fail together. No torch."""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ..core.request_state import RequestRecord
from .admission import Place
from .backend import Follower
from .errors import ApiError, cancelled, too_late
from .images import encode
from .protocol import Generation

if TYPE_CHECKING:
    from PIL.Image import Image

CANCEL_TIMEOUT_S = 10.0
"""Seconds after which a cancelled ticket ends, even if its backend has not ended its requests."""
TicketStatus = Literal["queued", "in_progress", "completed", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class FinishedImage:
    """Finished image: its encoded file, and the record of its request."""

    content: bytes
    record: RequestRecord


@dataclass(frozen=True, slots=True)
class PartialImage:
    """Partial image of the image `image_index`, from 0. Those of one image come in the order of `index`."""

    image_index: int
    index: int
    content: bytes


@dataclass(frozen=True, slots=True)
class Progress:
    """Number of steps that an image has taken, out of `num_steps`."""

    image_index: int
    steps_done: int
    num_steps: int


Event = PartialImage | Progress | FinishedImage | ApiError | None
"""Event of a stream; None is the last one."""


@dataclass(eq=False)
class Ticket(Follower):
    """A client's request, from its admission on.

    Attributes:
        generation: the checked request.
        place: places that it has reserved; None for a line of a batch, which reserves none.
        cancel_one: cancels a request of the backend, with a reason.
        pool: executor that encodes images.
        on_over: called once, when all its requests have ended.
        key: owner of the key that it came with.
        request_id: the client's id for it.
        arrival_s: time of its arrival, on the event loop's clock.
        slo_s: seconds that its images may take.
        id: unguessable id of the ticket.
        created_s: time of its admission, in seconds since 1970.
        numbers: ids of its requests in the backend, in the order of the images.
        drawn: finished images, by index.
        records: records of its requests that have ended.
        steps_done: number of steps taken, by index of the image.
        first_image_s: seconds until its first image, partial or final.
        error: error that clients receive instead of the images.
        is_cancelled: whether its client has cancelled it.
        over: set when the ticket has ended.
        events: events for the stream; None if it does not stream.
        trace_context: headers that name the trace which the request belongs to.
    """

    generation: Generation
    place: Place | None
    cancel_one: Callable[[int, str], None]
    pool: Executor
    on_over: "Callable[[Ticket], None]"
    key: str = ""
    request_id: str = ""
    arrival_s: float = 0.0
    slo_s: float | None = None
    id: str = field(default_factory=lambda: f"img_{secrets.token_hex(16)}")
    created_s: float = field(default_factory=time.time)
    numbers: list[int] = field(default_factory=list)
    drawn: dict[int, FinishedImage] = field(default_factory=dict)
    records: list[RequestRecord] = field(default_factory=list)
    steps_done: dict[int, int] = field(default_factory=dict)
    first_image_s: float | None = None
    error: ApiError | None = None
    is_cancelled: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)
    events: "asyncio.Queue[Event] | None" = None
    trace_context: Mapping[str, str] = field(default_factory=dict)
    _num_ended: int = 0
    _cancel_timer: asyncio.TimerHandle | None = None
    _tail: "asyncio.Future[None] | None" = None

    @property
    def status(self) -> TicketStatus:
        """Status of the ticket that clients see."""
        if self.over.is_set():
            if self.is_cancelled:
                return "cancelled"
            return "failed" if self.error is not None else "completed"
        return "in_progress" if self.steps_done or self.drawn else "queued"

    @property
    def pixel_steps(self) -> int:
        """Pixels times remaining steps, over all images."""
        generation = self.generation
        done = sum(self.steps_done.get(index, 0) for index in range(len(generation.seeds)))
        return generation.pixel_steps - done * generation.pixels_seen

    @property
    def num_bytes(self) -> int:
        """Size of its images, and of the image and mask that it edits; references are gone once it has ended."""
        edit = self.generation.edit
        given = 0 if edit is None else edit.image.nbytes + edit.mask.nbytes
        return given + sum(len(drawn.content) for drawn in self.drawn.values())

    def on_step(self, request_id: int, steps_done: int) -> None:
        """Record the steps of an image, and queue its progress for the stream if the client asked for it."""
        index = self.numbers.index(request_id)
        # Some models take one more step than expected for an edit that takes only a part of them.
        steps_done = min(steps_done, self.generation.num_steps)
        self.steps_done[index] = steps_done
        if self.generation.progress:
            self._run_in_order(self._emit(Progress(index, steps_done, self.generation.num_steps)))

    def on_partial(self, request_id: int, index: int, image: "Image") -> None:
        """Encode a partial image and queue it for the stream."""
        self._run_in_order(self._emit_partial(self.numbers.index(request_id), index, image))

    def on_end(self, record: RequestRecord, image: "Image | None") -> None:
        """Record the end of a request, and encode its image; the last one ends the ticket."""
        if self.over.is_set():  # the backend took too long to end it
            return
        self.records.append(record)
        self._run_in_order(self._end_one(self.numbers.index(record.request_id), record, image))

    def cancel(self, reason: str, error: ApiError | None = None) -> None:
        """Cancel its open requests, which end at once or as soon as the backend can.

        The ticket ends with `error`; None means that its client has cancelled it.
        """
        if self.over.is_set():
            return
        if error is None:
            self.is_cancelled = True
        self.error = self.error or error
        for index, number in enumerate(self.numbers):
            if index not in self.drawn:
                self.cancel_one(number, reason)
        if self._cancel_timer is None:
            self._cancel_timer = asyncio.get_running_loop().call_later(CANCEL_TIMEOUT_S, self._force_end)

    def _force_end(self) -> None:
        """End the ticket although the backend has not reported the end of all its requests."""
        self._num_ended = len(self.generation.seeds)
        self._end_if_complete()

    def fail(self, error: ApiError | None, num_missing: int) -> None:
        """Count `num_missing` requests as ended that were never submitted.

        `error` is the reason; None if the ticket was cancelled or failed meanwhile.
        """
        self._num_ended += num_missing
        if error is not None:
            self.error = self.error or error
        if self.error is not None:
            self.cancel("another image of the request could not be handed in", self.error)
        self._end_if_complete()

    def _run_in_order(self, work: Any) -> None:
        """Run the coroutines of events one after the other: a partial image must not follow the final one."""
        before = self._tail

        async def after() -> None:
            if before is not None:
                await asyncio.wait([before])
            await work

        self._tail = asyncio.ensure_future(after())

    def _note_first_image(self) -> None:
        if self.first_image_s is None:
            self.first_image_s = asyncio.get_running_loop().time() - self.arrival_s

    async def _emit(self, event: Event) -> None:
        if self.events is not None:
            self.events.put_nowait(event)

    async def _encode(self, image: "Image") -> bytes:
        generation = self.generation
        work = partial(encode, image, generation.output_format, generation.output_compression)
        return await asyncio.get_running_loop().run_in_executor(self.pool, work)

    async def _emit_partial(self, image_index: int, index: int, image: "Image") -> None:
        if self.events is not None and not self.over.is_set():
            content = await self._encode(image)
            self._note_first_image()
            await self._emit(PartialImage(image_index, index, content))

    async def _end_one(self, index: int, record: RequestRecord, image: "Image | None") -> None:
        error = None
        if image is None:
            error = error_of(record)
        else:
            try:
                drawn = FinishedImage(await self._encode(image), record)
                if self.over.is_set():
                    return
                self.drawn[index] = drawn
                self._note_first_image()
                await self._emit(drawn)
            except Exception as failure:  # noqa: BLE001  whatever it is, its client must get an answer
                error = ApiError(500, f"the image could not be encoded: {failure}", code="generation_failed")
        if error is not None and self.error is None and not self.is_cancelled:
            self.cancel("another image of the request has failed", error)
        self._num_ended += 1
        self._end_if_complete()

    def _end_if_complete(self) -> None:
        if self._num_ended < len(self.generation.seeds) or self.over.is_set():
            return
        if self.events is not None:
            error = self.error or (cancelled("the generation was cancelled") if self.is_cancelled else None)
            if error is not None:
                self.events.put_nowait(error)
            self.events.put_nowait(None)
        if self._cancel_timer is not None:
            self._cancel_timer.cancel()
        self.over.set()
        self.on_over(self)


def error_of(record: RequestRecord) -> ApiError:
    """Return the error that a client receives for a request without an image."""
    if record.status == "discarded":
        return too_late(f"the deadline cannot be met: {record.reason}")
    if record.status == "failed":
        return ApiError(
            500,
            f"the image could not be drawn: {record.reason}",
            code="generation_failed",
            # A client that retries automatically might crash one engine after the other.
            headers={"x-should-retry": "false"},
        )
    return ApiError(500, "the engine has stopped, and what it drew with it; it may be sent again", code="engine_error")


def facts_of(record: RequestRecord) -> dict[str, Any]:
    """Return how an image was drawn, as responses report it: the number of steps that reused anything, from the cache
    or a record.

    For a cascade also the model that drew it, the confidence of the light image, and the threshold that it was compared
    with; both are null if the image was not judged. For an edit also whether it reused the record of its template, and
    how much of the image it changes.
    """
    facts: dict[str, Any] = {} if record.steps_reused is None else {"steps_reused": record.steps_reused}
    if record.served_by is not None:
        facts |= {"model": record.served_by, "confidence": record.confidence, "threshold": record.threshold}
    elif record.reused is not None:
        facts |= {"reused": record.reused, "mask_ratio": record.mask_ratio, "active_share": record.active_share}
    return facts


def metrics_of(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return the seconds that a ticket's slowest image spent in each phase; None for phases that it did not reach."""
    record = max(records, key=lambda each: each.finish_s or 0.0)
    queued_s = record.queueing_s
    return {
        "queue_s": None if queued_s is None else max(0.0, queued_s - (record.prepare_s or 0.0)),
        "prepare_s": record.prepare_s,
        "denoise_s": record.denoise_s,
        "decode_s": record.decode_s,
        "latency_s": record.latency_s,
        "slo_s": record.slo_s,
        "slo_met": None if record.slo_s is None else all(each.slo_met is True for each in records),
    }
