"""The dispatcher alone: workers that die, restart or are all gone, and the requests that they had."""

from collections.abc import Sequence

import pytest

from patchedserve.data.requests import Fallback, Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.cascade.allocators import Observations
from patchedserve.serving.cascade.balancer import Balancer
from patchedserve.serving.cascade.controller import Controller
from patchedserve.serving.cascade.dispatcher import Dispatcher
from patchedserve.serving.cascade.leg_model import LegModel
from patchedserve.serving.cascade.legs import Leg
from patchedserve.serving.cascade.problem import AllocationPlan, ModelTimes
from patchedserve.serving.cascade.result import CascadeResult
from patchedserve.serving.core.request_state import RequestRecord

SIZE = Resolution(64, 64)
TIMES = ModelTimes((1, 2), (10.0, 12.0), {str(SIZE): (0.1, 0.15)})
MODELS: dict[Leg, LegModel] = {"light": LegModel(2, 0.0, TIMES), "heavy": LegModel(20, 4.0, TIMES)}


class Idle:
    """Worker that only records its calls."""

    def __init__(self, index: int, leg: Leg | None) -> None:
        self.index, self.leg, self.num_waiting = index, leg, 0
        self.taken: list[Request] = []
        self.changes: list[Leg] = []
        self.cancelled: list[int] = []
        self.batch_size = 0

    def take(self, request: Request, now_s: float) -> None:
        self.taken.append(request)

    def cancel(self, request_id: int, reason: str) -> None:
        self.cancelled.append(request_id)

    def limit_batch_size(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def switch_model(self, leg: Leg, now_s: float) -> None:
        self.changes.append(leg)


class House:
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
            Balancer(),
            lambda request_id: 0.0,
            "discard",
            "plan",
            skip_light=skip_light,
            result=result,
        )
        self.dispatcher.start(self.make, most)

    def make(self, index: int, leg: Leg | None) -> Idle:
        self.workers[index] = Idle(index, leg)
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


def test_a_deferred_request_keeps_its_deadline_and_workers_are_told_how_large_batches_are() -> None:
    house = House([THREE])
    assert [house.workers[index].batch_size for index in range(3)] == [2, 2, 1]
    house.ask(0)
    house.ask(1)
    assert [len(house.workers[index].taken) for index in range(3)] == [1, 1, 0]
    house.end(0, 0, 1.0, 0.4)
    house.end(1, 1, 1.0, 0.5)
    heavy = house.workers[2].taken[0]
    assert (heavy.num_inference_steps, heavy.arrival_s, heavy.deadline_s) == (20, 1.0, 30.0)
    # Each model has its own guidance scale, too.
    assert (house.workers[0].taken[0].guidance_scale, heavy.guidance_scale) == (0.0, 4.0)
    assert house.dispatcher.result.served_by() == {1: "light"}
    assert house.dispatcher.result.wasted_s == 1.0
    house.end(2, 0, 5.0, None)
    assert house.dispatcher.result.served_by() == {1: "light", 0: "heavy"}
    assert house.dispatcher.num_open == 0
    # Records state why a request was routed as it was.
    records = {record.request_id: record for record in house.dispatcher.result.records}
    assert (records[0].served_by, records[0].confidence, records[0].threshold) == ("heavy", 0.4, 0.5)
    assert (records[1].served_by, records[1].confidence, records[1].threshold) == ("light", 0.5, 0.5)
    assert [records[number].guidance_scale for number in (0, 1)] == [4.0, 0.0]


def test_a_deferred_request_may_start_from_its_light_image() -> None:
    models: dict[Leg, LegModel] = {**MODELS, "heavy": LegModel(20, 4.0, TIMES, strength=0.6)}
    house = House([THREE], models=models)
    house.ask(0)
    house.ask(1, fallback="never")
    house.end(0, 0, 1.0, 0.4)
    alone, deferred = house.workers[2].taken
    # A request without a light image starts from noise.
    assert (alone.request_id, alone.traced, alone.num_steps) == (1, None, 20)
    assert deferred.traced is not None
    assert (deferred.traced.strength, deferred.num_inference_steps, deferred.num_steps) == (0.6, 20, 12)
    assert house.dispatcher.slots[2].pending_pixel_steps == (20 + 12) * SIZE.pixels
    house.end(2, 0, 2.0, None)
    house.end(2, 1, 2.0, None)
    assert house.dispatcher.result.sides() == {0: "reused", 1: "heavy"}
    assert house.dispatcher.result.served_by() == {0: "heavy", 1: "heavy"}
    assert [record.strength for record in house.dispatcher.result.records] == [0.6, None]


def test_a_request_that_wants_no_light_image_waits_for_the_heavy_model() -> None:
    house = House([THREE, TWO, ONE])
    house.ask(0, fallback="never")
    assert [request.request_id for request in house.workers[2].taken] == [0]
    house.end(2, 0, 1.0, None)
    house.dispatcher.worker_died(2, 2.0, "worker 2 died")
    house.dispatcher.worker_died(1, 2.0, "worker 1 died")
    house.ask(1, now_s=3.0, fallback="never")
    assert not house.workers[0].taken
    house.dispatcher.tick(40.0)
    record = house.dispatcher.result.records[-1]
    assert (record.request_id, record.status, record.reason) == (1, "discarded", "no worker has the heavy model")


