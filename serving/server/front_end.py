"""What answers clients, whatever protocol they speak: lets requests in, hands them to the backend, keeps their tickets.

No torch. All of it runs on the event loop.
"""

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ...data.errors import UsageError
from ...data.requests import Request
from .admission import Admission, Place
from .backend import FIRST_ID, Backend, Health
from .errors import ApiError, invalid
from .image_store import ImageStore, StoredImage
from .images import MEDIA_TYPES
from .limits import Limits
from .protocol import Generation, ModelFacts
from .tickets import Ticket

_ENCODERS = 2
_POLL_S, _CANCELLED_WITHIN_S = 0.05, 5.0
_MOST_TICKETS, _MOST_BYTES = 512, 256_000_000
"""Of those that have ended and can still be asked about, and of their images."""


class Watcher(Protocol):
    """Told of everything that happens to tickets: metrics, the live page, the log."""

    def on_accepted(self, ticket: Ticket) -> None: ...
    def on_rejected(self, error: ApiError) -> None: ...
    def on_over(self, ticket: Ticket) -> None: ...


@dataclass(slots=True)
class Pricing:
    """What a request may take if it does not say: this many times its latency when it is served alone.

    Attributes:
        slo_scale: see above; None: there is no SLO then.
        standalone_s: of a request, measured or predicted; None where that is not known.
    """

    slo_scale: float | None
    standalone_s: Callable[[Request], float | None]

    def slo_s(self, request: Request) -> float | None:
        """Seconds that a request may take."""
        alone_s = None if self.slo_scale is None else self.standalone_s(request)
        return None if alone_s is None or self.slo_scale is None else self.slo_scale * alone_s


