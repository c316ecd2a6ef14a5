"""One GPU of the simulator: its prepare stage, denoise loop and postprocess stage on the virtual clock.

They follow `Engine` rule by rule. What happens next is found in the events of the clock that all GPUs share; `simulate`
hands every event to its worker, and then lets the worker go on.
"""

import time
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappush
from typing import overload

from ...data.requests import Request
from ...data.resolution import Resolution
from ..core.request_state import RequestRecord, RequestView
from ..core.step_row import StepRow
from ..scheduling.policies import WaitingQueue, check_decision
from ..scheduling.prepare_order import PrepareOrder
from .clock import PREPARED, STEPPED, SimulationClock


@dataclass(slots=True)
class _Entry:
    """A request on a worker. `first_step` and `last_step` count the worker's steps: joined before, left after."""

    request: Request
    record: RequestRecord
    view: RequestView
    is_prepared: bool = False
    first_step: int = 0
    last_step: int = 0


class _ActiveViews(Sequence[RequestView]):
    """Views of the admitted requests, made only if a policy looks at them."""

    __slots__ = ("_entries", "_num_steps")

    def __init__(self, entries: list[_Entry], num_steps: int) -> None:
        self._entries = entries
        self._num_steps = num_steps

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[RequestView]:
        for entry in self._entries:
            yield self._view(entry)

    @overload
    def __getitem__(self, index: int) -> RequestView: ...
    @overload
    def __getitem__(self, index: slice) -> list[RequestView]: ...
    def __getitem__(self, index: int | slice) -> RequestView | list[RequestView]:
        if isinstance(index, slice):
            return [self._view(entry) for entry in self._entries[index]]
        return self._view(self._entries[index])

    def _view(self, entry: _Entry) -> RequestView:
        view = entry.view
        steps_done = self._num_steps - entry.first_step if entry.last_step else 0
        if not steps_done:
            return view
        return RequestView(
            view.request_id,
            view.resolution,
            view.arrival_s,
            view.deadline_s,
            view.num_steps,
            steps_done,
            view.standalone_s,
        )


