"""Algorithm 1 on cases small enough to work out by hand, and the cost of a decision."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.resolution import Resolution
from patchedserve.serving.core.request_state import RequestView
from patchedserve.serving.scheduling.policies import Decision, Snapshot, WaitingQueue, get_policy
from patchedserve.serving.scheduling.policies.slack import TOO_LATE, SlackPolicy
from patchedserve.serving.scheduling.step_latency import MemoisedLatency

S, L = Resolution(128, 128), Resolution(256, 256)


class Steps:
    """Step latencies of `base_s` plus 1 s for each small and 3 s for each large image."""

    def __init__(self, base_s: float = 1.0) -> None:
        self.base_s = base_s

    def step_latency_s(self, active: Sequence[Any]) -> float:
        return self.base_s + sum(1.0 if size == S else 3.0 for size in active)


def view(
    request_id: int,
    size: Resolution = S,
    *,
    deadline_s: float | None,
    steps: int = 10,
    done: int = 0,
    alone_s: float | None = None,
    arrival_s: float = 0.0,
) -> RequestView:
    # With the base of 1 s, a step of one request alone takes 2 s (small) or 4 s (large).
    standalone_s = steps * (2.0 if size == S else 4.0) if alone_s is None else alone_s
    return RequestView(request_id, size, arrival_s, deadline_s, steps, done, standalone_s)


def decide(
    waiting: Sequence[RequestView],
    active: Sequence[RequestView] = (),
    *,
    now_s: float = 0.0,
    places: int = 16,
    base_s: float = 1.0,
    policy: SlackPolicy | None = None,
) -> Decision:
    return (policy or SlackPolicy()).decide(Snapshot(now_s, waiting, active, places, Steps(base_s)))


def test_least_slack_first_not_earliest_deadline() -> None:
    # Small, alone: (50 - 10 * 2) / 20 = 1.5.  Large, alone: (70 - 10 * 4) / 40 = 0.75. The large one is more urgent,
    # though its deadline is later. A step of both takes 5 s: 50 s for the small one, exactly its deadline, and 50 of
    # the 70 s that the large one has. In turns they take 4 + 2 = 6 s, merged 5 s: merging pays.
    waiting = [view(0, deadline_s=50.0), view(1, L, deadline_s=70.0)]
    assert decide(waiting) == Decision(admit=(1, 0))


def test_admission_stops_before_an_active_request_would_miss() -> None:
    # The active small one has 5 steps left. If the large one joins, each takes 5 s: 25 s.
    waiting = [view(1, L, deadline_s=1000.0)]
    assert decide(waiting, [view(0, deadline_s=25.0, done=5)]).admit == (1,)
    assert decide(waiting, [view(0, deadline_s=24.9, done=5)]) == Decision()
    # Lines 11 to 13 break: the small one behind it, which would fit (3 s a step, 15 s), is not tried.
    waiting = [view(1, L, deadline_s=100.0), view(2, deadline_s=1000.0)]
    assert decide(waiting, [view(0, deadline_s=24.9, done=5)]) == Decision()
    assert decide(waiting[1:], [view(0, deadline_s=24.9, done=5)]).admit == (2,)


class StepsAndEnds(Steps):
    """Step latencies with a measured time after the last step, known for small images only."""

    def after_steps_s(self, resolution: Resolution) -> float | None:
        return 4.0 if resolution == S else None

    def observe_end(self, resolution: Resolution, after_s: float) -> None:
        raise AssertionError("a policy learns nothing")


def test_time_after_the_steps_is_learnt_from_other_requests() -> None:
    # Ten steps take 2 s each. A slower engine measured the standalone latency of 50 s, 30 s beyond the steps; requests
    # that have ended took only 4 s.
    waiting = [view(0, deadline_s=24.0, alone_s=50.0)]
    assert decide(waiting).drop == ((0, TOO_LATE),)
    policy = SlackPolicy()
    assert policy.decide(Snapshot(0.0, waiting, [], 16, StepsAndEnds())) == Decision(admit=(0,))
    assert policy.decide(Snapshot(0.1, waiting, [], 16, StepsAndEnds())).drop == ((0, TOO_LATE),)
    # No large request has ended yet: 50 - 10 * 4 = 10 s.
    large = [view(0, L, deadline_s=50.0, alone_s=50.0)]
    assert policy.decide(Snapshot(0.0, large, [], 16, StepsAndEnds())).admit == (0,)
    assert policy.decide(Snapshot(0.1, large, [], 16, StepsAndEnds())).drop == ((0, TOO_LATE),)


def test_slack_includes_the_decoder_queue() -> None:
    # The decoder takes 4 s for each small one. Four have 10 steps left, of 5 s each in the batch of four: the steps end
    # at 50 s, and the images are decoded by 54, 58, 62 and 66 s. The fourth, admitted last, is decoded last.
    active = [view(i, deadline_s=None) for i in range(3)]
    policy, predictor = SlackPolicy(), StepsAndEnds()

    def decide_at(deadline_s: float, active: Sequence[RequestView], decoder_free_s: float = 0.0) -> Decision:
        return policy.decide(Snapshot(0.0, [view(9, deadline_s=deadline_s)], active, 16, predictor, decoder_free_s))

    assert decide_at(66.0, active) == Decision(admit=(9,))
    assert decide_at(65.9, active).drop == ((9, TOO_LATE),)
    # Those that end later are behind it; those that end earlier are decoded before it ends.
    assert decide_at(54.0, [view(i, deadline_s=None, steps=11) for i in range(3)]).admit == (9,)
    assert decide_at(54.0, [view(i, deadline_s=None, done=8 - i) for i in range(3)]).admit == (9,)
    assert decide_at(55.0, [view(i, deadline_s=None, done=1) for i in range(3)]).drop == ((9, TOO_LATE),)
    # The decoder's present work counts as far as it outlasts the steps.
    assert decide_at(24.0, [], decoder_free_s=20.0).admit == (9,)
    assert decide_at(24.0, [], decoder_free_s=20.1).drop == ((9, TOO_LATE),)


def test_candidate_decoded_before_an_active_request_can_delay_it() -> None:
    # Together a step takes 3 s: the active one takes its last step after 30 s and is decoded by 34 s. A candidate of
    # 8 steps is decoded before it, by 28 s; one of 9 by 31 s, which makes it late; one of 10 comes after it.
    active, policy = [view(0, deadline_s=34.0)], SlackPolicy()
    for steps, admitted in ((8, (1,)), (9, ()), (10, (1,))):
        waiting = [view(1, deadline_s=1000.0, steps=steps)]
        assert policy.decide(Snapshot(0.0, waiting, active, 16, StepsAndEnds())).admit == admitted, steps


def test_admitted_candidate_is_protected_from_later_ones() -> None:
    # Alone, the first needs 20 s of its 30. Two small ones together take 3 s a step, 30 s: exactly in time. With a
    # third, a step takes 4 s: 40 s.
    waiting = [view(i, deadline_s=30.0 + 1000 * (i > 0)) for i in range(3)]
    assert decide(waiting).admit == (0, 1)


def test_hopeless_candidate_is_discarded_and_the_next_is_tried() -> None:
    # 10 steps of 2 s cannot end by 19.9 s; by 20 s they can. The discarded one is the most urgent, so it comes first.
    waiting = [view(0, deadline_s=19.9), view(1, deadline_s=45.0)]
    assert decide(waiting) == Decision(admit=(1,), drop=((0, TOO_LATE),))
    assert decide([view(0, deadline_s=20.0)]) == Decision(admit=(0,))
    # "At once" means into the batch as it is: with two active small ones a step takes 4 s, 40 s in all.
    active = [view(7, deadline_s=None), view(8, deadline_s=None)]
    assert decide([view(0, deadline_s=39.9)], active) == Decision(drop=((0, TOO_LATE),))
    assert decide([view(0, deadline_s=40.0)], active) == Decision(admit=(0,))
    # The clock counts: the same deadline, a second later.
    assert decide([view(0, deadline_s=40.0)], active, now_s=1.0) == Decision(drop=((0, TOO_LATE),))


def test_slack_includes_stages_after_the_steps() -> None:
    # Served alone, it takes 26 s: 20 s of steps and 6 s in the other stages.
    assert decide([view(0, deadline_s=25.9, alone_s=26.0)]) == Decision(drop=((0, TOO_LATE),))
    assert decide([view(0, deadline_s=26.0, alone_s=26.0)]) == Decision(admit=(0,))
    # An active one needs them too: 5 steps of 3 s and 6 s are 21 s.
    waiting = [view(1, deadline_s=1000.0)]
    assert decide(waiting, [view(0, deadline_s=20.9, done=5, alone_s=26.0)]) == Decision()
    assert decide(waiting, [view(0, deadline_s=21.0, done=5, alone_s=26.0)]).admit == (1,)


def test_merging_requires_a_benefit() -> None:
    # With a base of 1 s, steps in turns take 2 + 2 = 4 s and a merged one 3 s: benefit 4 / 3. With a base of -0.5 s
    # (merging costs more), 0.5 + 0.5 = 1 s in turns and 1.5 s merged: 2 / 3.
    waiting, active = [view(1, deadline_s=1000.0)], [view(0, deadline_s=1000.0)]
    assert decide(waiting, active).admit == (1,)
    assert decide(waiting, active, base_s=-0.5) == Decision()
    assert decide(waiting, active, base_s=-0.5, policy=SlackPolicy(min_benefit=0.66)).admit == (1,)
    assert decide(waiting, active, policy=SlackPolicy(min_benefit=1.33)).admit == (1,)
    assert decide(waiting, active, policy=SlackPolicy(min_benefit=1.34)) == Decision()
    # With nothing active there is nothing to compare with.
    assert decide(waiting, base_s=-0.5, policy=SlackPolicy(min_benefit=99)).admit == (1,)


def test_late_active_request_blocks_no_candidate() -> None:
    # 10 steps of 2 s until 15 s: it is late with or without the candidate.
    assert decide([view(1, deadline_s=100.0)], [view(0, deadline_s=15.0)]).admit == (1,)
    # Another active one that the candidate would make late does hold it back: 7 steps by 25 s, of 3 s now, 4 s with it.
    active = [view(0, deadline_s=15.0), view(2, deadline_s=25.0, done=3)]
    assert decide([view(1, deadline_s=100.0)], active) == Decision()


def test_request_without_deadline_is_last_and_never_discarded() -> None:
    waiting = [view(0, deadline_s=None), view(1, deadline_s=1000.0, arrival_s=1.0), view(2, deadline_s=None)]
    assert decide(waiting, now_s=2.0).admit == (1, 0, 2)
    assert decide(waiting[:1], now_s=1e9).admit == (0,)


def test_missing_standalone_latency_is_estimated_from_steps() -> None:
    # Both have the same deadline and steps; the standalone latency of one was measured as 6 s more than its steps.
    plain = view(0, deadline_s=26.0)._replace(standalone_s=None)
    assert decide([plain]).admit == (0,)
    assert decide([plain._replace(deadline_s=19.9)]).drop == ((0, TOO_LATE),)
    # Slack (26 - 20) / 20 = 0.3 against (26 - 26) / 26 = 0.
    assert decide([plain, view(1, deadline_s=26.0, alone_s=26.0)], places=1).admit == (1,)


def test_no_free_place_gives_an_empty_decision() -> None:
    active = [view(7, deadline_s=None), view(8, deadline_s=None)]
    waiting = [view(0, deadline_s=1.0), view(1, deadline_s=1000.0)]
    assert decide(waiting, active, places=2) == Decision()
    assert decide(waiting, active, places=3) == Decision(admit=(1,), drop=((0, TOO_LATE),))


def test_equal_slack_is_ordered_by_arrival_then_id() -> None:
    waiting = [view(5, deadline_s=500.0), view(6, deadline_s=500.0), view(2, deadline_s=500.0, arrival_s=1.0)]
    assert decide(waiting, now_s=1.0).admit == (5, 6, 2)


def test_policy_needs_a_predictor() -> None:
    with pytest.raises(UsageError, match="policy slack looks ahead and needs step latencies, but none are given"):
        get_policy("slack").decide(Snapshot(0.0, [], [], 16))


@pytest.mark.parametrize("kept", [True, False])
def test_decision_with_1000_waiting_is_fast(kept: bool) -> None:
    # The bounds are on work, not on time: the predictor is called a few times for each request that is admitted or
    # dropped, and not for those that keep waiting. The time is printed (`pytest -s`).
    class Counting(Steps):
        calls = 0

        def step_latency_s(self, active: Sequence[Any]) -> float:
            self.calls += 1
            return super().step_latency_s(active)

    views = [
        view(i, (S, L)[i % 2], deadline_s=5000.0 + i % 97, arrival_s=i / 1000, alone_s=(20.0, 40.0)[i % 2])
        for i in range(1000)
    ]
    counting = Counting()
    waiting = WaitingQueue(views) if kept else views
    decision = SlackPolicy().decide(Snapshot(1.0, waiting, [], 16, counting))
    assert len(decision.admit) == 16
    assert counting.calls <= 2 + 16 * 2
    predictor = MemoisedLatency(Steps())
    SlackPolicy().decide(Snapshot(1.0, waiting, [], 16, predictor))
    times_s = []
    for _ in range(20):
        start = time.perf_counter()
        SlackPolicy().decide(Snapshot(1.0, waiting, [], 16, predictor))
        times_s.append(time.perf_counter() - start)
    print(f"\n1000 waiting, 16 admitted: {min(times_s) * 1e3:.2f} ms ({'kept' if kept else 'sorted anew'})")
