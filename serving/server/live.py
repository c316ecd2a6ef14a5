"""What the live page shows: the running batch, the queue, attainment, latencies, the newest images. No torch.

Everything is bounded, and put together only while somebody looks.
"""

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ..core.step_row import StepRow
from .errors import ApiError
from .front_end import FrontEnd, Watcher
from .sse import event
from .tickets import Ticket

WINDOWS_S = (60, 300, 3600)
UPDATES_PER_S, RECENT_IMAGES = 5, 24
_MOST_ENDED, _MOST_SHOWN, _MOST_VIEWERS = 20_000, 64, 32
_IDLE_S = 2.0
"""Without news the page is told that it still listens to somebody this often."""


@dataclass(frozen=True, slots=True)
class _Ended:
    at_s: float
    size: str
    latency_s: float | None
    slo_s: float | None
    is_met: bool | None


@dataclass(eq=False)
class Live(Watcher):
    """Follows a front end for those who look on.

    Attributes:
        front_end: that is followed.
    """

    front_end: FrontEnd
    _ended: deque[_Ended] = field(default_factory=lambda: deque(maxlen=_MOST_ENDED))
    _images: defaultdict[str, deque[dict[str, Any]]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=RECENT_IMAGES))
    )
    _last_row: StepRow | None = None
    _viewers: set[asyncio.Event] = field(default_factory=set)

    def on_row(self, row: StepRow) -> None:
        """A step was taken."""
        self._last_row = row
        self._tell()

    def on_accepted(self, ticket: Ticket) -> None:
        """See `Watcher`."""
        self._tell()

    def on_rejected(self, error: ApiError, request_id: str, key: str) -> None:
        """See `Watcher`."""

    def on_answer(self, route: str, status: int, request_id: str) -> None:
        """See `Watcher`."""

    def on_over(self, ticket: Ticket) -> None:
        """See `Watcher`."""
        now_s = time.time()
        for record in ticket.records:
            # What its client has taken back was neither in time nor late.
            is_met = None if record.status == "cancelled" else record.slo_met
            self._ended.append(_Ended(now_s, str(record.resolution), record.latency_s, record.slo_s, is_met))
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
        self._tell()

    def _tell(self) -> None:
        for news in self._viewers:
            news.set()

    def check_viewers(self) -> None:
        """Raise ApiError if too many look on already."""
        if len(self._viewers) >= _MOST_VIEWERS:
            raise ApiError(503, f"{_MOST_VIEWERS} look on already", code="too_many_viewers")

    def state(self, key: str) -> dict[str, Any]:
        """Everything that the page shows to who has this key, as JSON: of others only that they are there."""
        front_end, now_s = self.front_end, asyncio.get_running_loop().time()
        load = front_end.backend.load
        return {
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
            "attainment": {str(window): self._attainment(window) for window in WINDOWS_S},
            "latencies": self._latencies(),
            "images": list(self._images[key]),
        }

    async def stream(self, key: str) -> AsyncIterator[bytes]:
        """The state whenever it has changed, some times a second at the most."""
        news = asyncio.Event()
        self._viewers.add(news)
        try:
            while True:
                news.clear()
                yield event(self.state(key))
                if self.front_end.is_draining:
                    return
                await asyncio.sleep(1 / UPDATES_PER_S)
                try:
                    await asyncio.wait_for(news.wait(), _IDLE_S)
                except TimeoutError:
                    continue
        finally:
            self._viewers.discard(news)

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
        wanted = ticket.generation
        slo_s = wanted.slo_s if ticket.slo_s is None else ticket.slo_s
        return {
            "id": ticket.numbers[0] if ticket.numbers else number,
            "size": str(wanted.resolution),
            "status": ticket.status,
            "num_inference_steps": wanted.num_steps,
            "steps_done": [ticket.steps_done.get(index, 0) for index in range(len(wanted.seeds))],
            "waited_s": now_s - ticket.arrival_s,
            "slack_s": None if slo_s is None else ticket.arrival_s + slo_s - now_s,
        }

    def _attainment(self, window_s: float) -> dict[str, Any]:
        since_s = time.time() - window_s
        met = [each.is_met for each in self._ended if each.at_s >= since_s and each.is_met is not None]
        return {"share": sum(met) / len(met) if met else None, "n": len(met)}

    def _latencies(self) -> dict[str, dict[str, Any]]:
        """By size: the latencies of the last five minutes, and the SLO of the newest."""
        since_s = time.time() - WINDOWS_S[1]
        found: dict[str, dict[str, Any]] = {}
        for each in self._ended:
            if each.at_s >= since_s and each.latency_s is not None:
                of_size = found.setdefault(each.size, {"latencies_s": [], "slo_s": None})
                of_size["latencies_s"].append(round(each.latency_s, 4))
                of_size["slo_s"] = each.slo_s
        for of_size in found.values():
            del of_size["latencies_s"][:-500]
        return found
