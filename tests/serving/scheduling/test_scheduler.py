"""State transitions of the scheduler, worked out by hand."""

from collections.abc import Sequence

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.core.request_state import RequestView
from patchedserve.serving.scheduling.policies import Decision, get_policy
from patchedserve.serving.scheduling.scheduler import Scheduler

from ...support.function_policy import FunctionPolicy
from ...support.scheduler_cases import L, Learning, S, admitting, ids, prepare, request, whole_scheduler
from ...support.scheduler_check import check_scheduler


def next_id(scheduler: Scheduler, now_s: float = 0.0) -> int | None:
    state = scheduler.next_to_prepare(now_s)
    return None if state is None else state.request.request_id


def test_request_life_cycle() -> None:
    scheduler = Scheduler(get_policy("fcfs"))
    assert (scheduler.is_idle, scheduler.is_due, scheduler.can_step) == (True, False, False)
    asked = request(3, steps=2, arrival_s=1.0)
    state = scheduler.add(asked, RequestView.of(asked, 0.5))
    assert (state.stage, state.view.standalone_s, scheduler.num_waiting) == ("waiting", 0.5, 1)
    assert scheduler.pixel_steps == 2 * S.pixels
    assert (scheduler.is_idle, scheduler.is_due) == (False, True)
    assert scheduler.next_to_prepare(1.25) is state
    # The request is admitted before it is prepared, so there is nothing to do until then.
    assert scheduler.decide(1.5) == []
    assert (state.stage, scheduler.num_waiting, scheduler.is_due) == ("joining", 1, False)
    assert scheduler.prepared(3, 2.0) is state
    assert (state.stage, scheduler.is_due, scheduler.can_step) == ("joining", True, False)
    scheduler.decide(2.5)
    assert (state.stage, scheduler.can_step, scheduler.batch, scheduler.changed) == ("active", True, [S], {S})
    assert scheduler.stepped(3.0, 0.5) == ()
    assert (scheduler.changed, scheduler.pixel_steps, scheduler.num_prepared) == (set(), S.pixels, 1)
    assert scheduler.stepped(4.0, 1.0) == [state]
    assert (state.stage, scheduler.pixel_steps, scheduler.num_prepared, scheduler.batch) == ("decoding", 0, 0, [])
    assert scheduler.is_idle
    assert scheduler.end(3, "completed", 6.0) is state
    record = state.record
    times = (record.prepare_start_s, record.prepare_end_s, record.admitted_s, record.denoise_end_s, record.finish_s)
    assert times == (1.25, 2.0, 2.5, 4.0, 6.0)
    assert (record.status, scheduler.max_prepared, scheduler.end(3, "failed", 7.0)) == ("completed", 1, None)
    scheduler.add(request(3))  # its id is free again
    check_scheduler(scheduler)


def test_preparation_order() -> None:
    scheduler = Scheduler(admitting([3], [0], []), max_prepared_ahead=2)
    for request_id in range(5):
        scheduler.add(request(request_id))
    assert next_id(scheduler) == 0
    assert next_id(scheduler) is None  # one at a time
    scheduler.prepared(0, 0.0)
    assert prepare(scheduler) == 1
    assert next_id(scheduler) is None  # at most two ahead
    scheduler.decide(0.0)
    assert prepare(scheduler) == 3  # admitted: prepared at once
    scheduler.decide(0.0)  # admits 0, which leaves a place ahead
    assert ids(scheduler.active) == [3, 0]
    assert prepare(scheduler) == 2
    scheduler.end(4, "cancelled", 0.0)
    scheduler.end(1, "cancelled", 0.0)
    assert next_id(scheduler) is None
    scheduler.add(request(6))
    assert prepare(scheduler) == 6
    check_scheduler(scheduler)


def test_requests_become_active_in_order_of_preparation() -> None:
    scheduler = Scheduler(admitting([1, 0]), max_prepared_ahead=1)
    for request_id in range(2):
        scheduler.add(request(request_id))
    assert next_id(scheduler) == 0
    scheduler.decide(0.0)
    scheduler.prepared(0, 1.0)
    assert prepare(scheduler, 1.0) == 1
    scheduler.decide(2.0)
    assert ids(scheduler.active) == [0, 1]


