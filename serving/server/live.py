"""State of the live page: the running batch, the queue, attainment, latencies and the newest images. No torch.

Everything is bounded. The state is built only while there are viewers, once for all of them, in a time that does not
depend on the number of ended requests.
"""

import asyncio
import contextlib
import json
import math
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ..core.step_row import StepRow
from .errors import ApiError
from .front_end import FrontEnd, Watcher
from .tickets import Ticket

WINDOWS_S = (60, 300, 3600)
UPDATES_PER_S, RECENT_IMAGES = 5, 24
_LATENCIES_S, _MOST_LATENCIES, _MOST_OF_SIZE = 300, 2000, 500
_MOST_SHOWN, _MOST_VIEWERS = 64, 32
_IDLE_S = 2.0
"""Interval at which an unchanged state is sent again, so that the page knows that the server is alive."""
_NUM_SPANS = 60


class _Window:
    """SLO attainment over the last `seconds`, counted in spans of a sixtieth of them."""

    def __init__(self, seconds: float) -> None:
        self._span_s = seconds / _NUM_SPANS
        self._spans = [(-1, 0, 0)] * _NUM_SPANS

    def note(self, is_met: bool, now_s: float) -> None:
        """Count a request that has ended."""
        number = int(now_s / self._span_s)
        known, num_met, num = self._spans[number % _NUM_SPANS]
        if known != number:
            num_met, num = 0, 0
        self._spans[number % _NUM_SPANS] = (number, num_met + is_met, num + 1)

    def to_json(self, now_s: float) -> dict[str, Any]:
        """Return the share of requests that were in time, and their number."""
        oldest = int(now_s / self._span_s) - _NUM_SPANS
        spans = [each for each in self._spans if each[0] > oldest]
        num = sum(each[2] for each in spans)
        return {"share": sum(each[1] for each in spans) / num if num else None, "n": num}


@dataclass(frozen=True, slots=True)
class _Latency:
    at_s: float
    size: str
    latency_s: float
    slo_s: float | None


@dataclass(frozen=True, slots=True)
class _State:
    """State at one moment, as JSON: the part that all viewers share, and the full states of the keys that viewed it."""

    at_s: float
    is_last: bool
    shared: bytes
    by_key: dict[str, bytes] = field(default_factory=dict)


