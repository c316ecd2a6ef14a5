"""The simulator: the engine's stages and the same policy objects on a virtual clock, on any number of GPUs.

A step lasts as long as a predictor says, preparing and decoding as long as `StageTimes` says; nothing else takes time,
unless `StepDurations` tells more than the predictor that policies are given.
Every GPU has its own prepare stage, denoise loop and postprocess stage, which follow `Engine` rule by rule. Several
GPUs serve in data parallel: a request goes, when it arrives, to the GPU with the fewest pixels under way (PatchedServe
section 8.1), counted in pixel-steps: pixels times remaining steps, over all requests that were sent there and have not
left the denoise stage. Equal ones: to the first GPU. It stays there.

The same arguments always give the same result.
"""

import time
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import overload

from ..data.checks import require_counts
from ..data.errors import UsageError
from ..data.requests import Request
from ..data.resolution import Resolution
from .lifecycle import RequestRecord, RequestView
from .policies import (
    DistriFusionFcfsPolicy,
    DistriFusionLatency,
    LearningPredictor,
    Policy,
    StepLatencyPredictor,
    WaitingQueue,
    check_decision,
    request_under,
)
from .prepare_order import PrepareOrder
from .stage_times import StageTimes
from .step_durations import StepDurations
from .step_latency import MemoisedLatency
from .step_row import StepRow

# What happens to a worker. At equal times all of it happens before the worker goes on.
_PREPARED, _STEPPED = 0, 1


@dataclass(slots=True)
class SimulationResult:
    """What a simulation leaves.

    Attributes:
        records: one record per request, by id, all in a final status.
        duration_s: from 0 until the last request ended, on the virtual clock.
        steps: one row per denoising iteration of the first GPU, if they were asked for.
        gpu_of: the GPU of each request, by id; 0 for all where one request runs on all GPUs.
        busy_s: seconds of denoising of each GPU.
        num_steps: denoising iterations of all GPUs.
        max_prepared: largest number of prepared requests on one GPU at the same time, before decoding.
        num_decisions: how often the policy was asked.
        decision_s: how long it took in all, on the real clock: the only field that differs between equal runs.
    """

    records: list[RequestRecord]
    duration_s: float
    steps: list[StepRow]
    gpu_of: dict[int, int]
    busy_s: list[float]
    num_steps: int
    max_prepared: int
    num_decisions: int
    decision_s: float = field(compare=False)