def test_uniform_batch_takes_its_first_step_together() -> None:
    scheduler = Scheduler(get_policy("static"), max_prepared_ahead=1)
    for request_id in range(2):
        scheduler.add(request(request_id))
    prepare(scheduler)
    scheduler.decide(0.0)
    assert (ids(scheduler.active), scheduler.num_waiting, scheduler.can_step) == ([0], 1, False)
    # If the other one fails, the batch waits no longer.
    assert next_id(scheduler) == 1
    failed = scheduler.prepared(1, 1.0, failure="no words for it")
    assert failed is not None
    assert (failed.record.status, failed.record.reason) == ("failed", "no words for it")
    assert (scheduler.num_waiting, scheduler.can_step) == (0, True)
    check_scheduler(scheduler)


def test_step_failures_end_only_the_affected_requests() -> None:
    predictor = Learning()
    scheduler = Scheduler(admitting([0, 1, 2]), predictor)
    for request_id, steps in enumerate((1, 5, 2)):
        scheduler.add(request(request_id, steps))
        prepare(scheduler)
    scheduler.decide(0.0)
    left = scheduler.stepped(1.0, 1.0, {1: "not finite"})
    assert [(state.request.request_id, state.record.status, state.stage) for state in left] == [
        (0, "pending", "decoding"),
        (1, "failed", "active"),
    ]
    assert (left[1].record.finish_s, left[1].record.reason) == (1.0, "not finite")
    assert (ids(scheduler.active), scheduler.pixel_steps) == ([2], S.pixels)
    check_scheduler(scheduler)
    # A step that failed for some requests was repeated in parts, so the predictor does not learn from it.
    assert ids(scheduler.stepped(2.0, 0.75)) == [2]
    assert predictor.seen == [((S,), 0.75)]
    # The predictor learns the decoding time, without waiting, from requests that complete, not from those that fail.
    scheduler.end(0, "failed", 3.0, "no image")
    scheduler.end(2, "completed", 3.5)
    assert predictor.seen[1:] == [((S,), 0.5)]


def test_waiting_time_between_steps_is_reported() -> None:
    predictor = Learning()
    scheduler = Scheduler(admitting([0], [1]), predictor)
    scheduler.add(request(0, 3))
    prepare(scheduler)
    scheduler.decide(10.0)
    for end_s, step_s in ((11.0, 1.0), (13.0, 0.5), (13.5, 0.5)):
        scheduler.stepped(end_s, step_s)
    assert predictor.between_s == [0.0, 1.5, 0.0]
    # No request waits between steps while nothing is active.
    scheduler.add(request(1, 1))
    prepare(scheduler)
    scheduler.decide(20.0)
    assert ids(scheduler.stepped(21.0, 1.0)) == [1]
    assert predictor.between_s[3:] == [0.0]


def test_sampler_may_take_another_number_of_steps() -> None:
    seen: list[list[int]] = []

    def choose(now_s: float, waiting: Sequence[RequestView], active: Sequence[RequestView]) -> Decision:
        seen.append([view.steps_done for view in active])
        return Decision(admit=(0,) if waiting[0].request_id == 0 else ())

    scheduler = Scheduler(FunctionPolicy(choose))
    scheduler.add(request(0, steps=3))
    scheduler.next_to_prepare(0.0)
    scheduler.prepared(0, 0.0, num_iterations=5)
    assert scheduler.pixel_steps == 5 * S.pixels
    scheduler.decide(0.0)
    scheduler.add(request(1))
    for step in range(1, 6):
        check_scheduler(scheduler)
        left = scheduler.stepped(float(step), 1.0)
        if step < 5:
            scheduler.decide(float(step))
    assert ids(left) == [0]
    assert seen == [[], [0], [1], [1], [2]]  # counted in requested steps


def test_unused_preparations_are_reported() -> None:
    drop = FunctionPolicy(lambda now_s, waiting, active: Decision(drop=((0, "late"),)))
    scheduler = Scheduler(drop)
    scheduler.add(request(0, slo_s=0.5))
    scheduler.next_to_prepare(0.0)
    (dropped,) = scheduler.decide(1.0)
    assert (dropped.record.status, dropped.record.reason, dropped.record.finish_s) == ("discarded", "late", 1.0)
    assert next_id(scheduler) is None, "the stage is not free yet"
    assert scheduler.prepared(0, 2.0) is None
    assert scheduler.max_prepared == 0
    check_scheduler(scheduler)