class SimulatedWorker:
    """One GPU with its three stages; all GPUs where one request runs on all of them.

    Args:
        index: its number, from 0.
        clock: what it shares with the others.
        keep_steps: whether a row is kept of each step.

    Attributes:
        pixel_steps: what is still to be denoised here: pixels times remaining steps.
        rows: of the steps, if they are kept.
        busy_s: seconds of denoising.
        num_steps: denoising iterations.
        max_prepared: largest number of prepared requests at the same time, before decoding.
    """

    def __init__(self, index: int, clock: SimulationClock, *, keep_steps: bool) -> None:
        self.index = index
        self.pixel_steps = 0
        self.rows: list[StepRow] = []
        self.busy_s = 0.0
        self.num_steps = 0
        self.max_prepared = 0
        self._clock = clock
        self._keep_steps = keep_steps
        self._order = PrepareOrder(clock.max_prepared_ahead)
        self._is_preparing = self._is_stepping = False
        self._entries: dict[int, _Entry] = {}
        self._waiting = WaitingQueue()
        # Admitted and not prepared yet; prepared since the last step.
        self._joining: dict[int, _Entry] = {}
        self._ready: list[int] = []
        self._active: list[_Entry] = []
        self._num_prepared = 0
        # Of the active batch: sorted resolutions, pixels, and the step after which the next of them leaves.
        self._batch: list[Resolution] = []
        self._batch_pixels = 0
        self._next_leave = 0
        # Whether the batch is another than in the last step.
        self._has_changed = False
        # Until when the stages beside the steps are busy; the end of the current step; what it lost to preparing that
        # began meanwhile, which the next step makes up for.
        self._decoder_free_s = self._preparer_free_s = 0.0
        self._step_s = self._step_end_s = self._late_s = 0.0

    def arrive(self, request: Request, standalone_s: float | None, now_s: float) -> None:
        """A request was sent here."""
        view = RequestView(
            request.request_id,
            request.resolution,
            request.arrival_s,
            request.deadline_s,
            request.num_inference_steps,
            0,
            standalone_s,
        )
        self._entries[request.request_id] = _Entry(request, RequestRecord.of(request), view)
        self.pixel_steps += request.resolution.pixels * request.num_inference_steps
        self._waiting.add(view)
        self._order.add(request.request_id)
        self._prepare_next(now_s)

    def prepared(self, request_id: int, now_s: float) -> None:
        """The prepare stage is done with a request."""
        self._is_preparing = False
        entry = self._entries.get(request_id)
        if entry is not None:  # else it was discarded meanwhile
            entry.record.prepare_end_s = now_s
            entry.is_prepared = True
            self._num_prepared += 1
            self.max_prepared = max(self.max_prepared, self._num_prepared)
            if request_id in self._joining:
                self._ready.append(request_id)
        self._prepare_next(now_s)

    def stepped(self, _: int, now_s: float) -> None:
        """A step has ended: those who are done leave."""
        self._is_stepping = False
        self.num_steps += 1
        self.pixel_steps -= self._batch_pixels
        clock = self._clock
        if clock.learner is not None:
            clock.learner.observe(self._batch, self._step_s)
        if self.num_steps < self._next_leave:
            return
        staying: list[_Entry] = []
        for entry in self._active:
            if entry.last_step > self.num_steps:
                staying.append(entry)
                continue
            resolution = entry.request.resolution
            self._batch.remove(resolution)
            self._batch_pixels -= resolution.pixels
            self._num_prepared -= 1
            del self._entries[entry.request.request_id]
            entry.record.denoise_end_s = self._step_end_s
            decode_s = clock.times.postprocess_of(resolution)
            self._decoder_free_s = max(self._step_end_s, self._decoder_free_s) + decode_s
            entry.record.close("completed", self._decoder_free_s)
            clock.close(entry.record)
        self._active = staying
        self._has_changed = True
        if not staying:
            self._late_s = 0.0
        self._next_leave = min((entry.last_step for entry in staying), default=0)

    def go_on(self, now_s: float) -> None:
        """Ask the policy and start a step, unless one is running."""
        if self._is_stepping:
            return
        for request_id in self._ready:
            self._activate(self._joining.pop(request_id), now_s)
        self._ready.clear()
        if self._waiting:
            self._decide(now_s)
        clock = self._clock
        if not self._active or (self._joining and clock.policy.requires_one_resolution):
            return
        durations = clock.durations
        step_s = durations.undisturbed_s(self._batch, is_first=self._has_changed) + self._late_s
        step_s = durations.stretched_s(step_s, self._preparer_free_s - now_s, self._decoder_free_s - now_s)
        self._is_stepping, self._has_changed, self._late_s = True, False, 0.0
        self._step_s, self._step_end_s = step_s, now_s + step_s
        self.busy_s += step_s
        heappush(clock.events, (now_s + step_s + durations.between_s, STEPPED, self.index, -1))
        if self._keep_steps:
            resolutions: dict[str, int] = {}
            for resolution in self._batch:
                resolutions[str(resolution)] = resolutions.get(str(resolution), 0) + 1
            num_waiting = len(self._waiting) + len(self._joining)
            self.rows.append(StepRow(self.num_steps, now_s, step_s, len(self._active), num_waiting, resolutions))

    def _decide(self, now_s: float) -> None:
        clock = self._clock
        policy = clock.policy
        entries = [*self._active, *self._joining.values()] if self._joining else self._active
        views = _ActiveViews(entries, self.num_steps)
        start = time.perf_counter()
        decision = policy.decide(now_s, self._waiting, views, clock.max_batch_size, clock.latency)
        clock.decision_s += time.perf_counter() - start
        clock.num_decisions += 1
        check_decision(
            decision,
            self._waiting,
            views,
            clock.max_batch_size,
            requires_one_resolution=policy.requires_one_resolution,
        )
        for request_id in decision.admit:
            self._waiting.remove(request_id)
            self._order.demand(request_id)
            entry = self._entries[request_id]
            if entry.is_prepared:
                self._activate(entry, now_s)
            else:
                self._joining[request_id] = entry
        for request_id, reason in decision.drop:
            self._waiting.remove(request_id)
            self._order.forget(request_id)
            entry = self._entries.pop(request_id)
            self._num_prepared -= entry.is_prepared
            self.pixel_steps -= entry.request.resolution.pixels * entry.request.num_inference_steps
            entry.record.close("discarded", now_s, reason)
            clock.close(entry.record)
        if decision.admit or decision.drop:
            self._prepare_next(now_s)

    def _activate(self, entry: _Entry, now_s: float) -> None:
        entry.record.admitted_s = now_s
        entry.first_step = self.num_steps
        entry.last_step = entry.first_step + entry.request.num_inference_steps
        self._active.append(entry)
        self._has_changed = True
        self._next_leave = min(self._next_leave, entry.last_step) if self._next_leave else entry.last_step
        insort(self._batch, entry.request.resolution)
        self._batch_pixels += entry.request.resolution.pixels

    def _prepare_next(self, now_s: float) -> None:
        if self._is_preparing:
            return
        request_id = self._order.take()
        if request_id is None:
            return
        self._is_preparing = True
        entry = self._entries[request_id]
        entry.record.prepare_start_s = now_s
        prepare_s = self._clock.times.prepare_of(entry.request.resolution)
        self._preparer_free_s = now_s + prepare_s
        if self._is_stepping and now_s < self._step_end_s:
            beside_s = min(self._preparer_free_s, self._step_end_s) - now_s
            self._late_s += self._clock.durations.lost_s(beside_s)
        heappush(self._clock.events, (now_s + prepare_s, PREPARED, self.index, request_id))
