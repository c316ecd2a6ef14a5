"""The dispatcher alone: workers that die, restart or are all gone, and the requests that they had."""

from collections.abc import Sequence

import pytest

from patchedserve.data.requests import Fallback, Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.cascade.allocators import Observations
from patchedserve.serving.cascade.controller import Controller
from patchedserve.serving.cascade.dispatcher import Dispatcher
from patchedserve.serving.cascade.leg_model import LegModel
from patchedserve.serving.cascade.legs import Leg
from patchedserve.serving.cascade.problem import AllocationPlan, ModelTimes
from patchedserve.serving.cascade.result import CascadeResult
from patchedserve.serving.core.request_state import RequestRecord
from patchedserve.serving.fleet.messages import Cancel, Command, Draw, LimitBatchSize, SwitchModel
from patchedserve.serving.scheduling.routers import FewestPixels

SIZE = Resolution(64, 64)
TIMES = ModelTimes((1, 2), (10.0, 12.0), {str(SIZE): (0.1, 0.15)})
MODELS: dict[Leg, LegModel] = {"light": LegModel(2, 0.0, TIMES), "heavy": LegModel(20, 4.0, TIMES)}


class Idle:
    """Worker that only records its calls."""

    def __init__(self, index: int, leg: Leg | None) -> None:
        self.index, self.leg, self.num_waiting = index, leg, 0
        self.taken: list[Request] = []
        self.changes: list[str] = []
        self.cancelled: list[int] = []
        self.batch_size = 0

    def send(self, command: Command) -> None:
        match command:
            case Draw(request):
                self.taken.append(request)
            case Cancel(request_id):
                self.cancelled.append(request_id)
            case LimitBatchSize(batch_size):
                self.batch_size = batch_size
            case SwitchModel(model):
                self.changes.append(model)


class DispatcherHarness:
    """Dispatcher over idle workers, with plans by number of live workers."""

    def __init__(
        self,
        plans: Sequence[AllocationPlan],
        *,
        models: dict[Leg, LegModel] = MODELS,
        skip_light: bool = False,
        result: CascadeResult | None = None,
    ) -> None:
        self.observed: list[Observations] = []
        self.workers: dict[int, Idle] = {}
        by_number = {plan.num_light + plan.num_heavy: plan for plan in plans}
        most = max(by_number)

        def allocate(observed: Observations) -> AllocationPlan:
            self.observed.append(observed)
            return by_number[observed.num_workers or most]

        self.dispatcher = Dispatcher(
            models,
            Controller(allocate, [0.5]),
            FewestPixels(),
            lambda request_id: 0.0,
            "discard",
            "plan",
            skip_light=skip_light,
            result=result,
        )
        self.dispatcher.start(self.make, most)

    def make(self, index: int) -> Idle:
        self.workers[index] = Idle(index, self.dispatcher.slots[index].leg)
        return self.workers[index]

    def ask(self, number: int, now_s: float = 0.0, fallback: Fallback = "light") -> None:
        request = Request(number, "a hat", SIZE, 20, arrival_s=now_s, slo_s=30.0, fallback=fallback)
        self.dispatcher.arrive(request, now_s)

    def end(self, index: int, number: int, now_s: float, confidence: float | None) -> None:
        record = RequestRecord.of(next(each for each in self.workers[index].taken if each.request_id == number))
        record.close("completed", now_s)
        self.dispatcher.request_ended(index, record, confidence, now_s)


THREE, TWO, ONE = (
    AllocationPlan(2, 1, 2, 1, 0.5, 0.5),
    AllocationPlan(1, 1, 2, 1, 0.4, 0.4),
    AllocationPlan(1, 0, 2, 0, 0.0, 0.0),
)


