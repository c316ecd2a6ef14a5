"""Simulation of a cascade: simulated workers that switch models, under the real dispatcher, on a virtual clock.

The result is deterministic. No torch.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop
from typing import cast

from ...data.requests import Request
from ..core.request_state import RequestRecord, RequestView
from ..fleet.messages import Command, Draw, LimitBatchSize, SwitchModel
from ..scheduling.scheduler import Scheduler
from ..simulator.stage_times import StageTimes
from ..simulator.step_durations import StepDurations
from ..simulator.worker import SimulatedWorker, SimulationClock
from .controller import SAMPLE_S
from .dispatcher import Dispatcher
from .leg_model import LegModel, policy_for
from .legs import Leg
from .result import CascadeResult

_CONTROL, _SWITCHED = 4, 5
"""Events in addition to those of `SimulatedWorker`."""


@dataclass(frozen=True, slots=True)
class CascadeModel(LegModel):
    """Parameters of a cascade's model for the simulator.

    Attributes:
        durations: durations of its steps.
        times: times of the other stages; for the light model they include scoring.
        switch_s: time that a worker is away while it switches to this model.
    """

    durations: StepDurations
    times: StageTimes
    switch_s: float = 0.0

    def for_workers(self) -> LegModel:
        """Return the parameters that worker processes need."""
        return LegModel(self.num_steps, self.guidance_scale, self.batches, strength=self.strength)


class _Worker:
    """One simulated GPU, which implements `slots.Worker`."""

    def __init__(self, index: int, simulation: "_Simulation") -> None:
        self.index, self._simulation = index, simulation
        self.next_leg: Leg | None = None
        self.sim = simulation.serving(index, simulation.dispatcher.slots[index].leg)

    @property
    def num_waiting(self) -> int:
        return self.sim.scheduler.num_waiting

    def send(self, command: Command) -> None:
        """Execute a command; a cancelled request is finished, and the dispatcher ignores its record."""
        simulation = self._simulation
        simulation.touched.add(self.index)
        match command:
            case Draw(request):
                self.sim.arrive(request, RequestView.of(request), simulation.now_s)
            case LimitBatchSize(batch_size):
                self.sim.scheduler.max_batch_size = batch_size
            case SwitchModel(model):
                self.next_leg = cast(Leg, model)
                waiting = [request.request_id for request in self.sim.scheduler.withdraw_waiting()]
                simulation.dispatcher.requests_returned(self.index, waiting, simulation.now_s)

    def switch_if_idle(self, now_s: float) -> None:
        """Begin a pending switch of models if the batch has ended."""
        if self.next_leg is not None and self.sim.is_done:
            leg, self.next_leg = self.next_leg, None
            self._simulation.dispatcher.switch_started(self.index)
            self.sim = self._simulation.serving(self.index, leg)
            self._simulation.clock.push(now_s + self._simulation.models[leg].switch_s, _SWITCHED, self.index)


class _Simulation:
    """Moves the clock from event to event."""

    def __init__(
        self,
        models: dict[Leg, CascadeModel],
        confidence_of: Callable[[int], float],
        dispatcher: Dispatcher,
        num_workers: int,
    ) -> None:
        self.models, self.dispatcher = models, dispatcher
        self._confidence_of = confidence_of
        self._ended: deque[tuple[int, RequestRecord]] = deque()
        self._busy = -1
        self.clock = SimulationClock(lambda record: self._ended.append((self._busy, record)))
        self.touched: set[int] = set()
        self.now_s = 0.0
        self._workers: list[_Worker] = []
        dispatcher.start(self._new_worker, num_workers)

    def serving(self, index: int, leg: Leg | None) -> SimulatedWorker:
        """Return the simulated stages of a GPU that serves a model, or both (None).

        Both legs are then one model, and the light leg's times apply, because they include scoring.
        """
        model = self.models[leg or "light"]
        scheduler = Scheduler(policy_for(leg, self.models), on_decision=self.clock.note_decision)
        return SimulatedWorker(index, self.clock, scheduler, model.durations, model.times)

    def run(self, requests: Sequence[Request]) -> CascadeResult:
        """Serve all requests."""
        place, events, dispatcher = 0, self.clock.events, self.dispatcher
        self.clock.push(SAMPLE_S, _CONTROL, -1)
        while place < len(requests) or dispatcher.num_open:
            now_s = requests[place].arrival_s if place < len(requests) else math.inf
            self.now_s = now_s = min(now_s, events[0][0])
            while place < len(requests) and requests[place].arrival_s <= now_s:
                dispatcher.arrive(requests[place], now_s)
                place += 1
            while events and events[0][0] <= now_s:
                _, what, index, number = heappop(events)
                self._handle_event(what, index, number, now_s)
            self._settle(now_s)
        result = dispatcher.result
        result.records = sorted(result.records, key=lambda record: record.request_id)
        return result

    def _new_worker(self, index: int) -> _Worker:
        self._workers.append(_Worker(index, self))
        return self._workers[-1]

    def _handle_event(self, what: int, index: int, number: int, now_s: float) -> None:
        if what == _CONTROL:
            self.dispatcher.tick(now_s)
            self.clock.push(now_s + SAMPLE_S, _CONTROL, -1)
        elif what == _SWITCHED:
            self.dispatcher.switch_finished(index, now_s)
        else:
            self._busy = index
            if self._workers[index].sim.handle_event(what, number, now_s):
                self.touched.add(index)

    def _settle(self, now_s: float) -> None:
        """Advance all workers with new events until none is left."""
        while self.touched or self._ended:
            touched, self.touched = self.touched, set()
            for index in sorted(touched):
                worker = self._workers[index]
                self._busy = index
                worker.sim.proceed(now_s)
            while self._ended:
                index, record = self._ended.popleft()
                self.dispatcher.request_ended(index, record, self._confidence_of(record.request_id), now_s)
            for index in sorted(touched):
                self._workers[index].switch_if_idle(now_s)


def simulate_cascade(
    requests: Sequence[Request],
    models: dict[Leg, CascadeModel],
    dispatcher: Dispatcher,
    confidence_of: Callable[[int], float],
    num_workers: int,
) -> CascadeResult:
    """Serve a trace with a light and a heavy model.

    Args:
        requests: requests in order of arrival, with distinct ids.
        models: light and heavy model.
        dispatcher: a new dispatcher of these models.
        confidence_of: maps a request id to the confidence of its light image.
        num_workers: number of workers.

    Returns:
        The dispatcher's result, with its records sorted by id.

    Raises:
        UsageError: the trace repeats an id.
    """
    return _Simulation(models, confidence_of, dispatcher, num_workers).run(requests)
