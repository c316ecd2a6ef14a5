"""Policies: the contract, checked on random queues and by running them in a small loop on a virtual clock."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.resolution import Resolution
from patchedserve.serving.lifecycle import RequestView
from patchedserve.serving.policies import POLICY_NAMES, Decision, Policy, check_decision, get_policy

SIZES = (Resolution(128, 128), Resolution(192, 192), Resolution(128, 256))


def random_views(rng: random.Random, count: int, first_id: int = 0) -> list[RequestView]:
    arrivals = sorted(rng.choice([0.0, rng.uniform(0, 20)]) for _ in range(count))
    return [
        RequestView(
            request_id=first_id + i,
            resolution=rng.choice(SIZES),
            arrival_s=arrival_s,
            deadline_s=rng.choice([None, arrival_s + rng.uniform(0.1, 9)]),
            num_steps=rng.choice([1, 3, 8]),
        )
        for i, arrival_s in enumerate(arrivals)
    ]


def view(request_id: int, side: int = 128, num_steps: int = 4, steps_done: int = 0) -> RequestView:
    return RequestView(request_id, Resolution(side, side), float(request_id), None, num_steps, steps_done)


def run(policy: Policy, trace: Sequence[RequestView], max_batch_size: int) -> tuple[dict[int, int], dict[int, int]]:
    """Serve a trace, each step taking longer the more it computes. Returns admission order and number of rounds."""
    arriving, waiting, active = list(trace), [], []
    joined_at: dict[int, int] = {}
    left_at: dict[int, int] = {}
    now_s, rounds = 0.0, 0
    while arriving or waiting or active:
        while arriving and arriving[0].arrival_s <= now_s:
            waiting.append(arriving.pop(0))
        decision = policy.decide(now_s, tuple(waiting), tuple(active), max_batch_size)
        check_decision(
            decision, waiting, active, max_batch_size, requires_one_resolution=policy.requires_one_resolution
        )
        by_id = {request.request_id: request for request in waiting}
        for request_id in decision.admit:
            active.append(by_id[request_id])
            joined_at[request_id] = len(joined_at)
        gone = {*decision.admit, *(request_id for request_id, _ in decision.drop)}
        waiting = [request for request in waiting if request.request_id not in gone]
        if active:
            now_s += 0.1 + 0.05 * len(active)
            active = [replace(request, steps_done=request.steps_done + 1) for request in active]
            left_at |= {request.request_id: rounds for request in active if request.steps_remaining == 0}
            active = [request for request in active if request.steps_remaining > 0]
        elif arriving:
            now_s = arriving[0].arrival_s
        rounds += 1
        assert rounds < 10_000, "the loop stands still"
    return joined_at, left_at


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_random_queues_keep_the_contract(name: str) -> None:
    rng = random.Random(name)
    policy = get_policy(name)
    assert policy.name == name
    for _ in range(400):
        max_batch_size = rng.randint(1, 6)
        waiting = tuple(random_views(rng, rng.randint(0, 12)))
        num_active = rng.randint(0, max_batch_size)
        active = tuple(replace(request, steps_done=0) for request in random_views(rng, num_active, first_id=100))
        if policy.requires_one_resolution and active:
            active = tuple(replace(one, resolution=SIZES[0], num_steps=3) for one in active)
        decision = policy.decide(20.0, waiting, active, max_batch_size)
        check_decision(
            decision, waiting, active, max_batch_size, requires_one_resolution=policy.requires_one_resolution
        )
        assert policy.decide(20.0, waiting, active, max_batch_size) == decision, "not a function of its arguments"
        ids = [request.request_id for request in waiting]
        assert list(decision.admit) == [i for i in ids if i in decision.admit], "not in order of arrival"
        assert decision.drop == ()


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_nobody_starves(name: str) -> None:
    rng = random.Random(name)
    for _ in range(30):
        trace = random_views(rng, rng.randint(1, 40))
        max_batch_size = rng.randint(1, 8)
        joined_at, left_at = run(get_policy(name), trace, max_batch_size)
        assert set(joined_at) == set(left_at) == {request.request_id for request in trace}


@pytest.mark.parametrize("name", ["fcfs", "bucketed"])
def test_order_of_arrival_is_kept_over_a_run(name: str) -> None:
    rng = random.Random(1)
    for _ in range(20):
        trace = random_views(rng, 30)
        joined_at, _ = run(get_policy(name), trace, rng.randint(1, 8))
        assert list(joined_at) == [request.request_id for request in trace]


def test_static_keeps_the_order_within_a_kind_and_bounds_the_wait() -> None:
    rng = random.Random(2)
    for _ in range(20):
        trace = random_views(rng, 30)
        joined_at, _ = run(get_policy("static"), trace, 4)
        kinds = {(request.resolution, request.num_steps) for request in trace}
        for kind in kinds:
            mine = [request.request_id for request in trace if (request.resolution, request.num_steps) == kind]
            assert [i for i in joined_at if i in mine] == mine
        # The oldest leads each batch, so a request waits for one batch of at most 4 for each one that came before it.
        for position, request in enumerate(trace):
            assert joined_at[request.request_id] < 4 * (position + 1)


def test_fcfs_is_one_by_one() -> None:
    policy = get_policy("fcfs")
    assert policy.decide(9, [view(0), view(1)], [], 16) == Decision(admit=(0,))
    assert policy.decide(9, [view(1)], [view(0, steps_done=1)], 16) == Decision()
    assert policy.decide(9, [], [], 16) == Decision()


def test_static_takes_all_that_match_the_head() -> None:
    policy = get_policy("static")
    waiting = [view(0), view(1, side=192), view(2), view(3, num_steps=9), view(4), view(5)]
    assert policy.decide(9, waiting, [], 16).admit == (0, 2, 4, 5)
    assert policy.decide(9, waiting, [], 3).admit == (0, 2, 4)
    assert policy.decide(9, waiting[1:], [], 16).admit == (1,)
    assert policy.decide(9, waiting, [view(9, steps_done=1)], 16) == Decision(), "joined a running batch"
    assert policy.decide(9, [], [], 16) == Decision()


def test_bucketed_joins_at_any_step_and_mixes() -> None:
    policy = get_policy("bucketed")
    waiting = [view(0), view(1, side=192), view(2, num_steps=9)]
    for steps_done in range(4):
        active = [view(7, steps_done=steps_done), view(8, side=256, num_steps=30)]
        assert policy.decide(9, waiting, active, 4).admit == (0, 1)
        assert policy.decide(9, waiting, active, 16).admit == (0, 1, 2)
        assert policy.decide(9, waiting, active, 2) == Decision()


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_bad_batch_sizes(name: str) -> None:
    with pytest.raises(ValueError, match="max_batch_size is 0, but it must be at least 1"):
        get_policy(name).decide(0, [view(0)], [], 0)
    with pytest.raises(ValueError, match="2 requests are active, but max_batch_size is 1"):
        get_policy(name).decide(0, [], [view(0), view(1)], 1)


def test_names() -> None:
    assert POLICY_NAMES == ("fcfs", "static", "bucketed")
    with pytest.raises(UsageError, match="policy is 'slck', but it must be one of fcfs, static, bucketed"):
        get_policy("slck")


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        (Decision(admit=(5,)), r"named requests \[5\], which are not waiting"),
        (Decision(admit=(7,)), r"named requests \[7\], which are not waiting"),
        (Decision(admit=(0,), drop=((6, "late"),)), r"named requests \[6\]"),
        (Decision(admit=(0, 0)), "named a request twice"),
        (Decision(admit=(0,), drop=((0, "late"),)), "named a request twice"),
        (Decision(admit=(0, 1, 2)), "admitted 3 requests to 1 active ones, but max_batch_size is 3"),
        (Decision(admit=(0, 1)), "mixed resolutions"),
    ],
)
def test_broken_decisions_are_found(decision: Decision, message: str) -> None:
    waiting = [view(0), view(1, side=192), view(2)]
    with pytest.raises(RuntimeError, match=message):
        check_decision(decision, waiting, [view(7)], 3, requires_one_resolution=True)


def test_standing_still_is_found() -> None:
    waiting = [view(0), view(1)]
    with pytest.raises(RuntimeError, match="admitted none of 2 waiting requests although nothing is active"):
        check_decision(Decision(), waiting, [], 3)
    check_decision(Decision(), waiting, [view(7)], 3)
    check_decision(Decision(drop=((0, "late"), (1, "late"))), waiting, [], 3)
    check_decision(Decision(), [], [], 3)