@dataclass(eq=False)
class Live(Watcher):
    """Watcher that keeps the state of the live page.

    Attributes:
        front_end: front end that it shows.
    """

    front_end: FrontEnd
    _windows: dict[int, _Window] = field(default_factory=lambda: {each: _Window(each) for each in WINDOWS_S})
    _latencies: deque[_Latency] = field(default_factory=lambda: deque(maxlen=_MOST_LATENCIES))
    _images: defaultdict[str, deque[dict[str, Any]]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=RECENT_IMAGES))
    )
    _last_row: StepRow | None = None
    _state: _State = field(default_factory=lambda: _State(-math.inf, False, b""))
    _is_stale: bool = True
    _has_changed: asyncio.Event = field(default_factory=asyncio.Event)
    _viewers: set[asyncio.Event] = field(default_factory=set)
    _update_task: "asyncio.Task[None] | None" = None

    def on_row(self, row: StepRow) -> None:
        """Record the latest step."""
        self._last_row = row
        self._mark_changed()

    def on_accepted(self, ticket: Ticket) -> None:
        """Mark the state as changed."""
        self._mark_changed()

    def on_rejected(self, error: ApiError, request_id: str, key: str) -> None:
        """Do nothing: the page does not show rejected requests."""

    def on_answer(self, route: str, status: int, request_id: str) -> None:
        """Do nothing: the page does not show responses."""

    def on_over(self, ticket: Ticket) -> None:
        """Record the attainment, latencies and images of a ticket that has ended."""
        now_s = asyncio.get_running_loop().time()
        for record in ticket.records:
            # A request that its client cancelled was neither in time nor late.
            if record.status != "cancelled" and record.slo_met is not None:
                for window in self._windows.values():
                    window.note(record.slo_met, now_s)
            if record.latency_s is not None:
                self._latencies.append(_Latency(now_s, str(record.resolution), record.latency_s, record.slo_s))
        for index, drawn in ticket.drawn.items():
            image = {
                "id": ticket.id,
                "image_index": index,
                "size": str(ticket.generation.resolution),
                "seed": ticket.generation.seeds[index],
                "latency_s": drawn.record.latency_s,
                "slo_met": drawn.record.slo_met,
            }
            self._images[ticket.key].appendleft(image)
        self._mark_changed()

    def _mark_changed(self) -> None:
        self._is_stale = True
        self._has_changed.set()

    def check_viewers(self) -> None:
        """Raise ApiError if there are too many viewers."""
        if len(self._viewers) >= _MOST_VIEWERS:
            raise ApiError(503, f"{_MOST_VIEWERS} look on already", code="too_many_viewers")

    def state(self, key: str) -> bytes:
        """Return the state for a key, as JSON: the requests of all keys, but the images of this key only."""
        return self._state_for(key, self._current_state())

    async def stream(self, key: str) -> AsyncIterator[bytes]:
        """Yield the state as server-sent events whenever it has changed, at most `UPDATES_PER_S` times a second."""
        changed = asyncio.Event()
        self._viewers.add(changed)
        if self._update_task is None or self._update_task.done():
            self._update_task = asyncio.ensure_future(self._update_viewers())
        try:
            state = self._current_state()
            while True:
                yield b"data: " + self._state_for(key, state) + b"\n\n"
                if state.is_last:
                    return
                await changed.wait()
                changed.clear()
                state = self._state
        finally:
            self._viewers.discard(changed)

    async def _update_viewers(self) -> None:
        """Update the state for all viewers, while there are any."""
        while self._viewers:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_changed.wait(), _IDLE_S)
            self._has_changed.clear()
            self._build_state()
            for changed in self._viewers:
                changed.set()
            await asyncio.sleep(1 / UPDATES_PER_S)

    def _current_state(self) -> _State:
        age_s = asyncio.get_running_loop().time() - self._state.at_s
        return self._build_state() if self._is_stale or age_s > 1 / UPDATES_PER_S else self._state

    def _build_state(self) -> _State:
        self._is_stale = False
        front_end, now_s = self.front_end, asyncio.get_running_loop().time()
        load = front_end.backend.load
        shared = {
            "model": front_end.model.name,
            "status": "draining" if front_end.is_draining else front_end.backend.health.value,
            "load": {"running": load.num_running, "waiting": load.num_waiting, "drain_s": front_end.admission.drain_s},
            "requests": [
                self._request(number, ticket, now_s)
                for number, ticket in enumerate(islice(front_end.open.values(), _MOST_SHOWN))
            ],
            "replicas": [
                {
                    "name": each.name,
                    "process_id": each.process_id,
                    "health": each.health.value,
                    "running": each.load.num_running,
                    "waiting": each.load.num_waiting,
                    "pixel_steps": each.load.pixel_steps,
                    "drawn": each.num_drawn,
                }
                for each in front_end.backend.replicas
            ],
            "plan": front_end.backend.plan,
            "batch": self._batch(),
            "attainment": {str(window): found.to_json(now_s) for window, found in self._windows.items()},
            "latencies": self._latencies_by_size(now_s),
        }
        self._state = _State(now_s, front_end.is_draining, _json(shared))
        return self._state

    def _state_for(self, key: str, state: _State) -> bytes:
        if key not in state.by_key:
            images = _json(list(self._images[key]))
            state.by_key[key] = state.shared.removesuffix(b"}") + b', "images": ' + images + b"}"
        return state.by_key[key]

    def _batch(self) -> dict[str, Any] | None:
        row = self._last_row
        if row is None or not self.front_end.backend.load.num_running:
            return None
        return {
            "step": row.step,
            "duration_s": row.duration_s,
            "resolutions": row.resolutions,
            "computed": row.resolutions if row.computed is None else row.computed,
        }

    def _request(self, number: int, ticket: Ticket, now_s: float) -> dict[str, Any]:
        generation = ticket.generation
        slo_s = generation.slo_s if ticket.slo_s is None else ticket.slo_s
        return {
            "id": ticket.numbers[0] if ticket.numbers else number,
            "size": str(generation.resolution),
            "status": ticket.status,
            "num_inference_steps": generation.num_steps,
            "steps_done": [ticket.steps_done.get(index, 0) for index in range(len(generation.seeds))],
            "waited_s": now_s - ticket.arrival_s,
            "slack_s": None if slo_s is None else ticket.arrival_s + slo_s - now_s,
        }

    def _latencies_by_size(self, now_s: float) -> dict[str, dict[str, Any]]:
        """Return by size the latencies of the last five minutes, and the SLO of the newest request."""
        found: dict[str, dict[str, Any]] = {}
        for each in self._latencies:
            if each.at_s >= now_s - _LATENCIES_S:
                of_size = found.setdefault(each.size, {"latencies_s": [], "slo_s": None})
                of_size["latencies_s"].append(round(each.latency_s, 4))
                of_size["slo_s"] = each.slo_s
        for of_size in found.values():
            del of_size["latencies_s"][:-_MOST_OF_SIZE]
        return found


def _json(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode()
