"""One GPU of the simulator: a scheduler whose stages take virtual time. `simulate` passes it the events of the clock.

Stages that work at the same time share the processor: each then runs at 1 / (1 + the sum of its slowdowns by the
others) of its speed. Whenever a stage begins or ends, the end times of the others move.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappush

from ...data.requests import Request
from ...data.resolution import Resolution
from ...data.work import Work, resolution_of
from ..core.request_state import RequestRecord, RequestState, RequestView
from ..core.step_row import StepRow
from ..editing.costs import EditCosts, HeldRecords
from ..scheduling.scheduler import Scheduler
from .graphs import RecordedPasses
from .stage_times import StageTimes
from .step_durations import DECODE, PREPARE, STEP, UNDISTURBED, StepDurations

BETWEEN = 3
"""The event that ends the time between two steps. The other events are the ends of stages."""


@dataclass(slots=True)
class SimulationClock:
    """Pending events, and the results of all workers that become part of the result of `simulate`.

    `events` is a heap of (time, kind of event, index of the worker, number of the event). All events of one time are
    processed before the workers continue.
    """

    on_finish: Callable[[RequestRecord], None] | None
    events: list[tuple[float, int, int, int]] = field(default_factory=list)
    records: list[RequestRecord] = field(default_factory=list)
    num_events: int = 0
    num_decisions: int = 0
    decision_s: float = 0.0

    def push(self, time_s: float, what: int, index: int) -> int:
        """Add an event; return its number."""
        self.num_events += 1
        heappush(self.events, (time_s, what, index, self.num_events))
        return self.num_events

    def close(self, record: RequestRecord) -> None:
        """Store a final record."""
        self.records.append(record)
        if self.on_finish is not None:
            self.on_finish(record)

    def note_decision(self, decision_s: float) -> None:
        """Count a decision of the policy."""
        self.num_decisions += 1
        self.decision_s += decision_s


@dataclass(slots=True)
class _StageWork:
    """Current work of a stage.

    At `since_s`, `left_s` seconds of work remained, each of which takes `factor` seconds. `duration_s` is the total
    duration, and `event` the number of the event that ends it.
    """

    request_id: int
    start_s: float
    left_s: float
    since_s: float
    factor: float
    duration_s: float
    event: int


class SimulatedWorker:
    """One GPU with its three stages, or all GPUs together if one request runs on all of them.

    Args:
        index: number of the worker, from 0.
        clock: clock shared by all workers.
        scheduler: scheduler of this worker.
        durations, times: durations of its steps, and of the other stages.
        edits: costs of edits that read records; None: all requests are computed whole.
        keep_steps: whether `rows` are kept.

    Attributes:
        index, scheduler: as given.
        rows: rows of its steps, if they are kept.
        busy_s: seconds of denoising.
        passes: its recorded passes; None if their launching is not modelled.
    """

    def __init__(
        self,
        index: int,
        clock: SimulationClock,
        scheduler: Scheduler,
        durations: StepDurations,
        times: StageTimes,
        *,
        edits: EditCosts | None = None,
        keep_steps: bool = False,
    ) -> None:
        self.index, self.scheduler = index, scheduler
        self._durations, self._times = durations, times
        self.rows: list[StepRow] = []
        self.busy_s = 0.0
        self.passes = None if durations.graphs is None else RecordedPasses(durations.graphs)
        self._clock = clock
        self._keep_steps = keep_steps
        self._stage_works: list[_StageWork | None] = [None, None, None]
        self._is_between = False
        # Requests to prepare before the next step, if stages run between the steps.
        self._to_prepare: deque[RequestState] = deque()
        self._held_records = None if edits is None else HeldRecords(edits)
        self._num_waiting = 0
        self._ran: list[Resolution | Work] = []
        # Denoised requests that are not decoded yet, in order; the first is being decoded.
        self._decoding: dict[int, RequestState] = {}

    @property
    def is_done(self) -> bool:
        """Whether no request is waiting, or being prepared, denoised or decoded."""
        return self.scheduler.is_idle and not self._decoding and not any(self._stage_works)

    @property
    def num_requests(self) -> int:
        """Number of requests that still have steps to take."""
        return self.scheduler.num_waiting + len(self.scheduler.active)

    @property
    def pixel_steps(self) -> int:
        """Pixels times remaining steps of these requests."""
        return self.scheduler.pixel_steps

    @property
    def max_batch_size(self) -> int:
        """Largest number of requests in the batch."""
        return self.scheduler.max_batch_size

    def requests(self) -> Sequence[RequestView]:
        """Return the requests that still have steps to take: those in the batch first, then the others by arrival."""
        return self.scheduler.views

    def load_s(self, view: RequestView) -> float:
        """Return the seconds of loading the record that a request reads; 0 if it reads none or this worker holds it."""
        return 0.0 if view.record is None or self._held_records is None else self._held_records.missing_s(view.record)

    def arrive(self, request: Request, view: RequestView, now_s: float) -> None:
        """Add a request that was sent to this worker, with its view."""
        state = self.scheduler.add(request, view)
        if self._held_records is not None and request.edited is not None:
            state.record.active_share, state.record.reused = view.active_share, view.active_share < 1
        self._prepare_next(now_s)

    def handle_event(self, what: int, number: int, now_s: float) -> bool:
        """Process an event of the clock; return False if it is obsolete, as the end of its stage has moved since."""
        if what == BETWEEN:
            self._is_between = False
            return True
        work = self._stage_works[what]
        if work is None or work.event != number:
            return False
        self._stage_works[what] = None
        self._update_ends(now_s)
        if what == PREPARE:
            self.scheduler.prepared(work.request_id, now_s)
            self._prepare_next(now_s)
        elif what == DECODE:
            state = self._decoding.pop(work.request_id)
            self.scheduler.end(work.request_id, "completed", now_s)
            self._clock.close(state.record)
            self._decode_next(now_s)
        else:
            self._stepped(work, now_s)
        return True

    def proceed(self, now_s: float) -> None:
        """Ask the policy and start a step, unless one is running."""
        if self._is_between or self._stage_works[STEP] is not None:
            return
        if self._durations.is_inline and self._serve_inline(now_s):
            return
        scheduler, clock = self.scheduler, self._clock
        for state in scheduler.decide(now_s):
            clock.close(state.record)
        self._prepare_next(now_s)
        if scheduler.can_step:
            self._num_waiting = scheduler.num_waiting
            ran = self._ran = self._computed()
            is_reusing = len(ran) < len(scheduler.works)
            work_s = self._durations.undisturbed_s(ran, scheduler.changed, is_reusing=is_reusing)
            if self.passes is not None:
                work_s = self.passes.step_s(work_s, ran)
            self._begin(STEP, -1, work_s, now_s)
        elif self._durations.is_inline:
            self._serve_inline(now_s)

    def _computed(self) -> list[Resolution | Work]:
        """Return the works that the model computes in the next step, without those of reusing requests, sorted."""
        reuse, scheduler = self._durations.reuse, self.scheduler
        if reuse is None:
            return scheduler.works
        done = scheduler.num_steps
        return sorted(
            state.view.work
            for state in scheduler.active
            if not state.request.cache or reuse.is_computed(done - state.first_step, state.num_iterations)
        )

    def _stepped(self, work: _StageWork, now_s: float) -> None:
        """End a step, and queue requests that have taken their last one for decoding."""
        scheduler, clock = self.scheduler, self._clock
        self.busy_s += work.duration_s
        if self._keep_steps:
            row = (scheduler.num_steps, work.start_s, work.duration_s, scheduler.batch, self._num_waiting)
            ran = list(map(resolution_of, self._ran)) if len(self._ran) < len(scheduler.works) else None
            self.rows.append(StepRow.of(*row, computed=ran))
        for state in scheduler.stepped(now_s, work.duration_s):
            self._decoding[state.request.request_id] = state
        self._decode_next(now_s)
        if self._durations.between_s:
            self._is_between = True
            clock.push(now_s + self._durations.between_s, BETWEEN, self.index)

    def _prepare_next(self, now_s: float) -> None:
        state = self.scheduler.next_to_prepare(now_s)
        if state is not None and self._durations.is_inline:
            self._to_prepare.append(state)
        elif state is not None:
            self._prepare(state, now_s)

    def _prepare(self, state: RequestState, now_s: float) -> None:
        request = state.request
        record = state.view.record
        state.record.prepare_start_s = now_s
        read_s = 0.0 if record is None or self._held_records is None else self._held_records.read(record)
        work_s = self._times.prepare_of(request.resolution) + read_s
        self._begin(PREPARE, request.request_id, work_s, now_s)

    def _decode_next(self, now_s: float) -> None:
        if self._decoding and self._stage_works[DECODE] is None and not self._durations.is_inline:
            self._decode(now_s)

    def _decode(self, now_s: float) -> None:
        request_id, state = next(iter(self._decoding.items()))
        self._begin(DECODE, request_id, self._times.postprocess_of(state.request.resolution), now_s)

    def _serve_inline(self, now_s: float) -> bool:
        """Run the next stage between steps, prepare before decode as in the engine; return False if none has work."""
        if self._stage_works[PREPARE] is None and self._stage_works[DECODE] is None:
            if self._to_prepare:
                self._prepare(self._to_prepare.popleft(), now_s)
            elif self._decoding:
                self._decode(now_s)
            else:
                return False
        return True

    def _begin(self, stage: int, request_id: int, work_s: float, now_s: float) -> None:
        """Start work that takes a stage `work_s` seconds when it runs alone."""
        event = self._clock.push(now_s + work_s, stage, self.index)
        self._stage_works[stage] = _StageWork(request_id, now_s, work_s, now_s, 1.0, work_s, event)
        self._update_ends(now_s)

    def _update_ends(self, now_s: float) -> None:
        """Recompute the end times of all stages, after the set of working stages has changed."""
        if self._durations.slowdown == UNDISTURBED:
            return
        for stage, work in enumerate(self._stage_works):
            if work is None:
                continue
            factor, slowdown = 1.0, self._durations.slowdown[stage]
            for other, beside in enumerate(self._stage_works):
                if beside is not None and other != stage:
                    factor += slowdown[other]
            if factor == work.factor:
                continue
            # The end may be at this very moment, up to a rounding error.
            work.left_s = max(0.0, work.left_s - (now_s - work.since_s) / work.factor)
            work.since_s, work.factor = now_s, factor
            work.duration_s = (now_s - work.start_s) + work.left_s * factor
            work.event = self._clock.push(now_s + work.left_s * factor, stage, self.index)