def test_deferred_request_keeps_its_deadline_and_batch_limits_are_sent() -> None:
    harness = DispatcherHarness([THREE])
    assert [harness.workers[index].batch_size for index in range(3)] == [2, 2, 1]
    harness.ask(0)
    harness.ask(1)
    assert [len(harness.workers[index].taken) for index in range(3)] == [1, 1, 0]
    harness.end(0, 0, 1.0, 0.4)
    harness.end(1, 1, 1.0, 0.5)
    heavy = harness.workers[2].taken[0]
    assert (heavy.num_inference_steps, heavy.arrival_s, heavy.deadline_s) == (20, 1.0, 30.0)
    # Each model has its own guidance scale, too.
    assert (harness.workers[0].taken[0].guidance_scale, heavy.guidance_scale) == (0.0, 4.0)
    assert harness.dispatcher.result.served_by() == {1: "light"}
    assert harness.dispatcher.result.wasted_s == 1.0
    harness.end(2, 0, 5.0, None)
    assert harness.dispatcher.result.served_by() == {1: "light", 0: "heavy"}
    assert harness.dispatcher.num_open == 0
    # Records state why a request was routed as it was.
    records = {record.request_id: record for record in harness.dispatcher.result.records}
    assert (records[0].served_by, records[0].confidence, records[0].threshold) == ("heavy", 0.4, 0.5)
    assert (records[1].served_by, records[1].confidence, records[1].threshold) == ("light", 0.5, 0.5)
    assert [records[number].guidance_scale for number in (0, 1)] == [4.0, 0.0]


def test_deferred_request_may_start_from_its_light_image() -> None:
    models: dict[Leg, LegModel] = {**MODELS, "heavy": LegModel(20, 4.0, TIMES, strength=0.6)}
    harness = DispatcherHarness([THREE], models=models)
    harness.ask(0)
    harness.ask(1, fallback="never")
    harness.end(0, 0, 1.0, 0.4)
    alone, deferred = harness.workers[2].taken
    # A request without a light image starts from noise.
    assert (alone.request_id, alone.traced, alone.num_steps) == (1, None, 20)
    assert deferred.traced is not None
    assert (deferred.traced.strength, deferred.num_inference_steps, deferred.num_steps) == (0.6, 20, 12)
    assert harness.dispatcher.slots[2].work.pixel_steps == (20 + 12) * SIZE.pixels
    harness.end(2, 0, 2.0, None)
    harness.end(2, 1, 2.0, None)
    assert harness.dispatcher.result.sides() == {0: "reused", 1: "heavy"}
    assert harness.dispatcher.result.served_by() == {0: "heavy", 1: "heavy"}
    assert [record.strength for record in harness.dispatcher.result.records] == [0.6, None]


def test_request_without_light_image_waits_for_the_heavy_model() -> None:
    harness = DispatcherHarness([THREE, TWO, ONE])
    harness.ask(0, fallback="never")
    assert [request.request_id for request in harness.workers[2].taken] == [0]
    harness.end(2, 0, 1.0, None)
    harness.dispatcher.worker_died(2, 2.0, "worker 2 died")
    harness.dispatcher.worker_died(1, 2.0, "worker 1 died")
    harness.ask(1, now_s=3.0, fallback="never")
    assert not harness.workers[0].taken
    harness.dispatcher.tick(40.0)
    record = harness.dispatcher.result.records[-1]
    assert (record.request_id, record.status, record.reason) == (1, "discarded", "no worker has the heavy model")


def test_request_can_be_cancelled_at_any_stage() -> None:
    harness = DispatcherHarness([THREE, TWO, ONE])
    for number in range(3):
        harness.ask(number)
    harness.dispatcher.cancel(0, 1.0, "gone")
    assert harness.workers[0].cancelled == [0]
    # Later reports from its worker are ignored.
    harness.end(0, 0, 2.0, 0.9)
    harness.dispatcher.cancel(0, 2.0, "gone")
    harness.end(1, 1, 2.0, 0.1)
    harness.dispatcher.cancel(1, 3.0, "gone")
    assert harness.workers[2].cancelled == [1]
    harness.dispatcher.worker_died(2, 3.0, "worker 2 died")
    harness.ask(3, now_s=4.0, fallback="never")
    harness.dispatcher.cancel(3, 4.0, "gone")
    assert [(record.request_id, record.status) for record in harness.dispatcher.result.records] == [
        (number, "cancelled") for number in (0, 1, 3)
    ]
    assert harness.dispatcher.num_open == 1
    # Only the third is still to be drawn.
    assert [number for slot in harness.dispatcher.slots for number in slot.assignments] == [2]
    assert sum(slot.work.pixel_steps for slot in harness.dispatcher.slots) == SIZE.pixels * MODELS["light"].num_steps