@dataclass(eq=False)
class FrontEnd:
    """Lets requests in and follows them to their end.

    Attributes:
        model: that is served.
        limits: what is refused.
        backend: draws.
        pricing: of requests without an SLO of their own.
        store: images that are fetched by their address.
        watchers: told of everything.
        is_draining: nothing more is let in.
        open, ended: tickets by id; of the ended ones the newest.
    """

    model: ModelFacts
    limits: Limits
    backend: Backend
    pricing: Pricing
    store: ImageStore = field(default_factory=ImageStore)
    watchers: list[Watcher] = field(default_factory=list)
    is_draining: bool = False
    open: dict[str, Ticket] = field(default_factory=dict)
    ended: OrderedDict[str, Ticket] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.admission = Admission(self.limits, lambda: self.backend.load.rate, lambda: self.backend.load.pixel_steps)
        self._numbers = itertools.count(FIRST_ID)
        self._ended_bytes = 0
        self._pool = ThreadPoolExecutor(_ENCODERS, thread_name_prefix="psctl-encode")

    @property
    def is_ready(self) -> bool:
        """Whether requests are let in."""
        return not self.is_draining and self.backend.health is Health.READY

    async def generate(
        self,
        wanted: Generation,
        *,
        key: str = "",
        arrival_s: float,
        streams: bool = False,
        is_batch: bool = False,
    ) -> Ticket:
        """Let a request in.

        Args:
            wanted: checked.
            key: whose it is.
            arrival_s: when it came in, by the loop's clock.
            streams: whether its events are wanted.
            is_batch: it is a line of a batch, which takes no client's place and has no deadline.

        Returns:
            Its ticket; it ends by itself.

        Raises:
            ApiError: there is no room (429), or nobody to draw it (503), or the model cannot serve it (400).
        """
        try:
            return await self._let_in(wanted, key, arrival_s, streams, is_batch)
        except ApiError as error:
            for watcher in self.watchers:
                watcher.on_rejected(error)
            raise

    async def _let_in(self, wanted: Generation, key: str, arrival_s: float, streams: bool, is_batch: bool) -> Ticket:
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code="draining", headers={"Retry-After": "10"})
        place = Place(0, 0, key) if is_batch else self.admission.reserve(len(wanted.seeds), wanted.pixel_steps, key)
        ticket = Ticket(wanted, place, self.backend.cancel, self._pool, self._over, key, arrival_s)
        ticket.numbers = [next(self._numbers) for _ in wanted.seeds]
        if streams:
            ticket.events = asyncio.Queue()
        self.open[ticket.id] = ticket
        num_in = 0
        try:
            for number, seed in zip(ticket.numbers, wanted.seeds, strict=True):
                request = Request(
                    number,
                    wanted.prompt,
                    wanted.resolution,
                    wanted.num_inference_steps,
                    wanted.guidance_scale,
                    seed,
                    wanted.negative_prompt,
                    arrival_s,
                    wanted.slo_s,
                )
                if request.slo_s is None and not is_batch:
                    request = replace(request, slo_s=self.pricing.slo_s(request))
                ticket.slo_s = request.slo_s
                await self.backend.submit(
                    request,
                    ticket,
                    num_partials=wanted.partial_images if streams else 0,
                    follows_steps=wanted.progress,
                )
                num_in += 1
        except (UsageError, ApiError) as error:
            told = error if isinstance(error, ApiError) else invalid(str(error))
            ticket.fail(told, len(wanted.seeds) - num_in)
            raise told from None
        except BaseException:
            gone = ApiError(500, "the request was given up", code="engine_error")
            ticket.fail(gone, len(wanted.seeds) - num_in)
            raise
        for watcher in self.watchers:
            watcher.on_accepted(ticket)
        return ticket

    def _over(self, ticket: Ticket) -> None:
        self.admission.release(ticket.place)
        self.open.pop(ticket.id, None)
        if ticket.status == "completed" and ticket.generation.response_format == "url":
            media_type = MEDIA_TYPES[ticket.generation.output_format]
            for index, drawn in ticket.drawn.items():
                self.store.put(f"{ticket.id}-{index}", drawn.content, media_type)
        self.ended[ticket.id] = ticket
        self._ended_bytes += ticket.num_bytes
        while len(self.ended) > _MOST_TICKETS or (self._ended_bytes > _MOST_BYTES and len(self.ended) > 1):
            self._ended_bytes -= self.ended.popitem(last=False)[1].num_bytes
        for watcher in self.watchers:
            watcher.on_over(ticket)

    def image(self, name: str) -> StoredImage | None:
        """A finished image by the name of its ticket and its number, `ID-0`; the name is nobody's guess."""
        stored = self.store.get(name)
        ticket_id, _, number = name.rpartition("-")
        ticket = self.ended.get(ticket_id)
        if stored is not None or ticket is None or not number.isascii() or not number.isdigit():
            return stored
        drawn = ticket.drawn.get(int(number[:3]))
        media_type = MEDIA_TYPES[ticket.generation.output_format]
        return None if drawn is None else StoredImage(drawn.content, media_type, 0.0)

    def ticket(self, ticket_id: str, key: str) -> Ticket:
        """A ticket of this key. Raises ApiError: there is none."""
        found = self.open.get(ticket_id) or self.ended.get(ticket_id)
        if found is None or found.key != key:
            raise ApiError(404, "there is no such generation", code="not_found")
        return found

    async def wait(self, ticket: Ticket) -> None:
        """Wait for the end of a ticket, as long as a request may take. Raises ApiError if it has no images then."""
        try:
            await asyncio.wait_for(ticket.over.wait(), self.limits.request_timeout_s)
        except TimeoutError:
            gone = ApiError(504, f"it took more than {self.limits.request_timeout_s:g} s", code="timeout")
            ticket.cancel("it took too long", gone)
            raise gone from None
        if ticket.error is not None:
            raise ticket.error
        if ticket.is_cancelled:
            raise ApiError(409, "the generation was cancelled", code="cancelled")

    async def drain(self, timeout_s: float) -> None:
        """Let nothing more in, wait for what is open, then cancel it, and stop the backend."""
        self.is_draining = True
        await self._wait_for_open(timeout_s)
        gone = ApiError(503, "the server is shutting down", code="draining")
        for ticket in list(self.open.values()):
            ticket.cancel("the server is shutting down", gone)
        await self._wait_for_open(_CANCELLED_WITHIN_S)
        await self.backend.stop()
        self._pool.shutdown(wait=False)

    async def _wait_for_open(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        while self.open and loop.time() < end_s:
            await asyncio.sleep(_POLL_S)


def metrics_of(ticket: Ticket) -> dict[str, Any]:
    """Where the time of a ticket went, by its slowest image, in seconds."""
    record = max(ticket.records, key=lambda each: each.finish_s or 0.0)
    times = record.arrival_s, record.prepare_start_s, record.prepare_end_s, record.admitted_s, record.denoise_end_s
    arrival_s, prepare_start_s, prepare_end_s, admitted_s, denoise_end_s = (time_s or 0.0 for time_s in times)
    return {
        "queue_s": max(0.0, admitted_s - arrival_s - (prepare_end_s - prepare_start_s)),
        "prepare_s": prepare_end_s - prepare_start_s,
        "denoise_s": denoise_end_s - admitted_s,
        "decode_s": (record.finish_s or 0.0) - denoise_end_s,
        "latency_s": record.latency_s,
        "slo_s": record.slo_s,
        "slo_met": None if record.slo_s is None else all(each.slo_met is True for each in ticket.records),
    }
