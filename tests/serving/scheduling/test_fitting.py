"""Slack scheduling that passes over who does not fit, on cases small enough to be worked out by hand."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.resolution import Resolution
from patchedserve.serving.core.request_state import RequestView
from patchedserve.serving.scheduling.policies import Decision, WaitingQueue, get_policy
from patchedserve.serving.scheduling.policies.fitting import FittingPolicy
from patchedserve.serving.scheduling.policies.slack import TOO_LATE
from patchedserve.serving.scheduling.step_latency import MemoisedLatency

from ...support.machine_speed import reference_s, slowness
from .test_slack import L, Steps, view


class Exact(FittingPolicy):
    margin = 0.0


EXACT = Exact()


def decide(
    waiting: Sequence[RequestView],
    active: Sequence[RequestView] = (),
    *,
    now_s: float = 0.0,
    places: int = 16,
    policy: FittingPolicy = EXACT,
) -> Decision:
    return policy.decide(now_s, waiting, active, places, Steps())


def test_who_would_make_an_active_request_late_is_passed_over() -> None:
    # The active small one has 5 steps left. Joined by the large one each takes 5 s, by a small one 3 s.
    waiting = [view(1, L, deadline_s=100.0), view(2, deadline_s=1000.0)]
    assert decide(waiting, [view(0, deadline_s=24.9, done=5)]) == Decision(admit=(2,))
    assert get_policy("slack").decide(0.0, waiting, [view(0, deadline_s=24.9, done=5)], 16, Steps()) == Decision()
    # Nobody is made late who is late anyway.
    assert decide(waiting, [view(0, deadline_s=5.0, done=5)]).admit == (1, 2)


def test_who_would_be_late_in_the_batch_waits_and_who_would_be_late_alone_is_discarded() -> None:
    # Alone it takes 20 s, with the active large one 50 s.
    active = [view(0, L, deadline_s=None, done=5)]
    assert decide([view(1, deadline_s=30.0), view(2, deadline_s=19.0), view(3, deadline_s=50.0)], active) == Decision(
        admit=(3,), drop=((2, TOO_LATE),)
    )
    # It is the batch's turn to end: alone it starts at once.
    assert decide([view(1, deadline_s=30.0)]).admit == (1,)


def test_of_those_who_fit_the_most_urgent_is_first_and_each_sees_the_batch_with_those_before() -> None:
    # Slacks (50 - 20) / 20 and (70 - 40) / 40: the large one first. Then a step of both takes 5 s.
    waiting = [view(0, deadline_s=50.0), view(1, L, deadline_s=70.0)]
    assert decide(waiting).admit == (1, 0)
    assert decide([view(0, deadline_s=49.0), view(1, L, deadline_s=70.0)]).admit == (1,)


def test_steps_of_a_batch_have_a_margin_and_those_of_one_alone_have_none() -> None:
    # A step of both takes 5 s, ten of them 50 s; with a twentieth more 52.5 s.
    careful = FittingPolicy()
    active = [view(0, L, deadline_s=None)]
    assert decide([view(1, deadline_s=52.0)], active).admit == (1,)
    assert decide([view(1, deadline_s=52.0)], active, policy=careful).admit == ()
    assert decide([view(1, deadline_s=53.0)], active, policy=careful).admit == (1,)
    assert decide([view(1, deadline_s=20.0)], policy=careful).admit == (1,)


def test_without_a_deadline_a_request_comes_last_but_not_for_ever() -> None:
    waiting = [view(1, L, deadline_s=None), view(2, deadline_s=1000.0)]
    assert decide(waiting, places=1).admit == (2,)
    # The large one has waited for more than 20 times its 40 s: nobody goes before it, and it goes when nobody is late.
    waiting[1] = view(2, deadline_s=2000.0)
    assert decide(waiting, now_s=801.0, places=1).admit == (1,)
    active = [view(0, deadline_s=801.0 + 24.9, done=5)]
    assert decide(waiting, active, now_s=801.0) == Decision()
    assert decide(waiting, active, now_s=799.0 + 1.0).admit == (2,)


@pytest.mark.parametrize("name", ["continuous-drop", "edf-drop", "slack-fitting"])
def test_it_needs_a_predictor(name: str) -> None:
    with pytest.raises(UsageError, match=f"policy {name} looks ahead and needs step latencies, but none are given"):
        get_policy(name).decide(0.0, [], [], 16)


def test_simple_policies_discard_who_is_too_late_and_keep_their_order() -> None:
    waiting = [view(0, deadline_s=90.0), view(1, deadline_s=19.0), view(2, deadline_s=50.0), view(3, deadline_s=None)]
    late = ((1, TOO_LATE),)
    assert get_policy("continuous-drop").decide(0.0, waiting, [], 2, Steps()) == Decision((0, 2), late)
    assert get_policy("edf-drop").decide(0.0, waiting, [], 2, Steps()) == Decision((2, 0), late)
    assert get_policy("edf-drop").decide(0.0, waiting, [view(9, deadline_s=None)], 1, Steps()) == Decision()


@pytest.mark.parametrize("name", ["slack", "slack-fitting"])
def test_a_decision_with_a_thousand_waiting_takes_a_millisecond(name: str) -> None:
    """With 15 in the batch; the time is divided by how much slower than usual the machine is at this moment."""
    sizes = (Resolution(128, 128), Resolution(192, 192), L)
    waiting = WaitingQueue([view(i, sizes[i % 3], deadline_s=300.0 + i, arrival_s=i / 1000) for i in range(1000)])
    active = [view(1000 + i, sizes[i % 3], deadline_s=1e4, done=i % 10) for i in range(15)]

    class Sized(Steps):
        def step_latency_s(self, active: Sequence[Any]) -> float:
            return 0.05 + 1e-6 * sum(size.pixels for size in active)

    predictor, times_s, references_s = MemoisedLatency(Sized()), [], []
    policy = get_policy(name)
    assert policy.decide(1.0, waiting, active, 16, predictor).admit
    for _ in range(30):
        references_s.append(reference_s())
        start_s = time.process_time()
        policy.decide(1.0, waiting, active, 16, predictor)
        times_s.append(time.process_time() - start_s)
    assert min(times_s) / slowness(min(references_s)) < 1e-3
