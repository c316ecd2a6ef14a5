"""The dispatcher of a cascade, shared by the simulator and the fleet of processes. No torch.

The dispatcher has no clock: callers report every event with its time, and it sends commands to workers. It sends each
request to a worker of the light model, or directly to the heavy model if the plan routes requests by a share. A light
image whose confidence is below the threshold at the time of scoring is deferred to the heavy model with its deadline
unchanged. Every `SAMPLE_S` the controller may make a new plan; workers that switch models finish their batch first.

Source: DiffServe sections 3.1 and 3.3.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from ...data.errors import UsageError
from ...data.requests import Request, TracedEdit
from ..core.request_state import RequestRecord, RequestView, Status
from ..core.retries import MAX_DEATHS
from ..fleet.book import Workload
from ..fleet.messages import Cancel, Draw, LimitBatchSize, SwitchModel
from ..scheduling.routers import Router
from .aimd import Aimd
from .controller import Controller
from .deferral import threshold_at
from .leg_model import LegModel
from .legs import LEGS, Leg
from .problem import AllocationPlan
from .result import CascadeResult, LegRow, PlanRow
from .slots import Worker, WorkerSlot

OnLate = Literal["discard", "light"]
Batching = Literal["plan", "aimd"]
SKIPPED_FROM = 0.98
"""Share of deferred requests from which light images are skipped, with `skip_light`."""


class Dispatcher:
    """Assigns requests to workers, and workers to models.

    Args:
        models: light and heavy model.
        controller: makes the plans.
        router: chooses workers.
        direct: maps a request id to a number from 0 to 1. If the plan routes requests by a share, a request whose
            number is below the share goes to the heavy model directly.
        on_late: whether a deferred request that the heavy model cannot finish in time is discarded, or completes with
            its light image.
        batching: whether plans or `Aimd` set the batch sizes.
        on_end: called with each record when it is final.
        skip_light: whether requests go to the heavy model directly while the plan defers nearly all of them.
        costs: costs of heavy images by resolution, for thresholds that depend on the cost; see `threshold_at`.
        result: collects records; None for a result that keeps all of them.

    Attributes:
        result: records, rows and plans so far.
        slots: the workers.
    """

    def __init__(
        self,
        models: Mapping[Leg, LegModel],
        controller: Controller,
        router: Router,
        direct: Callable[[int], float],
        on_late: OnLate,
        batching: Batching,
        on_end: Callable[[RequestRecord], None] = lambda record: None,
        *,
        skip_light: bool = False,
        costs: Mapping[str, float] | None = None,
        result: CascadeResult | None = None,
    ) -> None:
        self._models, self._controller, self._router, self._direct = models, controller, router, direct
        self._on_late, self._on_end, self._skip_light = on_late, on_end, skip_light
        self._costs = costs or {}
        self._limits = {leg: Aimd(models[leg].batches.batch_sizes) for leg in LEGS} if batching == "aimd" else None
        self._requests: dict[int, Request] = {}
        # Requests that wait because their model has no worker.
        self._queue: dict[Leg, deque[Request]] = {leg: deque() for leg in LEGS}
        # Records of light images whose requests were deferred.
        self._light_records: dict[int, RequestRecord] = {}
        # Confidences and thresholds of light images.
        self._scores: dict[int, tuple[float, float]] = {}
        # Workers that have died with a request, by its id and the model.
        self._deaths: Counter[tuple[int, Leg]] = Counter()
        self.result = result or CascadeResult()
        self.slots: list[WorkerSlot] = []

    @property
    def plan(self) -> AllocationPlan:
        """The current plan."""
        return self._controller.plan

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def num_queued(self) -> int:
        """Open requests that wait because their model has no worker."""
        return sum(map(len, self._queue.values()))

    def start(self, make: Callable[[int], Worker], num_workers: int) -> None:
        """Make the workers, each for the model (`WorkerSlot.leg`) that the first plan assigns to it."""
        plan = self._controller.plan
        for index in range(num_workers):
            leg: Leg | None = None if plan.is_shared else "light" if index < plan.num_light else "heavy"
            self.slots.append(slot := WorkerSlot(index, None, leg))
            slot.worker = make(index)
        self._apply(plan, 0.0)

    def arrive(self, request: Request, now_s: float) -> None:
        """Accept a request. Raises UsageError: an open request has the same id."""
        if request.request_id in self._requests:
            raise UsageError(f"request id {request.request_id} is used twice")
        self._requests[request.request_id] = request
        self._controller.arrived()
        plan = self._controller.plan
        if request.fallback == "never":
            # A light image must not be its answer.
            is_heavy = True
        elif plan.threshold is None:
            is_heavy = self._direct(request.request_id) < plan.share
        else:
            is_heavy = self._skip_light and plan.share >= SKIPPED_FROM
        self._send("heavy" if is_heavy else "light", request, now_s)

    def tick(self, now_s: float) -> None:
        """Discard late requests, sample the queues and apply a new plan, if any. Called every `SAMPLE_S`."""
        self._discard_late(now_s)
        queues: dict[Leg, int] = {leg: len(self._queue[leg]) for leg in LEGS}
        for slot in self.slots:
            queues[slot.leg or "light"] += slot.num_waiting
        if (plan := self._controller.sample(now_s, queues)) is not None:
            self._apply(plan, now_s)

    def request_ended(self, index: int, record: RequestRecord, confidence: float | None, now_s: float) -> None:
        """Handle a request that has ended on a worker.

        Args:
            index: the worker.
            record: what the worker recorded for the request.
            confidence: score of its image; None if it was not scored.
            now_s: the current time.
        """
        slot = self.slots[index]
        assignment = slot.unassign(record.request_id)
        if assignment is None or record.request_id not in self._requests:
            return  # no longer assigned to this worker, for example after a cancellation
        request, (leg, start_s) = self._requests[record.request_id], assignment
        threshold = self._controller.plan.threshold if leg == "light" else None
        is_deferred = False
        if threshold is None or record.status != "completed":
            confidence = threshold = None
        else:
            assert confidence is not None, "light images are scored"
            cost = self._costs.get(str(request.resolution), 1.0)
            threshold = threshold_at(threshold, cost)
            self._controller.scored(confidence, cost)
            self._scores[record.request_id] = confidence, threshold
            # NaN counts as less than any threshold.
            is_deferred = threshold > 0 and not confidence >= threshold
        self.result.legs.append(
            LegRow(record.request_id, leg, index, start_s, now_s, record.status, confidence, threshold, is_deferred)
        )
        self._note_lateness(leg, request, record, now_s)
        if is_deferred:
            self.result.wasted_s += now_s - start_s
            self._light_records[record.request_id] = record
            self._send("heavy", request, now_s)
        elif record.status == "discarded":
            self._refuse(request, leg, now_s, record.reason)
        else:
            self._finish(request, record.status, now_s, record.reason, leg, record)

    def cancel(self, request_id: int, now_s: float, reason: str) -> None:
        """Cancel a request on its worker or in its queue; ids of requests that are not open are ignored."""
        request = self._requests.get(request_id)
        if request is None:
            return
        for slot in self.slots:
            if slot.unassign(request_id) is not None and slot.worker is not None:
                slot.worker.send(Cancel(request_id, reason))
        for queue in self._queue.values():
            for waiting in [each for each in queue if each.request_id == request_id]:
                queue.remove(waiting)
        self._finish(request, "cancelled", now_s, reason, None)

    def requests_returned(self, index: int, request_ids: Sequence[int], now_s: float) -> None:
        """Send the queue of a worker that is about to switch models to other workers."""
        slot = self.slots[index]
        for request_id in request_ids:
            assignment = slot.unassign(request_id)
            if assignment is not None and request_id in self._requests:
                self._send(assignment.leg, self._requests[request_id], now_s)

    def switch_started(self, index: int) -> None:
        """Record that a worker has finished its batch and starts to switch models."""
        slot = self.slots[index]
        if slot.next_leg is not None:
            slot.leg = slot.next_leg
        slot.is_away = True
        self.result.num_switches += 1

    def switch_finished(self, index: int, now_s: float, worker: Worker | None = None) -> None:
        """Record that a worker serves again; `worker` replaces the previous object, if given."""
        slot = self.slots[index]
        slot.worker = worker or slot.worker
        slot.next_leg, slot.is_away, slot.work.max_batch_size = None, False, 0
        self._limit(slot)
        self._serve_queue(now_s)

    def worker_died(self, index: int, now_s: float, reason: str) -> None:
        """Handle the death of a worker: retry its requests on other workers and make a plan for the remaining ones.

        A request fails if `MAX_DEATHS` workers have died while they drew its image with the same model.
        """
        slot = self.slots[index]
        slot.worker, slot.is_away, slot.work = None, True, Workload()
        slot.leg, slot.next_leg = slot.target_leg, None
        self.result.num_lost += 1
        lost_assignments, slot.assignments = slot.assignments, {}
        for request_id, assignment in lost_assignments.items():
            request = self._requests.get(request_id)
            if request is None:
                continue
            self._deaths[request_id, assignment.leg] += 1
            if self._deaths[request_id, assignment.leg] < MAX_DEATHS:
                self._send(assignment.leg, request, now_s)
            else:
                self._finish(request, "failed", now_s, reason, assignment.leg)
        self._replan(now_s)

    def worker_restarted(self, index: int, now_s: float, worker: Worker) -> None:
        """Record that a worker that had died was restarted, and make a new plan."""
        self.switch_finished(index, now_s, worker)
        self._replan(now_s)

    def end_all(self, status: Status, now_s: float, reason: str) -> None:
        """Close all open requests with this status."""
        for request in list(self._requests.values()):
            self._finish(request, status, now_s, reason, None)

    def _replan(self, now_s: float) -> None:
        alive = sum(slot.worker is not None for slot in self.slots)
        if alive:
            self._apply(self._controller.replan(alive), now_s)

    def _note_lateness(self, leg: Leg, request: Request, record: RequestRecord, now_s: float) -> None:
        if self._limits is None:
            return
        is_late = record.status != "completed" or (request.deadline_s or math.inf) < now_s
        began_s = now_s if record.admitted_s is None else record.admitted_s
        self._limits[leg].note(now_s, began_s, was_in_time=not is_late)
        for slot in self.slots:
            self._limit(slot)

    def _send(self, leg: Leg, request: Request, now_s: float) -> None:
        """Send a request to a worker of a model; queue it if no worker accepts requests for that model now."""
        slots = [slot for slot in self.slots if slot.leg in (leg, None) and slot.is_accepting]
        if not slots:
            self._queue[leg].append(request)
            return
        model = self._models[leg]
        self._controller.sent(leg)
        left_s = None if request.deadline_s is None else max(request.deadline_s - now_s, 1e-9)
        own = replace(
            request,
            num_inference_steps=model.num_steps,
            guidance_scale=model.guidance_scale,
            arrival_s=now_s,
            slo_s=left_s,
        )
        if leg == "heavy" and self._reuses_light(request.request_id):
            own = replace(own, traced=TracedEdit("light", "all", 1.0, model.strength))
        view = RequestView.of(own)
        slot = slots[self._router.choose(view, [each.work for each in slots])]
        slot.assign(leg, view)
        assert slot.worker is not None
        slot.worker.send(Draw(own))

    def _reuses_light(self, request_id: int) -> bool:
        """Return whether the heavy model starts from the light image of this request."""
        return self._models["heavy"].strength < 1 and request_id in self._light_records

    def _serve_queue(self, now_s: float) -> None:
        for leg in LEGS:
            waiting, self._queue[leg] = self._queue[leg], deque()
            for request in waiting:
                self._send(leg, request, now_s)

    def _discard_late(self, now_s: float) -> None:
        """Refuse queued requests that no worker of their model could finish in time any more."""
        for leg in LEGS:
            waiting, self._queue[leg] = self._queue[leg], deque()
            for request in waiting:
                least_s = self._models[leg].batch_s(request.resolution, 1)
                if request.deadline_s is None or now_s + least_s <= request.deadline_s:
                    self._queue[leg].append(request)
                else:
                    self._refuse(request, leg, now_s, f"no worker has the {leg} model")

    def _refuse(self, request: Request, leg: Leg, now_s: float, reason: str | None) -> None:
        """End a request that a model cannot finish in time: discard it, or complete it with its light image."""
        if leg == "heavy" and self._on_late == "light" and (light := self._light_records.get(request.request_id)):
            self._finish(request, "completed", now_s, None, "light", light)
        else:
            self._finish(request, "discarded", now_s, reason, leg)

    def _finish(
        self,
        request: Request,
        status: Status,
        now_s: float,
        reason: str | None,
        leg: Leg | None,
        drawn: RequestRecord | None = None,
    ) -> None:
        """Close a request; `drawn` is the record of its image."""
        record = RequestRecord.of(request)
        if leg is not None:
            record.num_inference_steps = self._models[leg].num_steps
            record.guidance_scale = self._models[leg].guidance_scale
        if leg == "heavy" and self._reuses_light(request.request_id):
            record.strength = self._models[leg].strength
        confidence, record.threshold = self._scores.pop(request.request_id, (None, None))
        record.confidence = None if confidence is None or math.isnan(confidence) else confidence
        record.served_by = leg if status == "completed" else None
        if drawn is not None:
            record.prepare_start_s, record.prepare_end_s = drawn.prepare_start_s, drawn.prepare_end_s
            record.admitted_s, record.denoise_end_s = drawn.admitted_s, drawn.denoise_end_s
            record.image_path, record.steps_reused = drawn.image_path, drawn.steps_reused
        record.close(status, now_s, reason)
        del self._requests[request.request_id]
        self._light_records.pop(request.request_id, None)
        for each in LEGS:
            self._deaths.pop((request.request_id, each), None)
        self.result.records.append(record)
        self._on_end(record)

    def _apply(self, plan: AllocationPlan, now_s: float) -> None:
        """Switch workers to the models that the plan gives them; those with the least pending work switch first."""
        controller = self._controller
        self.result.plans.append(PlanRow(now_s, plan, controller.observed, controller.solve_s))
        wanted: dict[Leg, int] = {"light": plan.num_light, "heavy": plan.num_heavy}
        for leg, other in zip(LEGS, reversed(LEGS), strict=True):
            num_bound = sum(slot.target_leg == leg for slot in self.slots if slot.worker is not None)
            free = [slot for slot in self.slots if slot.leg == leg and slot.is_accepting]
            for slot in sorted(free, key=lambda slot: slot.work.pixel_steps)[: max(0, num_bound - wanted[leg])]:
                slot.next_leg = other
                assert slot.worker is not None
                slot.worker.send(SwitchModel(other))
        for slot in self.slots:
            self._limit(slot)

    def _limit(self, slot: WorkerSlot) -> None:
        """Send a worker its batch size, if it has changed."""
        plan = self._controller.plan
        size = plan.heavy_batch if slot.leg == "heavy" else plan.light_batch
        if self._limits is not None and slot.leg is not None:
            size = self._limits[slot.leg].batch_size
        if slot.is_accepting and size and size != slot.work.max_batch_size:
            assert slot.worker is not None
            slot.work.max_batch_size = size
            slot.worker.send(LimitBatchSize(size))
