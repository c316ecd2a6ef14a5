"""Deadline scheduling that passes over requests that do not fit, on cases small enough to work out by hand."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.resolution import Resolution
from patchedserve.serving.core.request_state import RequestView
from patchedserve.serving.scheduling.policies import (
    ALL_IN_TIME,
    Decision,
    RecentAttainment,
    Snapshot,
    WaitingQueue,
    get_policy,
)
from patchedserve.serving.scheduling.policies.fitting import EdfFittingPolicy, FairFittingPolicy
from patchedserve.serving.scheduling.policies.slack import TOO_LATE
from patchedserve.serving.scheduling.step_latency import MemoisedLatency

from ...support.machine_speed import reference_s, slowness
from .test_slack import L, S, Steps, view

OVERLOADED = RecentAttainment(in_time=0.9)


def active_view(deadline_s: float | None, size: Resolution = S) -> RequestView:
    """An active request with 5 of 10 steps left; it arrived so long ago that it limits no step latency."""
    return view(0, size, deadline_s=deadline_s, done=5, arrival_s=-1000.0)


class Exact(EdfFittingPolicy):
    margin = 0.0
    share_of_slo = 1.0


class ExactAndFair(FairFittingPolicy):
    margin = 0.0
    share_of_slo = 1.0


EXACT = Exact()


def decide(
    waiting: Sequence[RequestView],
    active: Sequence[RequestView] = (),
    *,
    now_s: float = 0.0,
    places: int = 16,
    policy: EdfFittingPolicy = EXACT,
    attainment: RecentAttainment = ALL_IN_TIME,
) -> Decision:
    return policy.decide(Snapshot(now_s, waiting, active, places, Steps(), 0.0, attainment))


def test_requests_that_would_delay_active_ones_are_skipped() -> None:
    # The active small one has 5 steps left. Each takes 5 s if the large one joins, 3 s if a small one does.
    waiting = [view(1, L, deadline_s=100.0), view(2, deadline_s=1000.0)]
    assert decide(waiting, [active_view(24.9)]) == Decision(admit=(2,))
    assert get_policy("slack").decide(Snapshot(0.0, waiting, [active_view(24.9)], 16, Steps())) == Decision()
    # An active request that is late anyway holds back no candidate.
    assert decide(waiting, [active_view(5.0)]).admit == (1, 2)


def test_late_in_the_batch_waits_and_late_alone_is_discarded() -> None:
    # A small request takes 20 s alone and 50 s beside the active large one.
    active = [active_view(None, L)]
    waiting = [view(1, deadline_s=30.0), view(2, deadline_s=19.0), view(3, deadline_s=50.0, arrival_s=-1000.0)]
    assert decide(waiting[1:], active, attainment=OVERLOADED) == Decision(admit=(3,), drop=((2, TOO_LATE),))
    # The one that waits holds back those that would slow it down.
    assert decide(waiting, active, attainment=OVERLOADED) == Decision(drop=((2, TOO_LATE),))
    # Once the batch has ended, the request starts at once, alone.
    assert decide([view(1, deadline_s=30.0)]).admit == (1,)


def test_late_requests_are_served_last_without_overload() -> None:
    waiting = [view(i, deadline_s=due_s, arrival_s=-15.0) for i, due_s in ((1, 19.0), (2, 10.0), (3, 500.0))]
    assert decide(waiting, places=2) == Decision(admit=(3, 2))
    assert decide(waiting) == Decision(admit=(3, 2, 1))
    # While another request still waits or would be made late, the late ones wait as well.
    assert decide(waiting, places=1) == Decision(admit=(3,))
    active = [active_view(12.0)]
    assert decide(waiting[:2], active) == Decision()
    assert decide(waiting[:2], active, attainment=OVERLOADED).drop == ((2, TOO_LATE), (1, TOO_LATE))
    # A request that could never have been in time is discarded: it takes 20 s alone.
    assert decide([*waiting, view(4, deadline_s=5.0, arrival_s=-14.0)]) == Decision((3, 2, 1), ((4, TOO_LATE),))
    # A request that was passed over still waits although a later one has joined.
    passed_over = [view(3, deadline_s=29.0, arrival_s=-1000.0), view(4, deadline_s=50.0, arrival_s=-1000.0)]
    assert decide([waiting[0], *passed_over], [active_view(1e4)]) == Decision(admit=(4,))


def test_fitting_requests_are_admitted_by_deadline_and_cumulatively() -> None:
    # A step of both takes 5 s.
    waiting = [view(0, deadline_s=50.0), view(1, L, deadline_s=70.0)]
    assert decide(waiting).admit == (0, 1)
    assert decide([view(0, deadline_s=49.0), view(1, L, deadline_s=70.0)]).admit == (0,)


def test_only_steps_of_shared_batches_have_a_margin() -> None:
    # A step of both takes 5 s, ten of them 50 s; with a margin of 5 %, 52.5 s.
    careful = EdfFittingPolicy()
    active = [view(0, L, deadline_s=None)]
    old = {"now_s": 100.0, "policy": careful}
    assert decide([view(1, deadline_s=152.0)], active, now_s=100.0).admit == (1,)
    assert decide([view(1, deadline_s=152.0)], active, **old).admit == ()
    assert decide([view(1, deadline_s=153.0)], active, **old).admit == (1,)
    assert decide([view(1, deadline_s=120.0)], **old).admit == (1,)


def test_step_latency_is_limited_by_the_tightest_deadline() -> None:
    # The large ones have plenty of time, but the small one has 30 s for 10 steps, so no step may exceed 3 s.
    small = view(1, deadline_s=30.0)
    large = [view(2, L, deadline_s=1e4), view(3, L, deadline_s=1e4)]
    assert decide([*large, small]).admit == (1,), "5 s a step, with a large one"
    assert decide(large, [view(1, deadline_s=30.0, done=9)]) == Decision(), "while it runs, too"
    assert decide(large).admit == (2, 3)
    # The first tenth of its time is reserved for waiting, which leaves 27 s.
    careful = EdfFittingPolicy()
    two = [view(1, deadline_s=32.0), view(2, deadline_s=32.0)]
    assert decide(two).admit == (1, 2)
    assert decide(two, policy=careful).admit == (1,)
    # A kind that would exceed its planned time even alone limits no step.
    assert decide([*large, view(4, deadline_s=21.0)], policy=careful, now_s=0.5).admit == (4,)
    assert decide(large, [view(0, L, deadline_s=None)]).admit == (2, 3)
    assert decide([*large, view(4, deadline_s=21.0)], [view(0, L, deadline_s=None)], policy=careful).admit == (2, 3)
    assert decide(large, [view(4, deadline_s=15.0, done=1)], policy=careful).admit == (2, 3), "nor while it runs"


def test_resolution_that_is_behind_is_admitted_first() -> None:
    fair = ExactAndFair()
    behind = RecentAttainment(0.5, frozenset({L}))
    waiting = [view(1, deadline_s=500.0), view(2, L, deadline_s=600.0)]
    assert decide(waiting, places=1, policy=fair).admit == (1,)
    assert decide(waiting, places=1, policy=fair, attainment=behind).admit == (2,)
    assert decide(waiting, places=1, attainment=behind).admit == (1,), "the other policy does not look at it"
    # The large one would make the active one late. No small one joins, so the batch drains for the large one.
    active = [active_view(24.9)]
    assert decide(waiting, active, policy=fair).admit == (1,)
    assert decide(waiting, active, policy=fair, attainment=behind) == Decision()
    # No large request waits.
    assert decide(waiting[:1], active, policy=fair, attainment=behind).admit == (1,)


def test_request_without_deadline_is_last_but_does_not_starve() -> None:
    waiting = [view(1, L, deadline_s=None), view(2, deadline_s=1000.0)]
    assert decide(waiting, places=1).admit == (2,)
    # The large one has waited for more than 20 times its 40 s: none precedes it, and it joins once it makes none late.
    waiting[1] = view(2, deadline_s=2000.0)
    assert decide(waiting, now_s=801.0, places=1).admit == (1,)
    active = [active_view(801.0 + 24.9)]
    assert decide(waiting, active, now_s=801.0) == Decision()
    assert decide(waiting, active, now_s=799.0 + 1.0).admit == (2,)


@pytest.mark.parametrize("name", ["continuous-drop", "edf-drop", "edf-fitting"])
def test_policy_needs_a_predictor(name: str) -> None:
    with pytest.raises(UsageError, match=f"policy {name} looks ahead and needs step latencies, but none are given"):
        get_policy(name).decide(Snapshot(0.0, [], [], 16))


def test_simple_policies_discard_late_requests_and_keep_their_order() -> None:
    waiting = [view(0, deadline_s=90.0), view(1, deadline_s=19.0), view(2, deadline_s=50.0), view(3, deadline_s=None)]
    late = ((1, TOO_LATE),)
    assert get_policy("continuous-drop").decide(Snapshot(0.0, waiting, [], 2, Steps())) == Decision((0, 2), late)
    assert get_policy("edf-drop").decide(Snapshot(0.0, waiting, [], 2, Steps())) == Decision((2, 0), late)
    assert get_policy("edf-drop").decide(Snapshot(0.0, waiting, [view(9, deadline_s=None)], 1, Steps())) == Decision()


@pytest.mark.parametrize("name", ["slack", "fair-fitting"])
def test_decision_with_1000_waiting_takes_a_millisecond(name: str) -> None:
    """The batch holds 15 requests; the time is divided by the machine's current slowdown."""
    sizes = (Resolution(128, 128), Resolution(192, 192), L)
    waiting = WaitingQueue([view(i, sizes[i % 3], deadline_s=300.0 + i, arrival_s=i / 1000) for i in range(1000)])
    active = [view(1000 + i, sizes[i % 3], deadline_s=1e4, done=i % 10) for i in range(15)]

    class Sized(Steps):
        def step_latency_s(self, active: Sequence[Any]) -> float:
            return 0.05 + 1e-6 * sum(size.pixels for size in active)

    predictor, times_s, references_s = MemoisedLatency(Sized()), [], []
    policy = get_policy(name)
    assert policy.decide(Snapshot(1.0, waiting, active, 16, predictor)).admit
    for _ in range(30):
        references_s.append(reference_s())
        start_s = time.process_time()
        policy.decide(Snapshot(1.0, waiting, active, 16, predictor))
        times_s.append(time.process_time() - start_s)
    assert min(times_s) / slowness(min(references_s)) < 1e-3