def test_idle_engine_serves_one_request_instead_of_dropping_it() -> None:
    # The predictions may be wrong, and only requests that are served correct them.
    drop_all = FunctionPolicy(
        lambda now_s, waiting, active: Decision(drop=tuple((view.request_id, "late") for view in waiting))
    )
    scheduler = Scheduler(drop_all)
    for request_id, slo_s in enumerate((5.0, 9.0, 7.0)):
        scheduler.add(request(request_id, slo_s=slo_s))
    assert ids(scheduler.decide(1.0)) == [0, 2], "all but the last to be due"
    check_scheduler(scheduler)
    assert scheduler.next_to_prepare(1.0) is not None
    assert scheduler.prepared(1, 1.0) is not None
    scheduler.add(request(3, slo_s=9.0))
    assert ids(scheduler.decide(1.0)) == [3], "it is idle no more"
    assert ids(scheduler.active) == [1]
    scheduler = Scheduler(drop_all)
    scheduler.add(request(0, slo_s=5.0))
    assert ids(scheduler.decide(5.0)) == [0], "its deadline is over"


def test_late_preparation_is_not_used_for_a_new_request_of_the_same_id() -> None:
    scheduler = Scheduler(get_policy("fcfs"))
    first = scheduler.add(request(0))
    assert scheduler.next_to_prepare(0.0) is first
    scheduler.end(0, "cancelled", 1.0)
    second = scheduler.add(request(0))
    check_scheduler(scheduler)
    assert scheduler.prepared(0, 2.0) is None
    assert not second.is_prepared
    check_scheduler(scheduler)
    assert scheduler.next_to_prepare(3.0) is second
    assert scheduler.prepared(0, 4.0) is second
    check_scheduler(scheduler)


def test_invalid_use_is_refused() -> None:
    with pytest.raises(UsageError, match="max batch size is 0"):
        Scheduler(get_policy("fcfs"), max_batch_size=0)
    with pytest.raises(UsageError, match="requests prepared ahead is 0"):
        Scheduler(get_policy("fcfs"), max_prepared_ahead=0)
    with pytest.raises(UsageError, match="policy slack looks ahead and needs step latencies"):
        Scheduler(get_policy("slack"))
    scheduler = Scheduler(admitting([9]))
    scheduler.add(request(0))
    with pytest.raises(ValueError, match="request 0 is open already"):
        scheduler.add(request(0))
    with pytest.raises(AssertionError, match="not being prepared"):
        scheduler.prepared(0, 0.0)
    with pytest.raises(RuntimeError, match=r"policy named requests \[9\], which are not waiting"):
        scheduler.decide(0.0)
    assert ids(scheduler.end_all("cancelled", 1.0, "stopped")) == [0]


def test_request_without_latents_never_becomes_active() -> None:
    # It would stay in the batch permanently, as no step could complete it.
    scheduler = whole_scheduler()
    scheduler._ready.append(scheduler._open[5])
    with pytest.raises(AssertionError, match="request without latents"):
        scheduler.decide(2.0)
    assert 5 not in ids(scheduler.active)


def test_decision_times_are_recorded() -> None:
    times_s: list[float] = []
    scheduler = Scheduler(get_policy("fcfs"), on_decision=times_s.append)
    scheduler.decide(0.0)
    assert times_s == [], "no request waits, so the policy is not asked"
    scheduler.add(request(0))
    scheduler.decide(0.0)
    assert len(times_s) == 1
    assert times_s[0] > 0


def test_reduced_batch_size_keeps_active_requests() -> None:
    scheduler = Scheduler(get_policy("continuous"), max_batch_size=4)
    for number in range(6):
        scheduler.add(Request(number, "", Resolution(64, 64), 2))
    scheduler.decide(0.0)
    while (state := scheduler.next_to_prepare(0.0)) is not None:
        scheduler.prepared(state.request.request_id, 0.0)
    scheduler.decide(0.0)
    assert len(scheduler.active) == 4
    scheduler.max_batch_size = 2
    scheduler.decide(0.1)
    assert len(scheduler.active) == 4
    scheduler.stepped(1.0, 1.0, {})
    assert len(scheduler.stepped(2.0, 1.0, {})) == 4
    scheduler.decide(2.0)
    assert len(scheduler.active) == 2
    with pytest.raises(UsageError, match="max batch size"):
        scheduler.max_batch_size = 0