def simulate(
    requests: Sequence[Request],
    policy: Policy,
    predictor: StepLatencyPredictor,
    *,
    max_batch_size: int = 16,
    num_gpus: int = 1,
    times: StageTimes | None = None,
    durations: StepDurations | None = None,
    max_prepared_ahead: int | None = None,
    standalone_s: Callable[[Request], float | None] | None = None,
    keep_steps: bool = False,
    on_finish: Callable[[RequestRecord], None] | None = None,
) -> SimulationResult:
    """Serve a trace on the virtual clock.

    Args:
        requests: the trace, in order of arrival, with ids that differ.
        policy: any policy; `distrifusion-fcfs` makes one worker of all GPUs.
        predictor: seconds of one step of a batch, on one GPU, as policies are told. It may not change meanwhile, unless
            it learns (`LearningPredictor`): then it is told every step, as in `Engine`.
        max_batch_size: largest number of requests in the batch of one GPU.
        num_gpus: number of GPUs, all alike.
        times: seconds of the other stages; None: none.
        durations: how long steps really last, where that is not what `predictor` says.
        max_prepared_ahead: as in `Engine`.
        standalone_s: latency of a request when served alone, for policies that ask for it.
        keep_steps: whether the result holds the steps of the first GPU.
        on_finish: called with each record when it becomes final.

    Raises:
        UsageError: the trace is empty or repeats an id, or a number is below 1.
        ValueError: the trace is not in order of arrival, or the predictor gives no positive number.
    """
    if not requests:
        raise UsageError("the trace is empty, but it must hold at least one request")
    require_counts({"max batch size": max_batch_size, "number of GPUs": num_gpus})
    # One that learns changes, so that nothing it says is remembered.
    learner = predictor if isinstance(predictor, LearningPredictor) else None
    latency: StepLatencyPredictor = learner or MemoisedLatency(predictor)
    if durations is None:
        durations = StepDurations(latency)
    else:
        durations = replace(
            durations,
            steady=MemoisedLatency(durations.steady),
            first=None if durations.first is None else MemoisedLatency(durations.first),
        )
    num_workers = num_gpus
    if isinstance(policy, DistriFusionFcfsPolicy):
        latency, learner, num_workers = MemoisedLatency(DistriFusionLatency(predictor, num_gpus)), None, 1
        durations = replace(
            durations, steady=MemoisedLatency(DistriFusionLatency(durations.steady, num_gpus)), first=None
        )
    clock = _Clock(
        policy,
        latency,
        learner,
        durations,
        max_batch_size,
        times or StageTimes(),
        max_prepared_ahead or 2 * max_batch_size,
        on_finish,
    )
    workers = [_Worker(index, clock, keep_steps=keep_steps and index == 0) for index in range(num_workers)]
    gpu_of: dict[int, int] = {}
    events = clock.events
    place, last_s = 0, 0.0
    while place < len(requests) or events:
        now_s = requests[place].arrival_s if place < len(requests) else events[0][0]
        if events and events[0][0] < now_s:
            now_s = events[0][0]
        touched: set[int] = set()
        while place < len(requests) and requests[place].arrival_s <= now_s:
            request = requests[place]
            if request.arrival_s < last_s:
                raise ValueError(f"request {request.request_id} arrives before the one before it")
            if request.request_id in gpu_of:
                raise UsageError(f"request id {request.request_id} is used twice")
            last_s = request.arrival_s
            worker = min(workers, key=lambda worker: worker.pixel_steps)
            gpu_of[request.request_id] = worker.index
            worker.arrive(request, None if standalone_s is None else standalone_s(request), now_s)
            touched.add(worker.index)
            place += 1
        while events and events[0][0] <= now_s:
            _, kind, index, request_id = heappop(events)
            (workers[index].prepared if kind == _PREPARED else workers[index].stepped)(request_id, now_s)
            touched.add(index)
        for index in sorted(touched):
            workers[index].go_on(now_s)
    return SimulationResult(
        records=sorted(clock.records, key=lambda record: record.request_id),
        duration_s=max(record.finish_s or 0.0 for record in clock.records),
        steps=workers[0].rows,
        gpu_of=gpu_of,
        busy_s=[worker.busy_s for worker in workers],
        num_steps=sum(worker.num_steps for worker in workers),
        max_prepared=max(worker.max_prepared for worker in workers),
        num_decisions=clock.num_decisions,
        decision_s=clock.decision_s,
    )


class _Clock:
    """What all workers share: how they work, what will happen, what is written down."""

    def __init__(
        self,
        policy: Policy,
        latency: StepLatencyPredictor,
        learner: LearningPredictor | None,
        durations: StepDurations,
        max_batch_size: int,
        times: StageTimes,
        max_prepared_ahead: int,
        on_finish: Callable[[RequestRecord], None] | None,
    ) -> None:
        self.policy = policy
        self.latency = latency
        self.learner = learner
        self.durations = durations
        self.max_batch_size = max_batch_size
        self.times = times
        self.max_prepared_ahead = max_prepared_ahead
        self.on_finish = on_finish
        # Time, what happens, number of the worker, id of the request (-1: of none).
        self.events: list[tuple[float, int, int, int]] = []
        self.records: list[RequestRecord] = []
        self.num_decisions = 0
        self.decision_s = 0.0

    def close(self, record: RequestRecord) -> None:
        self.records.append(record)
        if self.on_finish is not None:
            self.on_finish(record)


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


class _Worker:
    """One GPU with its three stages."""

    def __init__(self, index: int, clock: _Clock, *, keep_steps: bool) -> None:
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
        request = request_under(self._clock.policy, request)
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
        heappush(clock.events, (now_s + step_s + durations.between_s, _STEPPED, self.index, -1))
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
        heappush(self._clock.events, (now_s + prepare_s, _PREPARED, self.index, request_id))
