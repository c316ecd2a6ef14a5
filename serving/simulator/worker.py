"""One GPU of the simulator: a scheduler whose stages take virtual time. `simulate` hands it the events of the clock."""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappush

from ...data.requests import Request
from ..core.request_state import RequestRecord
from ..core.step_row import StepRow
from ..scheduling.scheduler import Scheduler
from .stage_times import StageTimes
from .step_durations import StepDurations

# What happens to a worker. At equal times all of it happens before the worker continues.
PREPARED, STEPPED = 0, 1


@dataclass(slots=True)
class SimulationClock:
    """The events to come, and what all workers share: the arguments of `simulate` and parts of its result.

    `events` is a heap of (time, what happens, index of the worker, id of the request or -1).
    """

    durations: StepDurations
    times: StageTimes
    on_finish: Callable[[RequestRecord], None] | None
    events: list[tuple[float, int, int, int]] = field(default_factory=list)
    records: list[RequestRecord] = field(default_factory=list)
    num_decisions: int = 0
    decision_s: float = 0.0

    def close(self, record: RequestRecord) -> None:
        """Keep a record that is final."""
        self.records.append(record)
        if self.on_finish is not None:
            self.on_finish(record)

    def note_decision(self, decision_s: float) -> None:
        """Count a decision of the policy."""
        self.num_decisions += 1
        self.decision_s += decision_s


class SimulatedWorker:
    """One GPU with its three stages; all GPUs where one request runs on all of them.

    Attributes:
        index: its number, from 0.
        scheduler: its own; the clock is shared.
        rows: of its steps, if they are kept.
        busy_s: seconds of denoising.
    """

    def __init__(self, index: int, clock: SimulationClock, scheduler: Scheduler, *, keep_steps: bool) -> None:
        self.index = index
        self.scheduler = scheduler
        self.rows: list[StepRow] = []
        self.busy_s = 0.0
        self._clock = clock
        self._keep_steps = keep_steps
        self._is_stepping = False
        # Until when the stages beside the steps are busy; the end of the current step; what it lost to preparing that
        # began meanwhile, which the next step makes up for.
        self._decoder_free_s = self._preparer_free_s = 0.0
        self._step_s = self._step_end_s = self._late_s = 0.0

    def arrive(self, request: Request, standalone_s: float | None, now_s: float) -> None:
        """A request was sent here."""
        self.scheduler.add(request, standalone_s)
        self._prepare_next(now_s)

    def prepared(self, request_id: int, now_s: float) -> None:
        """The prepare stage is done with a request."""
        self.scheduler.prepared(request_id, now_s)
        self._prepare_next(now_s)

    def stepped(self, _: int, now_s: float) -> None:
        """The time of a step and what follows it are over: requests that have taken their last step are decoded."""
        scheduler, clock = self.scheduler, self._clock
        self._is_stepping = False
        for state in scheduler.stepped(self._step_end_s, self._step_s):
            decode_s = clock.times.postprocess_of(state.request.resolution)
            self._decoder_free_s = max(self._step_end_s, self._decoder_free_s) + decode_s
            scheduler.end(state.request.request_id, "completed", self._decoder_free_s)
            clock.close(state.record)
        if not scheduler.active:
            self._late_s = 0.0

    def proceed(self, now_s: float) -> None:
        """Ask the policy and start a step, unless one is running."""
        if self._is_stepping:
            return
        scheduler, clock = self.scheduler, self._clock
        for state in scheduler.decide(now_s):
            clock.close(state.record)
        self._prepare_next(now_s)
        if not scheduler.can_step:
            return
        durations, batch = clock.durations, scheduler.batch
        step_s = durations.undisturbed_s(batch, is_first=scheduler.has_changed) + self._late_s
        step_s = durations.stretched_s(step_s, self._preparer_free_s - now_s, self._decoder_free_s - now_s)
        self._is_stepping, self._late_s = True, 0.0
        self._step_s, self._step_end_s = step_s, now_s + step_s
        self.busy_s += step_s
        heappush(clock.events, (now_s + step_s + durations.between_s, STEPPED, self.index, -1))
        if self._keep_steps:
            self.rows.append(StepRow.of(scheduler.num_steps, now_s, step_s, batch, scheduler.num_waiting))

    def _prepare_next(self, now_s: float) -> None:
        state = self.scheduler.next_to_prepare(now_s)
        if state is None:
            return
        prepare_s = self._clock.times.prepare_of(state.request.resolution)
        self._preparer_free_s = now_s + prepare_s
        if self._is_stepping and now_s < self._step_end_s:
            beside_s = min(self._preparer_free_s, self._step_end_s) - now_s
            self._late_s += self._clock.durations.lost_s(beside_s)
        heappush(self._clock.events, (now_s + prepare_s, PREPARED, self.index, state.request.request_id))
