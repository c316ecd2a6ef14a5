"""The scheduler's state stays consistent under random drivers, and its integrity check detects damage."""

import random
from collections.abc import Callable, Sequence

import pytest

from patchedserve.serving.core.request_state import RequestState, RequestView
from patchedserve.serving.scheduling.policies import Decision, Policy, get_policy
from patchedserve.serving.scheduling.scheduler import Scheduler

from ...support.function_policy import FunctionPolicy
from ...support.scheduler_cases import L, Learning, S, ids, request, whole_scheduler
from ...support.scheduler_check import check_scheduler


def _dropping(now_s: float, waiting: Sequence[RequestView], active: Sequence[RequestView]) -> Decision:
    """Out of five waiting requests, drop one, leave one waiting if allowed, and admit three while there is room."""
    admit = [view.request_id for view in waiting if view.request_id % 5 < 3][: 6 - len(active)]
    drop = [(view.request_id, "unlucky") for view in waiting if view.request_id % 5 == 3]
    left = [view.request_id for view in waiting if view.request_id % 5 == 4]
    return Decision(admit=tuple(admit or ([] if active else left[:1])), drop=tuple(drop))


POLICIES: dict[str, Callable[[], Policy]] = {
    **{name: (lambda name=name: get_policy(name)) for name in ("fcfs", "static", "edf", "slack", "fair-fitting")},
    "dropping": lambda: FunctionPolicy(_dropping),
}


@pytest.mark.product
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", POLICIES)
def test_random_event_orders_keep_the_scheduler_consistent(name: str, seed: int) -> None:
    """Arrivals, completed preparations, failures and cancellations come at random, also during a step."""
    rng = random.Random(f"{name} {seed}")
    scheduler = Scheduler(POLICIES[name](), Learning(), max_batch_size=6, max_prepared_ahead=rng.randint(1, 8))
    ended: dict[int, str] = {}
    open_ids: set[int] = set()
    decoding: list[int] = []
    preparing: RequestState | None = None
    is_stepping, now_s, arrived, num_admitted = False, 0.0, 0, 0

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
            # The "dropping" policy does not read the number of free places.
            yields = name != "dropping" and slo_s is None and rng.random() < 0.6
            rank = {"owner": rng.choice(("", "a")), "priority": rng.choice((0, 0, 1, -1))}
            asked = request(arrived, rng.randint(1, 6), size, arrival_s=now_s, slo_s=slo_s, yields=yields, **rank)
            scheduler.add(asked)
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
            waiting = {i: one.request for i, one in scheduler._open.items() if one.stage == "waiting"}
            note(scheduler.decide(now_s))
            is_stepping = scheduler.can_step
            left = {i for i, one in scheduler._open.items() if one.stage == "waiting"}
            admitted = [one for i, one in waiting.items() if i in scheduler._open.keys() - left]
            for one in admitted:
                is_overdue = one.deadline_s is not None and one.deadline_s < now_s
                others = [scheduler._open[i].request for i in left]
                others = [each for each in others if (each.owner, each.yields) == (one.owner, one.yields)]
                assert is_overdue or all(one.priority <= each.priority for each in others)
            num_admitted += len(admitted)
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
    assert num_admitted > 50
    expected = {"completed", "failed", "cancelled"} | (
        {"discarded"} if name in ("dropping", "slack", "fair-fitting") else set()
    )
    assert set(ended.values()) == expected
    # The scheduler keeps nothing of requests that have ended.
    assert scheduler.is_idle
    assert scheduler.pixel_steps == scheduler.num_prepared == len(scheduler._decoding) == 0
    kept = [value for value in vars(scheduler).values() if isinstance(value, (dict, list))]
    assert len(kept) >= 4
    assert not any(kept)
    for room in (scheduler._waiting, scheduler._yielding):
        assert (len(room), room.untouched, room.num_ahead, room._classes, room._by_owner) == (0, {}, 0, {}, {})


DAMAGE: dict[str, Callable[[Scheduler], object]] = {
    "a request in two stages": lambda it: it._joining.update({1: it._open[1]}),
    "a request that does not know its stage": lambda it: setattr(it._open[5], "stage", "waiting"),
    "an active request that is not prepared": lambda it: setattr(it._active[0], "is_prepared", False),
    "active twice": lambda it: it._active.append(it._active[0]),
    "a lost waiting request": lambda it: it._waiting.queue.remove(6),
    "a request held back for none": lambda it: it._waiting.held.update({6: it._waiting.queue.remove(6)}),
    "a lost active request": lambda it: it._active.pop(),
    "a closed record": lambda it: it._open[6].record.close("failed", 0.0),
    "another resolution in the batch": lambda it: it.works.__setitem__(0, L),
    "a batch out of order": lambda it: it.works.reverse(),
    "wrong pixels": lambda it: setattr(it, "_batch_pixels", it._batch_pixels + 1),
    "wrong load": lambda it: setattr(it, "pixel_steps", it.pixel_steps + 1),
    "a missed last step": lambda it: setattr(it, "num_steps", it.num_steps + 9),
    "leaving too late": lambda it: setattr(it, "_next_leave", it._next_leave + 1),
    "one prepared too many": lambda it: setattr(it, "num_prepared", it.num_prepared + 1),
    "one ahead too many": lambda it: setattr(it._waiting, "num_ahead", it._waiting.num_ahead + 1),
    "too many ahead": lambda it: setattr(it, "_max_ahead", 0),
    "ready without having joined": lambda it: it._ready.append(it._open[3]),
    "a request that is never prepared": lambda it: it._waiting.untouched.clear(),
    "too large a batch": lambda it: setattr(it, "_max_batch_size", 1),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_integrity_check_finds_damage(damage: str) -> None:
    scheduler = whole_scheduler()
    check_scheduler(scheduler)
    DAMAGE[damage](scheduler)
    with pytest.raises(AssertionError):
        check_scheduler(scheduler)