def test_waiting_requests_can_be_withdrawn() -> None:
    scheduler = Scheduler(get_policy("fcfs"), max_batch_size=1)
    for number in range(3):
        scheduler.add(Request(number, "", Resolution(64, 64), 2))
    first = scheduler.next_to_prepare(0.0)
    assert first is not None
    scheduler.prepared(first.request.request_id, 0.0)
    scheduler.decide(0.0)
    being_prepared = scheduler.next_to_prepare(0.0)
    assert being_prepared is not None
    assert [request.request_id for request in scheduler.withdraw_waiting()] == [1, 2]
    # The preparation under way is discarded, and the ids are free again.
    assert scheduler.prepared(being_prepared.request.request_id, 0.1) is None
    assert scheduler.num_waiting == 0
    assert scheduler.pixel_steps == 2 * 64 * 64
    scheduler.add(Request(1, "", Resolution(64, 64), 2))
    scheduler.stepped(1.0, 1.0, {})
    scheduler.stepped(2.0, 1.0, {})
    scheduler.end(0, "completed", 2.5)
    assert not scheduler.is_idle
    scheduler.withdraw_waiting()
    assert scheduler.is_idle


def drive(scheduler: Scheduler, now_s: float) -> list[int]:
    """Prepare all eligible requests, take one step and end those that are done; return the ids in the step."""
    while scheduler.next_to_prepare(now_s) is not None:
        assert scheduler._preparing is not None
        scheduler.prepared(scheduler._preparing.request.request_id, now_s)
        scheduler.decide(now_s)
    scheduler.decide(now_s)
    batch = ids(scheduler.active)
    for state in scheduler.stepped(now_s, 1.0, {}):
        scheduler.end(state.request.request_id, "completed", now_s)
    check_scheduler(scheduler)
    return batch


def test_yielding_requests_pause_for_others_and_resume() -> None:
    scheduler = Scheduler(get_policy("continuous"), max_batch_size=3)
    records = [scheduler.add(request(number, 3, yields=True)).record for number in range(3)]
    assert drive(scheduler, 1.0) == [0, 1, 2]
    # There is room for all, but two must leave: beside other requests, yielding ones share one place.
    other = scheduler.add(request(7, 2)).record
    assert scheduler.pixel_steps == (3 * 2 + 2) * S.pixels
    assert (drive(scheduler, 2.0), scheduler.num_waiting) == ([7, 0], 2)
    assert [view.num_steps for view in scheduler.views] == [2, 2, 2, 2]
    scheduler.add(request(8, 2))
    scheduler.add(request(9, 1))
    assert drive(scheduler, 3.0) == [7, 8, 9]
    assert other.status == "completed"
    assert drive(scheduler, 4.0) == [8, 0]
    assert [drive(scheduler, 5.0 + number) for number in range(2)] == [[1, 2], [1, 2]]
    assert scheduler.is_idle
    assert [record.finish_s for record in records] == [4.0, 6.0, 6.0]
    assert [record.admitted_s for record in records] == [1.0, 1.0, 1.0]


def test_priorities_order_the_requests_of_one_owner() -> None:
    scheduler = Scheduler(get_policy("continuous"), max_batch_size=1, max_prepared_ahead=6)
    for number, (owner, priority) in enumerate((("a", 0), ("a", 5), ("a", 5), ("b", 9), ("a", -1), ("b", 9))):
        scheduler.add(request(number, 1, owner=owner, priority=priority))
        scheduler.decide(0.0)
        check_scheduler(scheduler)
    assert [view.request_id for view in scheduler.views] == [0, 1, 2, 3, 4, 5]
    assert scheduler.num_waiting == 6
    # The owners take turns.
    assert [drive(scheduler, 1.0 + number) for number in range(6)] == [[0], [3], [4], [5], [1], [2]]
    assert scheduler.is_idle


@pytest.mark.parametrize("policy", ["continuous", "edf", "edf-drop", "slack", "edf-fitting", "fair-fitting"])
def test_owner_with_many_requests_does_not_delay_others(policy: str) -> None:
    scheduler = Scheduler(get_policy(policy), Learning(), max_batch_size=2, max_prepared_ahead=30)
    for number in range(20):
        scheduler.add(request(number, 2, slo_s=200.0, owner="a"))
    drive(scheduler, 1.0)
    late = scheduler.add(request(20, 2, arrival_s=1.0, slo_s=300.0, owner="b")).record
    assert [20 in drive(scheduler, 2.0 + number) for number in range(3)] == [False, True, True]
    assert late.status == "completed"


