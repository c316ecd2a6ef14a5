"""Front end, independent of the protocol: admits requests, submits them to the backend, and keeps their tickets.

All of it runs on the event loop. No torch.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

from ...data.errors import UsageError
from ...data.fair_store import FairStore
from ...data.requests import Request
from ...data.resolution import Resolution
from .admission import Admission
from .backend import FIRST_ID, Backend, Health
from .errors import ApiError, cancelled, invalid, took_too_long
from .image_store import ImageStore, StoredImage
from .images import MEDIA_TYPES
from .limits import Limits
from .protocol import Generation, ModelFacts
from .tickets import Ticket

_ENCODERS = 2
_POLL_S, _CANCELLED_WITHIN_S = 0.05, 5.0
_MOST_BYTES, _LEAST_BYTES = 256_000_000, 500_000
"""Maximum total size of the ended tickets that are kept for later requests, and the least size that one counts."""


class Watcher(Protocol):
    """Observer of tickets and of HTTP responses: metrics, the live page, the log."""

    def on_accepted(self, ticket: Ticket) -> None: ...
    def on_rejected(self, error: ApiError, request_id: str, key: str) -> None: ...
    def on_over(self, ticket: Ticket) -> None: ...
    def on_answer(self, route: str, status: int, request_id: str) -> None: ...


@dataclass(slots=True)
class Pricing:
    """SLO of requests that set none: that of their resolution, or else a multiple of their standalone latency.

    Attributes:
        slo_scale: multiple of the standalone latency; None if only resolutions have an SLO.
        standalone_s: returns the standalone latency of a request in seconds, measured or predicted; None if it is not
            known.
        fixed_s: returns the SLO of a resolution in seconds; None if it has none.
    """

    slo_scale: float | None
    standalone_s: Callable[[Request], float | None]
    fixed_s: Callable[[Resolution], float | None]

    def slo_s(self, request: Request) -> float | None:
        """Return the SLO of a request in seconds; None if it has none."""
        if (fixed_s := self.fixed_s(request.resolution)) is not None:
            return fixed_s
        alone_s = None if self.slo_scale is None else self.standalone_s(request)
        return None if alone_s is None or self.slo_scale is None else self.slo_scale * alone_s


@dataclass(eq=False)
class FrontEnd:
    """Admits requests and follows them to their end.

    Attributes:
        model: the served model.
        limits: limits beyond which requests are refused.
        backend: draws the images.
        pricing: SLOs of requests that set none.
        store: images that clients fetch by URL.
        watchers: observers of all tickets and responses.
        is_draining: whether new requests are refused because the server is shutting down.
        open, ended: tickets by id; of the ended ones, the newest of each owner.
    """

    model: ModelFacts
    limits: Limits
    backend: Backend
    pricing: Pricing
    store: ImageStore = field(default_factory=ImageStore)
    watchers: list[Watcher] = field(default_factory=list)
    is_draining: bool = False
    open: dict[str, Ticket] = field(default_factory=dict)
    ended: FairStore[Ticket] = field(default_factory=lambda: FairStore(_MOST_BYTES))

    def __post_init__(self) -> None:
        self.admission = Admission(self.limits, lambda: self.backend.load.rate, self._pending)
        self._numbers = itertools.count(FIRST_ID)
        self._pool = ThreadPoolExecutor(_ENCODERS, thread_name_prefix="psctl-encode")

    @property
    def is_ready(self) -> bool:
        """Whether requests are admitted."""
        return not self.is_draining and self.backend.health is Health.READY

    async def generate(
        self,
        generation: Generation,
        *,
        key: str = "",
        request_id: str = "",
        arrival_s: float,
        streams: bool = False,
        is_batch: bool = False,
        trace_context: Mapping[str, str] | None = None,
    ) -> Ticket:
        """Admit a request and submit it to the backend.

        Args:
            generation: the checked request.
            key: owner of the key that it came with.
            request_id: the client's id for it; two open requests of one owner may not share an id.
            arrival_s: time of its arrival, on the event loop's clock.
            streams: whether its events are queued for a stream.
            is_batch: whether it is a line of a batch, which reserves no place and has no deadline.
            trace_context: headers that name the trace which it belongs to.

        Returns:
            The ticket of the request, which ends without further calls.

        Raises:
            ApiError: there is no room (429), the server or its backend takes no requests now (503), the model cannot
                serve the request (400), one with this id is open (409), or it could not be submitted in time (504).
        """
        try:
            ticket = self._admit(generation, key, request_id, arrival_s, is_batch)
        except ApiError as error:
            for watcher in self.watchers:
                watcher.on_rejected(error, request_id, key)
            raise
        ticket.trace_context = trace_context or {}
        if streams:
            ticket.events = asyncio.Queue()
        for watcher in self.watchers:
            watcher.on_accepted(ticket)
        limit_s = self.limits.request_timeout_s
        try:
            async with asyncio.timeout(None if is_batch else limit_s):
                await self._submit(ticket)
        except TimeoutError:
            raise took_too_long(limit_s) from None
        return ticket

    def _admit(self, generation: Generation, key: str, request_id: str, arrival_s: float, is_batch: bool) -> Ticket:
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code="draining", headers={"Retry-After": "10"})
        if request_id and any(each.request_id == request_id and each.key == key for each in self.open.values()):
            raise ApiError(
                409,
                f"a request with the X-Request-Id {request_id} is open",
                code="id_in_flight",
                headers={"x-should-retry": "false"},
            )
        place = None if is_batch else self.admission.reserve(len(generation.seeds), key, generation.pixel_steps)
        ticket = Ticket(
            generation, place, self.backend.cancel, self._pool, self._on_ticket_ended, key, request_id, arrival_s
        )
        ticket.numbers = [next(self._numbers) for _ in generation.seeds]
        self.open[ticket.id] = ticket
        return ticket

    def _pending(self, key: str | None) -> int:
        return sum(
            ticket.pixel_steps
            for ticket in self.open.values()
            if ticket.place is not None and key in (None, ticket.key)
        )

    async def _submit(self, ticket: Ticket) -> None:
        generation, num_submitted = ticket.generation, 0
        is_batch = ticket.place is None
        try:
            for number, seed in zip(ticket.numbers, generation.seeds, strict=True):
                if ticket.error is not None or ticket.is_cancelled:
                    break
                request = Request(
                    number,
                    generation.prompt,
                    generation.resolution,
                    generation.num_inference_steps,
                    generation.guidance_scale,
                    seed,
                    generation.negative_prompt,
                    ticket.arrival_s,
                    None if is_batch else generation.slo_s,
                    generation.edit,
                    generation.fallback,
                    adapters=generation.adapters,
                    cache=generation.cache,
                    yields=is_batch,
                    owner=ticket.key,
                    priority=generation.priority,
                    weight=self.limits.of(ticket.key).weight,
                    references=generation.references,
                )
                if request.slo_s is None and not is_batch:
                    request = replace(request, slo_s=self.pricing.slo_s(request))
                ticket.slo_s = request.slo_s
                await self.backend.submit(
                    request,
                    ticket,
                    num_partials=0 if ticket.events is None else generation.partial_images,
                    follows_steps=generation.progress,
                )
                num_submitted += 1
                if ticket.error is not None or ticket.is_cancelled:
                    # It ended during `submit`, when the backend did not know it yet.
                    self.backend.cancel(number, "the request was cancelled")
            if num_submitted < len(generation.seeds):
                ticket.fail(None, len(generation.seeds) - num_submitted)
        except (UsageError, ApiError) as error:
            refusal = error if isinstance(error, ApiError) else invalid(str(error))
            ticket.fail(refusal, len(generation.seeds) - num_submitted)
            raise refusal from None
        except asyncio.CancelledError:
            ticket.cancel("its client has left, or it took too long")
            ticket.fail(None, len(generation.seeds) - num_submitted)
            raise
        except BaseException:
            aborted = ApiError(500, "the request was given up", code="engine_error")
            ticket.fail(aborted, len(generation.seeds) - num_submitted)
            raise

    def _on_ticket_ended(self, ticket: Ticket) -> None:
        if ticket.place is not None:
            self.admission.release(ticket.place)
        self.open.pop(ticket.id, None)
        if ticket.status == "completed" and ticket.generation.response_format == "url":
            media_type = MEDIA_TYPES[ticket.generation.output_format]
            for index, drawn in ticket.drawn.items():
                self.store.put(f"{ticket.id}-{index}", drawn.content, media_type, ticket.key)
        for watcher in self.watchers:
            watcher.on_over(ticket)
        ticket.generation = ticket.generation.without_references()
        self.ended.put(ticket.key, ticket.id, ticket, max(_LEAST_BYTES, ticket.num_bytes))

    def image(self, name: str) -> StoredImage | None:
        """Return a finished image by its name, the ticket's id and the image's index (`ID-0`); None if there is none.

        Names cannot be guessed.
        """
        stored = self.store.get(name)
        ticket_id, _, number = name.rpartition("-")
        ticket = self.ended.get(ticket_id)
        if stored is not None or ticket is None or not number.isascii() or not number.isdigit():
            return stored
        drawn = None if time.time() - ticket.created_s > self.store.max_age_s else ticket.drawn.get(int(number[:3]))
        media_type = MEDIA_TYPES[ticket.generation.output_format]
        return None if drawn is None else StoredImage(drawn.content, media_type, 0.0)

    def ticket(self, ticket_id: str, key: str) -> Ticket:
        """Return a ticket of this owner. Raises ApiError (404) if there is none."""
        found = self.open.get(ticket_id) or self.ended.get(ticket_id)
        if found is None or found.key != key:
            raise ApiError(404, "there is no such generation", code="not_found")
        return found

    async def wait(self, ticket: Ticket) -> None:
        """Wait for the end of a ticket, at most `request_timeout_s`; lines of a batch have no time limit.

        Raises ApiError if it ends without images, or takes too long.
        """
        limit_s = self.limits.request_timeout_s
        try:
            await asyncio.wait_for(ticket.over.wait(), None if ticket.place is None else limit_s)
        except TimeoutError:
            aborted = took_too_long(limit_s)
            ticket.cancel("it took too long", aborted)
            raise aborted from None
        if ticket.error is not None:
            raise ticket.error
        if ticket.is_cancelled:
            raise cancelled("the generation was cancelled")

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, wait up to `timeout_s` for the open ones, cancel the rest, and stop the backend."""
        self.is_draining = True
        await self._wait_for_open(timeout_s)
        aborted = ApiError(503, "the server is shutting down", code="draining")
        for ticket in list(self.open.values()):
            ticket.cancel("the server is shutting down", aborted)
        await self._wait_for_open(_CANCELLED_WITHIN_S)
        await self.backend.stop()
        self._pool.shutdown(wait=False)

    async def _wait_for_open(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        while self.open and loop.time() < end_s:
            await asyncio.sleep(_POLL_S)