def test_keeping_last_bounds_the_results() -> None:
    harness = DispatcherHarness([THREE], result=CascadeResult.keeping_last(2))
    for number in range(5):
        harness.ask(number)
        harness.end(next(slot.index for slot in harness.dispatcher.slots if slot.assignments), number, 1.0, 0.9)
    assert harness.dispatcher.result.served_by() == {3: "light", 4: "light"}
    assert len(harness.dispatcher.result.legs) == 2


@pytest.mark.parametrize(
    ("share", "skip_light", "leg"),
    [(0.98, True, "heavy"), (0.97, True, "light"), (0.98, False, "light"), (1.0, False, "light")],
)
def test_light_image_of_a_certain_deferral_may_be_skipped(share: float, skip_light: bool, leg: Leg) -> None:
    harness = DispatcherHarness([AllocationPlan(2, 1, 2, 1, 0.9, share)], skip_light=skip_light)
    harness.ask(0)
    index = next(index for index, worker in harness.workers.items() if worker.taken)
    assert harness.workers[index].leg == leg
    harness.end(index, 0, 5.0, None if leg == "heavy" else 0.95)
    assert harness.dispatcher.result.served_by() == {0: leg}
    assert harness.dispatcher.result.legs[0].is_deferred is False


def test_requests_of_a_dead_worker_are_retried_once() -> None:
    harness = DispatcherHarness([THREE, TWO, ONE])
    harness.ask(0)
    harness.dispatcher.worker_died(0, 2.0, "worker 0 died")
    assert harness.workers[1].taken[0].request_id == 0
    # The new plan is for two workers.
    assert harness.observed[-1].num_workers == 2
    assert harness.dispatcher.result.plans[-1].plan == TWO
    # A late report from the dead worker is ignored.
    harness.dispatcher.request_ended(0, RequestRecord.of(harness.workers[1].taken[0]), 0.9, 3.0)
    assert harness.dispatcher.num_open == 1
    harness.dispatcher.worker_died(1, 4.0, "worker 1 died")
    record = harness.dispatcher.result.records[0]
    assert (record.status, record.reason) == ("failed", "worker 1 died")


def test_request_waits_until_a_worker_of_its_model_returns() -> None:
    harness = DispatcherHarness([THREE, TWO, ONE])
    harness.ask(0)
    harness.ask(1)
    harness.end(0, 0, 1.0, 0.1)
    harness.dispatcher.worker_died(2, 2.0, "worker 2 died")
    # The deferred request waits; a worker with the light model may be asked to switch in place of the dead one.
    assert harness.dispatcher.num_open == 2
    back = Idle(2, "heavy")
    harness.workers[2] = back
    harness.dispatcher.worker_restarted(2, 3.0, back)
    given = [request.request_id for worker in harness.workers.values() for request in worker.taken[-1:]]
    assert 0 in given
    assert harness.observed[-1].num_workers == 3
    harness.dispatcher.end_all("cancelled", 9.0, "stopped")
    assert harness.dispatcher.num_open == 0
    assert {record.status for record in harness.dispatcher.result.records} == {"cancelled"}


def test_returned_requests_are_redistributed_without_using_up_an_attempt() -> None:
    harness = DispatcherHarness([THREE])
    for number in range(4):
        harness.ask(number)
    slot = harness.dispatcher.slots[0]
    own = list(slot.assignments)
    slot.next_leg = "heavy"
    harness.dispatcher.requests_returned(0, own, 1.0)
    assert slot.work.pixel_steps == 0
    assert sorted(request.request_id for request in harness.workers[1].taken) == [0, 1, 2, 3]
    harness.dispatcher.switch_started(0)
    harness.dispatcher.switch_finished(0, 2.0)
    assert (slot.leg, slot.is_accepting, harness.workers[0].batch_size) == ("heavy", True, 1)
    assert harness.dispatcher.result.num_switches == 1
