"""The scheduler: transitions by hand, random drivers under its integrity check, and that the check can fail."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.core.request_state import RequestState, RequestView
from patchedserve.serving.scheduling.policies import Decision, Policy, get_policy
from patchedserve.serving.scheduling.scheduler import Scheduler

from ...support.function_policy import FunctionPolicy
from ...support.scheduler_check import check_scheduler

S, L = Resolution(128, 128), Resolution(256, 256)


class Learning:
    """A step takes 1 s for each image; it remembers what it is told."""

    def __init__(self) -> None:
        self.seen: list[tuple[tuple[Resolution, ...], float]] = []
        self.between_s: list[float] = []

    def step_latency_s(self, active: Sequence[Any]) -> float:
        return float(len(active))

    def observe(
        self, active: Sequence[Any], measured_s: float, *, is_first: bool = False, between_s: float = 0.0
    ) -> None:
        self.seen.append((tuple(active), measured_s))
        self.between_s.append(between_s)

    def after_steps_s(self, resolution: Resolution) -> float | None:
        return None

    def observe_end(self, resolution: Resolution, after_s: float) -> None:
        self.seen.append(((resolution,), after_s))


def request(request_id: int, steps: int = 2, size: Resolution = S, **fields: Any) -> Request:
    return Request(request_id, "", size, steps, **fields)


def admitting(*orders: Sequence[int]) -> FunctionPolicy:
    """At each decision, admits the waiting requests of the next of these ids, and those alone."""
    left = list(orders)

    def choose(now_s: float, waiting: Sequence[RequestView], active: Sequence[RequestView]) -> Decision:
        return Decision(admit=tuple(left.pop(0)) if left else ())

    return FunctionPolicy(choose)


def next_id(scheduler: Scheduler, now_s: float = 0.0) -> int | None:
    state = scheduler.next_to_prepare(now_s)
    return None if state is None else state.request.request_id


def prepare(scheduler: Scheduler, now_s: float = 0.0) -> int:
    """Prepare the next request at once."""
    state = scheduler.next_to_prepare(now_s)
    assert state is not None
    assert scheduler.prepared(state.request.request_id, now_s) is state
    return state.request.request_id


def ids(states: Sequence[RequestState]) -> list[int]:
    return [state.request.request_id for state in states]


def test_the_life_of_a_request() -> None:
    scheduler = Scheduler(get_policy("fcfs"))
    assert (scheduler.is_idle, scheduler.is_due, scheduler.can_step) == (True, False, False)
    state = scheduler.add(request(3, steps=2, arrival_s=1.0), standalone_s=0.5)
    assert (state.stage, state.view.standalone_s, scheduler.num_waiting) == ("waiting", 0.5, 1)
    assert scheduler.pixel_steps == 2 * S.pixels
    assert (scheduler.is_idle, scheduler.is_due) == (False, True)
    assert scheduler.next_to_prepare(1.25) is state
    # Admitted before it is prepared: there is nothing to do until then.
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


def test_which_request_is_prepared_next() -> None:
    scheduler = Scheduler(admitting([3], [0], []), max_prepared_ahead=2)
    for request_id in range(5):
        scheduler.add(request(request_id))
    assert next_id(scheduler) == 0
    assert next_id(scheduler) is None  # one at a time
    scheduler.prepared(0, 0.0)
    assert prepare(scheduler) == 1
    assert next_id(scheduler) is None  # two ahead, and no more
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


def test_requests_become_active_in_the_order_in_which_they_were_prepared() -> None:
    scheduler = Scheduler(admitting([1, 0]), max_prepared_ahead=1)
    for request_id in range(2):
        scheduler.add(request(request_id))
    assert next_id(scheduler) == 0
    scheduler.decide(0.0)
    scheduler.prepared(0, 1.0)
    assert prepare(scheduler, 1.0) == 1
    scheduler.decide(2.0)
    assert ids(scheduler.active) == [0, 1]


def test_a_batch_of_one_resolution_takes_its_first_step_together() -> None:
    scheduler = Scheduler(get_policy("static"), max_prepared_ahead=1)
    for request_id in range(2):
        scheduler.add(request(request_id))
    prepare(scheduler)
    scheduler.decide(0.0)
    assert (ids(scheduler.active), scheduler.num_waiting, scheduler.can_step) == ([0], 1, False)
    # If the other one fails, there is nobody to wait for.
    assert next_id(scheduler) == 1
    failed = scheduler.prepared(1, 1.0, failure="no words for it")
    assert failed is not None
    assert (failed.record.status, failed.record.reason) == ("failed", "no words for it")
    assert (scheduler.num_waiting, scheduler.can_step) == (0, True)
    check_scheduler(scheduler)


def test_failures_in_a_step_end_those_alone() -> None:
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
    # A step that failed for some was repeated in parts, so it teaches nothing.
    assert ids(scheduler.stepped(2.0, 0.75)) == [2]
    assert predictor.seen == [((S,), 0.75)]
    # Who ends whole tells how long decoding takes, without what it waited for; who fails in it does not.
    scheduler.end(0, "failed", 3.0, "no image")
    scheduler.end(2, "completed", 3.5)
    assert predictor.seen[1:] == [((S,), 0.5)]


def test_what_requests_wait_for_between_their_steps_is_told() -> None:
    predictor = Learning()
    scheduler = Scheduler(admitting([0], [1]), predictor)
    scheduler.add(request(0, 3))
    prepare(scheduler)
    scheduler.decide(10.0)
    for end_s, step_s in ((11.0, 1.0), (13.0, 0.5), (13.5, 0.5)):
        scheduler.stepped(end_s, step_s)
    assert predictor.between_s == [0.0, 1.5, 0.0]
    # Nobody waits while nothing is active.
    scheduler.add(request(1, 1))
    prepare(scheduler)
    scheduler.decide(20.0)
    assert ids(scheduler.stepped(21.0, 1.0)) == [1]
    assert predictor.between_s[3:] == [0.0]


def test_a_sampler_may_take_other_steps_than_were_asked_for() -> None:
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
    assert seen == [[], [0], [1], [1], [2]]  # in the steps that were asked for


def test_what_was_prepared_in_vain_is_told() -> None:
    drop = FunctionPolicy(lambda now_s, waiting, active: Decision(drop=((0, "late"),)))
    scheduler = Scheduler(drop)
    scheduler.add(request(0))
    scheduler.next_to_prepare(0.0)
    (dropped,) = scheduler.decide(1.0)
    assert (dropped.record.status, dropped.record.reason, dropped.record.finish_s) == ("discarded", "late", 1.0)
    assert next_id(scheduler) is None, "the stage is not free yet"
    assert scheduler.prepared(0, 2.0) is None
    assert scheduler.max_prepared == 0
    check_scheduler(scheduler)


def test_what_is_prepared_for_a_request_that_has_ended_is_not_for_the_next_of_its_id() -> None:
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


def test_wrong_use() -> None:
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


def test_a_request_without_latents_never_becomes_active() -> None:
    # It would stay in the batch for ever: no step could take it to its end.
    scheduler = _whole()
    scheduler._ready.append(scheduler._open[5])
    with pytest.raises(AssertionError, match="request without latents"):
        scheduler.decide(2.0)
    assert 5 not in ids(scheduler.active)


def test_decisions_are_timed() -> None:
    times_s: list[float] = []
    scheduler = Scheduler(get_policy("fcfs"), on_decision=times_s.append)
    scheduler.decide(0.0)
    assert times_s == [], "no request waits, so the policy is not asked"
    scheduler.add(request(0))
    scheduler.decide(0.0)
    assert len(times_s) == 1
    assert times_s[0] > 0


def _dropping(now_s: float, waiting: Sequence[RequestView], active: Sequence[RequestView]) -> Decision:
    """Of five requests that wait, drops one, leaves one waiting if it may, and admits three as far as there is room."""
    admit = [view.request_id for view in waiting if view.request_id % 5 < 3][: 6 - len(active)]
    drop = [(view.request_id, "unlucky") for view in waiting if view.request_id % 5 == 3]
    left = [view.request_id for view in waiting if view.request_id % 5 == 4]
    return Decision(admit=tuple(admit or ([] if active else left[:1])), drop=tuple(drop))


POLICIES: dict[str, Callable[[], Policy]] = {
    **{name: (lambda name=name: get_policy(name)) for name in ("fcfs", "static", "edf", "slack")},
    "dropping": lambda: FunctionPolicy(_dropping),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", POLICIES)
def test_any_order_of_events_keeps_it_whole(name: str, seed: int) -> None:
    """Arrivals, the ends of preparing, failures and cancellations come at random, also while a step is taken."""
    rng = random.Random(f"{name} {seed}")
    scheduler = Scheduler(POLICIES[name](), Learning(), max_batch_size=6, max_prepared_ahead=rng.randint(1, 8))
    ended: dict[int, str] = {}
    open_ids: set[int] = set()
    decoding: list[int] = []
    preparing: RequestState | None = None
    is_stepping, now_s, arrived = False, 0.0, 0

    def note(states: Sequence[RequestState]) -> None:
        for state in states:
            request_id = state.request.request_id
            if state.record.status == "pending":
                decoding.append(request_id)
                continue
            assert ended.setdefault(request_id, state.record.status) == state.record.status
            open_ids.remove(request_id)

    while arrived < 250 or open_ids or preparing is not None:
        now_s += rng.random()
        event = rng.choice(["arrive", "prepared", "prepared", "step", "step", "step", "decoded", "cancel"])
        if event == "arrive" and arrived < 250:
            size = rng.choice((S, L))
            slo_s = rng.choice((None, rng.uniform(1, 60)))
            scheduler.add(request(arrived, rng.randint(1, 6), size, arrival_s=now_s, slo_s=slo_s))
            open_ids.add(arrived)
            arrived += 1
        elif event == "prepared" and preparing is not None:
            failure = "broken" if rng.random() < 0.05 else None
            num_iterations = rng.choice((None, 2 * preparing.request.num_inference_steps - 1))
            if name in ("fcfs", "static"):
                num_iterations = None
            state = scheduler.prepared(
                preparing.request.request_id, now_s, num_iterations=num_iterations, failure=failure
            )
            preparing = None
            if state is not None and failure is not None:
                note([state])
        elif event == "step" and is_stepping:
            failures = {i: "broken" for i in ids(scheduler.active) if rng.random() < 0.02}
            note(scheduler.stepped(now_s, 1.0, failures))
            is_stepping = False
        elif event == "step":
            note(scheduler.decide(now_s))
            is_stepping = scheduler.can_step
        elif event == "decoded" and decoding:
            note([state for state in [scheduler.end(decoding.pop(0), "completed", now_s)] if state])
        elif event == "cancel" and open_ids and rng.random() < 0.1:
            victim = rng.choice(sorted(open_ids))
            if not is_stepping or victim not in ids(scheduler.active):
                note([state for state in [scheduler.end(victim, "cancelled", now_s)] if state])
                decoding[:] = [i for i in decoding if i != victim]
        if preparing is None:
            preparing = scheduler.next_to_prepare(now_s)
        check_scheduler(scheduler)
        assert scheduler.is_due or is_stepping or not open_ids or preparing or decoding, "it stands still"

    assert sorted(ended) == list(range(250))
    expected = {"completed", "failed", "cancelled"} | ({"discarded"} if name in ("dropping", "slack") else set())
    assert set(ended.values()) == expected
    # Nothing is kept of requests that have ended.
    assert scheduler.is_idle
    assert scheduler.pixel_steps == scheduler.num_prepared == 0
    kept = [value for value in vars(scheduler).values() if isinstance(value, (dict, list))]
    assert len(kept) >= 6
    assert not any(kept)


def _whole() -> Scheduler:
    """0 is decoding, 1 and 2 are active, 4 and 5 joining (4 is ready), 3 and 6 waiting (3 is prepared ahead)."""
    scheduler = Scheduler(admitting([0, 1, 2], [4, 5]), max_batch_size=4, max_prepared_ahead=3)
    for request_id, steps in enumerate((1, 2, 4, 2, 2, 2, 2)):
        scheduler.add(request(request_id, steps, L if request_id == 2 else S))
    for request_id in range(3):
        assert prepare(scheduler) == request_id
    scheduler.decide(0.0)
    scheduler.stepped(1.0, 1.0)
    assert prepare(scheduler) == 3
    scheduler.decide(1.0)
    assert prepare(scheduler) == 4
    return scheduler


DAMAGE: dict[str, Callable[[Scheduler], object]] = {
    "a request in two stages": lambda it: it._joining.update({1: it._open[1]}),
    "a request that does not know its stage": lambda it: setattr(it._open[5], "stage", "waiting"),
    "an active request that is not prepared": lambda it: setattr(it._active[0], "is_prepared", False),
    "active twice": lambda it: it._active.append(it._active[0]),
    "a lost waiting request": lambda it: it._waiting.remove(6),
    "a lost active request": lambda it: it._active.pop(),
    "a closed record": lambda it: it._open[6].record.close("failed", 0.0),
    "another resolution in the batch": lambda it: it.works.__setitem__(0, L),
    "a batch out of order": lambda it: it.works.reverse(),
    "wrong pixels": lambda it: setattr(it, "_batch_pixels", it._batch_pixels + 1),
    "wrong load": lambda it: setattr(it, "pixel_steps", it.pixel_steps + 1),
    "a missed last step": lambda it: setattr(it, "num_steps", it.num_steps + 9),
    "leaving too late": lambda it: setattr(it, "_next_leave", it._next_leave + 1),
    "one prepared too many": lambda it: setattr(it, "num_prepared", it.num_prepared + 1),
    "one ahead too many": lambda it: setattr(it, "_num_ahead", it._num_ahead + 1),
    "too many ahead": lambda it: setattr(it, "_max_ahead", 0),
    "ready without having joined": lambda it: it._ready.append(it._open[3]),
    "a request that is never prepared": lambda it: it._untouched.clear(),
    "too large a batch": lambda it: setattr(it, "_max_batch_size", 1),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_integrity_check_finds_damage(damage: str) -> None:
    scheduler = _whole()
    check_scheduler(scheduler)
    DAMAGE[damage](scheduler)
    with pytest.raises(AssertionError):
        check_scheduler(scheduler)


def test_a_smaller_batch_lets_those_stay_who_are_there() -> None:
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


def test_what_waits_can_be_taken_back() -> None:
    scheduler = Scheduler(get_policy("fcfs"), max_batch_size=1)
    for number in range(3):
        scheduler.add(Request(number, "", Resolution(64, 64), 2))
    first = scheduler.next_to_prepare(0.0)
    assert first is not None
    scheduler.prepared(first.request.request_id, 0.0)
    scheduler.decide(0.0)
    being_prepared = scheduler.next_to_prepare(0.0)
    assert being_prepared is not None
    assert [request.request_id for request in scheduler.take_back()] == [1, 2]
    # What is prepared for nobody is of no use; the ids are free again.
    assert scheduler.prepared(being_prepared.request.request_id, 0.1) is None
    assert scheduler.num_waiting == 0
    assert scheduler.pixel_steps == 2 * 64 * 64
    scheduler.add(Request(1, "", Resolution(64, 64), 2))
    scheduler.stepped(1.0, 1.0, {})
    scheduler.stepped(2.0, 1.0, {})
    scheduler.end(0, "completed", 2.5)
    assert not scheduler.is_idle
    scheduler.take_back()
    assert scheduler.is_idle