def test_owners_share_the_batch_by_weight() -> None:
    scheduler = Scheduler(get_policy("continuous"), max_batch_size=2, max_prepared_ahead=120)
    for number in range(120):
        owner, weight = ("a", 1.0) if number < 60 else ("b", 3.0)
        scheduler.add(request(number, 1, L if number % 2 else S, owner=owner, weight=weight))
    first = [number for time_s in range(30) for number in drive(scheduler, 1.0 + time_s)]
    pixels = {owner: sum((L if n % 2 else S).pixels for n in first if (n < 60) == (owner == "a")) for owner in "ab"}
    assert abs(pixels["b"] / pixels["a"] - 3) < 0.3
    check_scheduler(scheduler)
    for time_s in range(30, 60):
        drive(scheduler, 1.0 + time_s)
    assert scheduler.is_idle


def test_places_that_one_owner_leaves_free_are_used_by_others() -> None:
    def even_ones(now_s: float, waiting: Sequence[RequestView], active: Sequence[RequestView]) -> Decision:
        found = [view.request_id for view in waiting if view.request_id % 2 == 0]
        return Decision(tuple(found[: 3 - len(active)] or ([] if active else [waiting[0].request_id])))

    scheduler = Scheduler(FunctionPolicy(even_ones), max_batch_size=3)
    for number, owner in enumerate("aababbb"):
        scheduler.add(request(number, 3, owner=owner))
    assert drive(scheduler, 1.0) == [0, 2, 4], "then it is the turn of a, whose other requests are refused"


def test_idle_engine_serves_a_hopeless_request_of_one_of_several_owners() -> None:
    scheduler = Scheduler(get_policy("slack"), Learning(), max_batch_size=2)
    for number, owner in enumerate("ab"):
        scheduler.add(request(number, 10, slo_s=5.0 + number, owner=owner))
    dropped = scheduler.decide(0.0)
    assert (ids(dropped), scheduler.num_waiting) == ([0], 1)
    assert prepare(scheduler) == 1
    scheduler.decide(0.0)
    assert ids(scheduler.active) == [1]


def test_more_urgent_arrivals_are_prepared_first() -> None:
    scheduler = Scheduler(admitting([2]), max_prepared_ahead=2)
    for number, priority in enumerate((1, 1, 0)):
        scheduler.add(request(number, priority=priority))
    assert (prepare(scheduler), next_id(scheduler)) == (2, None)
    scheduler.decide(0.0)
    assert (ids(scheduler.active), prepare(scheduler)) == ([2], 0)
    check_scheduler(scheduler)


@pytest.mark.parametrize(("policy", "status"), [("continuous", "completed"), ("edf-drop", "discarded")])
def test_no_request_is_held_back_beyond_its_deadline(policy: str, status: str) -> None:
    scheduler = Scheduler(get_policy(policy), Learning(), max_batch_size=1)
    held = scheduler.add(request(0, 1, priority=1, slo_s=4.5)).record
    for number in range(1, 8):
        scheduler.add(request(number, 1, arrival_s=float(number)))
        drive(scheduler, float(number))
        assert held.status == ("pending" if number < 5 else status)
    assert held.finish_s == 5.0


def test_yielding_requests_are_prepared_only_without_others() -> None:
    scheduler = Scheduler(get_policy("continuous"), max_batch_size=2)
    scheduler.add(request(0, 2, yields=True))
    scheduler.decide(0.0)
    # It has joined but is not yet prepared when other requests arrive.
    being_prepared = scheduler.next_to_prepare(0.0)
    assert being_prepared is not None
    for number in (1, 2):
        scheduler.add(request(number, 1))
    scheduler.decide(0.0)
    check_scheduler(scheduler)
    assert being_prepared.stage == "waiting"
    scheduler.prepared(0, 0.0)
    assert [prepare(scheduler) for _ in range(2)] == [1, 2]
    assert drive(scheduler, 1.0) == [1, 2]
    assert drive(scheduler, 2.0) == [0]


def test_yielding_request_can_be_cancelled_or_withdrawn_at_any_time() -> None:
    for end in ("cancel", "take back"):
        scheduler = Scheduler(get_policy("continuous"), max_batch_size=2)
        scheduler.add(request(0, 5, yields=True))
        drive(scheduler, 1.0)
        for number in (1, 2):
            scheduler.add(request(number, 3))
        assert drive(scheduler, 2.0) == [1, 2]
        if end == "cancel":
            assert scheduler.end(0, "cancelled", 2.0) is not None
        else:
            assert [each.request_id for each in scheduler.withdraw_waiting()] == [0]
        check_scheduler(scheduler)
        assert [drive(scheduler, 3.0 + number) for number in range(2)] == [[1, 2]] * 2
        assert scheduler.is_idle
        assert scheduler.pixel_steps == scheduler.num_prepared == 0