def test_a_request_can_be_cancelled_wherever_it_is() -> None:
    house = House([THREE, TWO, ONE])
    for number in range(3):
        house.ask(number)
    house.dispatcher.cancel(0, 1.0, "gone")
    assert house.workers[0].cancelled == [0]
    # Later reports from its worker are ignored.
    house.end(0, 0, 2.0, 0.9)
    house.dispatcher.cancel(0, 2.0, "gone")
    house.end(1, 1, 2.0, 0.1)
    house.dispatcher.cancel(1, 3.0, "gone")
    assert house.workers[2].cancelled == [1]
    house.dispatcher.worker_died(2, 3.0, "worker 2 died")
    house.ask(3, now_s=4.0, fallback="never")
    house.dispatcher.cancel(3, 4.0, "gone")
    assert [(record.request_id, record.status) for record in house.dispatcher.result.records] == [
        (number, "cancelled") for number in (0, 1, 3)
    ]
    assert house.dispatcher.num_open == 1
    # Only the third is still to be drawn.
    assert [number for slot in house.dispatcher.slots for number in slot.assignments] == [2]
    assert sum(slot.pending_pixel_steps for slot in house.dispatcher.slots) == SIZE.pixels * MODELS["light"].num_steps


def test_who_serves_for_ever_keeps_the_last_only() -> None:
    house = House([THREE], result=CascadeResult.keeping_last(2))
    for number in range(5):
        house.ask(number)
        house.end(next(slot.index for slot in house.dispatcher.slots if slot.assignments), number, 1.0, 0.9)
    assert house.dispatcher.result.served_by() == {3: "light", 4: "light"}
    assert len(house.dispatcher.result.legs) == 2


@pytest.mark.parametrize(
    ("share", "skip_light", "leg"),
    [(0.98, True, "heavy"), (0.97, True, "light"), (0.98, False, "light"), (1.0, False, "light")],
)
def test_a_light_image_that_would_be_deferred_anyway_may_be_skipped(share: float, skip_light: bool, leg: Leg) -> None:
    house = House([AllocationPlan(2, 1, 2, 1, 0.9, share)], skip_light=skip_light)
    house.ask(0)
    index = next(index for index, worker in house.workers.items() if worker.taken)
    assert house.workers[index].leg == leg
    house.end(index, 0, 5.0, None if leg == "heavy" else 0.95)
    assert house.dispatcher.result.served_by() == {0: leg}
    assert house.dispatcher.result.legs[0].is_deferred is False


def test_what_a_dead_worker_was_at_is_begun_once_more() -> None:
    house = House([THREE, TWO, ONE])
    house.ask(0)
    house.dispatcher.worker_died(0, 2.0, "worker 0 died")
    assert house.workers[1].taken[0].request_id == 0
    # The new plan is for two workers.
    assert house.observed[-1].num_workers == 2
    assert house.dispatcher.result.plans[-1].plan == TWO
    # A late report from the dead worker is ignored.
    house.dispatcher.request_ended(0, RequestRecord.of(house.workers[1].taken[0]), 0.9, 3.0)
    assert house.dispatcher.num_open == 1
    house.dispatcher.worker_died(1, 4.0, "worker 1 died")
    record = house.dispatcher.result.records[0]
    assert (record.status, record.reason) == ("failed", "worker 1 died")


def test_without_a_worker_of_its_model_a_request_waits_until_one_returns() -> None:
    house = House([THREE, TWO, ONE])
    house.ask(0)
    house.ask(1)
    house.end(0, 0, 1.0, 0.1)
    house.dispatcher.worker_died(2, 2.0, "worker 2 died")
    # The deferred request waits; a worker with the light model may be asked to switch in place of the dead one.
    assert house.dispatcher.num_open == 2
    back = Idle(2, "heavy")
    house.workers[2] = back
    house.dispatcher.worker_restarted(2, 3.0, back)
    given = [request.request_id for worker in house.workers.values() for request in worker.taken[-1:]]
    assert 0 in given
    assert house.observed[-1].num_workers == 3
    house.dispatcher.end_all("cancelled", 9.0, "stopped")
    assert house.dispatcher.num_open == 0
    assert {record.status for record in house.dispatcher.result.records} == {"cancelled"}


def test_a_queue_that_is_handed_back_goes_to_the_others_and_does_not_count_as_a_try() -> None:
    house = House([THREE])
    for number in range(4):
        house.ask(number)
    slot = house.dispatcher.slots[0]
    own = list(slot.assignments)
    slot.next_leg = "heavy"
    house.dispatcher.requests_returned(0, own, 1.0)
    assert slot.pending_pixel_steps == 0
    assert sorted(request.request_id for request in house.workers[1].taken) == [0, 1, 2, 3]
    house.dispatcher.switch_started(0)
    house.dispatcher.switch_finished(0, 2.0)
    assert (slot.leg, slot.is_accepting, house.workers[0].batch_size) == ("heavy", True, 1)
    assert house.dispatcher.result.num_switches == 1
