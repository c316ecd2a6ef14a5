"""The contract of policies, checked on random queues and in a small loop on a virtual clock."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.core.request_state import RequestView
from patchedserve.serving.scheduling.policies import (
    POLICY_NAMES,
    Decision,
    Policy,
    RecentAttainment,
    Snapshot,
    WaitingQueue,
    check_decision,
    get_policy,
)
from patchedserve.serving.scheduling.systems import DEFAULT_SYSTEM, SYSTEMS, get_system
from patchedserve.serving.simulator.distrifusion import PUBLISHED, DistriFusionLatency

SIZES = (Resolution(128, 128), Resolution(192, 192), Resolution(128, 256))
# Policies that never admit a request before one that arrived earlier.
BY_ARRIVAL = ("fcfs", "static", "continuous", "continuous-drop")
DROPPING = tuple(name for name in POLICY_NAMES if get_policy(name).requires_predictor)


class StepTimes:
    """Step latencies that `run` uses."""

    def step_latency_s(self, active: Sequence[Any]) -> float:
        return 0.1 + 0.05 * len(active)


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
    """Serve a trace with steps that take longer for larger batches; return admission order and last round by id."""
    arriving, waiting, active = list(trace), [], []
    joined_at: dict[int, int] = {}
    left_at: dict[int, int] = {}
    now_s, rounds = 0.0, 0
    while arriving or waiting or active:
        while arriving and arriving[0].arrival_s <= now_s:
            waiting.append(arriving.pop(0))
        snapshot = Snapshot(now_s, tuple(waiting), tuple(active), max_batch_size, StepTimes())
        decision = policy.decide(snapshot)
        check_decision(decision, snapshot, requires_one_resolution=policy.requires_one_resolution)
        by_id = {request.request_id: request for request in waiting}
        for request_id in decision.admit:
            active.append(by_id[request_id])
            joined_at[request_id] = len(joined_at)
        gone = {*decision.admit, *(request_id for request_id, _ in decision.drop)}
        left_at |= {request_id: rounds for request_id, _ in decision.drop}
        waiting = [request for request in waiting if request.request_id not in gone]
        if active:
            now_s += StepTimes().step_latency_s([request.resolution for request in active])
            active = [request._replace(steps_done=request.steps_done + 1) for request in active]
            left_at |= {request.request_id: rounds for request in active if request.steps_done == request.num_steps}
            active = [request for request in active if request.steps_done < request.num_steps]
        elif arriving:
            now_s = arriving[0].arrival_s
        rounds += 1
        assert rounds < 10_000, "the loop stands still"
    return joined_at, left_at


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_decisions_for_random_queues_satisfy_the_contract(name: str) -> None:
    rng = random.Random(name)
    policy = get_policy(name)
    assert policy.name == name
    dropped = 0
    for _ in range(400):
        max_batch_size = rng.randint(1, 6)
        waiting = tuple(random_views(rng, rng.randint(0, 12)))
        num_active = rng.randint(0, max_batch_size)
        active = tuple(request._replace(steps_done=0) for request in random_views(rng, num_active, first_id=100))
        if policy.requires_one_resolution and active:
            active = tuple(one._replace(resolution=SIZES[0], num_steps=3) for one in active)
        attainment = RecentAttainment(rng.random(), frozenset(rng.sample(SIZES, rng.randint(0, 3))))
        snapshot = Snapshot(20.0, waiting, active, max_batch_size, StepTimes(), 0.0, attainment)
        decision = policy.decide(snapshot)
        check_decision(decision, snapshot, requires_one_resolution=policy.requires_one_resolution)
        again = policy.decide(replace(snapshot, waiting=WaitingQueue(waiting[::-1])))
        assert again == decision, "not a function of its arguments"
        ids = [request.request_id for request in waiting]
        if name in BY_ARRIVAL:
            assert list(decision.admit) == [i for i in ids if i in decision.admit], "not in order of arrival"
        dropped += len(decision.drop)
    assert (dropped > 0) == (name in DROPPING)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_no_request_starves(name: str) -> None:
    rng = random.Random(name)
    for _ in range(30):
        trace = random_views(rng, rng.randint(1, 40))
        max_batch_size = rng.randint(1, 8)
        joined_at, left_at = run(get_policy(name), trace, max_batch_size)
        assert set(left_at) == {request.request_id for request in trace}
        assert name in DROPPING or set(joined_at) == set(left_at)


@pytest.mark.parametrize("name", ["fcfs", "continuous"])
def test_arrival_order_is_kept_over_a_run(name: str) -> None:
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
        # The oldest request leads each batch, so a request waits for at most one batch of 4 per earlier request.
        for position, request in enumerate(trace):
            assert joined_at[request.request_id] < 4 * (position + 1)


def test_fcfs_serves_one_at_a_time() -> None:
    policy = get_policy("fcfs")
    assert policy.decide(Snapshot(9, [view(0), view(1)], [], 16)) == Decision(admit=(0,))
    assert policy.decide(Snapshot(9, [view(1)], [view(0, steps_done=1)], 16)) == Decision()
    assert policy.decide(Snapshot(9, [], [], 16)) == Decision()


def test_static_admits_all_that_match_the_head() -> None:
    policy = get_policy("static")
    waiting = [view(0), view(1, side=192), view(2), view(3, num_steps=9), view(4), view(5)]
    assert policy.decide(Snapshot(9, waiting, [], 16)).admit == (0, 2, 4, 5)
    assert policy.decide(Snapshot(9, waiting, [], 3)).admit == (0, 2, 4)
    assert policy.decide(Snapshot(9, waiting[1:], [], 16)).admit == (1,)
    assert policy.decide(Snapshot(9, waiting, [view(9, steps_done=1)], 16)) == Decision(), "joined a running batch"
    assert policy.decide(Snapshot(9, [], [], 16)) == Decision()


def test_continuous_joins_at_any_step_and_mixes() -> None:
    policy = get_policy("continuous")
    waiting = [view(0), view(1, side=192), view(2, num_steps=9)]
    for steps_done in range(4):
        active = [view(7, steps_done=steps_done), view(8, side=256, num_steps=30)]
        assert policy.decide(Snapshot(9, waiting, active, 4)).admit == (0, 1)
        assert policy.decide(Snapshot(9, waiting, active, 16)).admit == (0, 1, 2)
        assert policy.decide(Snapshot(9, waiting, active, 2)) == Decision()


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_invalid_batch_sizes_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="max_batch_size is 0, but it must be at least 1"):
        get_policy(name).decide(Snapshot(0, [view(0)], [], 0, StepTimes()))
    with pytest.raises(ValueError, match="2 requests are active, but max_batch_size is 1"):
        get_policy(name).decide(Snapshot(0, [], [view(0), view(1)], 1, StepTimes()))


def test_policy_names() -> None:
    assert POLICY_NAMES == (
        "fcfs", "static", "continuous", "continuous-drop", "edf", "edf-drop", "slack", "edf-fitting", "fair-fitting",
    )  # fmt: skip
    with pytest.raises(UsageError, match="policy is 'slck', but it must be one of fcfs, static, continuous, "):
        get_policy("slck")


def test_systems_are_presets_of_engine_and_policy() -> None:
    parts = {name: (each.engine, each.policy, each.cache) for name, each in SYSTEMS.items()}
    assert parts == {
        "diffusers": ("plain", "static", "off"),
        "diffusers-fcfs": ("plain", "fcfs", "off"),
        "bucketed": ("plain", "continuous", "off"),
        "nirvana": ("plain", "continuous", "off"),
        "distrifusion": ("parallel", "fcfs", "off"),
        "distrifusion-fcfs": ("plain", "fcfs", "off"),
        "patched-slack": ("patched", "fair-fitting", "off"),
        "patched-schedule": ("patched", "fair-fitting", "schedule"),
        "patched-fcfs": ("patched", "continuous", "patch"),
        "patched-edf": ("patched", "edf", "patch"),
        "patchedserve": ("patched", "slack", "patch"),
    }
    assert get_system(DEFAULT_SYSTEM).cache == "off", "what is served by default is exact"


def test_single_choices_override_a_system() -> None:
    ours = get_system("patchedserve")
    assert ours.overridden() == ours
    assert ours.overridden(policy="edf") == replace(ours, policy="edf")
    assert ours.overridden(cache="off") == replace(ours, cache="off")
    assert ours.overridden(engine="plain") == replace(ours, engine="plain", cache="off"), "plain diffusers has no cache"
    with pytest.raises(UsageError, match="policy is 'bucketed', but it must be one of"):
        ours.overridden(policy="bucketed")


def test_system_with_another_policy_has_its_own_name() -> None:
    other = get_system("patchedserve:edf-drop")
    assert other == replace(SYSTEMS["patchedserve"], name="patchedserve:edf-drop", policy="edf-drop")
    with pytest.raises(UsageError, match="policy is 'none', but it must be one of fcfs, "):
        get_system("patchedserve:none")
    with pytest.raises(UsageError, match="system is 'none', but it must be one of diffusers, "):
        get_system("none:edf")


def test_unknown_systems_are_reported() -> None:
    with pytest.raises(UsageError, match="system is 'patched', but it must be one of diffusers, diffusers-fcfs"):
        get_system("patched")
    with pytest.raises(UsageError, match=r"'distrifusion-fcfs' \(only in the simulator\), but it must be one of"):
        get_system("distrifusion-fcfs")
    assert get_system("distrifusion-fcfs", is_simulated=True).spans_gpus


def test_edf_admits_the_earliest_deadline() -> None:
    waiting = [
        view(0)._replace(deadline_s=9.0),
        view(1),
        view(2, side=192)._replace(deadline_s=5.0),
        view(3)._replace(deadline_s=9.0),
        view(4, num_steps=9)._replace(deadline_s=7.0),
    ]
    policy = get_policy("edf")
    assert policy.decide(Snapshot(4, waiting, [], 16)).admit == (2, 4, 0, 3, 1)
    # Two places are taken. The requests are late already and still not dropped.
    assert policy.decide(Snapshot(40, waiting, [view(7), view(8)], 4)) == Decision(admit=(2, 4))


@pytest.mark.parametrize(("asked", "given"), [(1, 1), (2, 2), (10, 8), (30, 24), (50, 40), (100, 79)])
def test_nirvana_runs_79_of_100_steps(asked: int, given: int) -> None:
    request = Request(0, "a", SIZES[0], asked)
    assert get_system("nirvana").adapt(request) == replace(request, num_inference_steps=given)
    assert get_system("bucketed").adapt(request) is request


def test_distrifusion_speedups_equal_those_of_the_paper() -> None:
    square, wide, huge = Resolution(1024, 1024), Resolution(1280, 1920), Resolution(3840, 3840)
    assert [round(PUBLISHED.of(square, gpus), 1) for gpus in (1, 2, 4, 8)] == [1.0, 1.5, 2.2, 2.8]
    assert round(PUBLISHED.of(wide, 4), 1) == 3.0
    assert [PUBLISHED.of(huge, gpus) for gpus in (2, 4, 8)] == [1.8, 3.4, 6.1]
    assert PUBLISHED.of(Resolution(2048, 2048), 8) == pytest.approx(4.93, abs=0.01)
    # sqrt(2048 * 3840) = 2804.3 is halfway between 2048 and 3840 in the logarithm of the pixels: (4.93 + 6.1) / 2.
    assert PUBLISHED.of(Resolution(2804, 2804), 8) == pytest.approx(5.51, abs=0.01)
    assert PUBLISHED.of(Resolution(128, 128), 8) == PUBLISHED.of(square, 8)
    assert PUBLISHED.of(Resolution(8000, 8000), 4) == 3.4
    with pytest.raises(
        UsageError, match="number of GPUs is 3, but distrifusion-fcfs knows speedups only for 1, 2, 4, 8"
    ):
        PUBLISHED.of(square, 3)
    latency = DistriFusionLatency(StepTimes(), 2)
    assert latency.step_latency_s([huge]) == pytest.approx(0.15 / 1.8)
    with pytest.raises(ValueError, match="2 images are active"):
        latency.step_latency_s([huge, huge])


def test_waiting_queue_stays_ordered_as_requests_join_and_leave() -> None:
    rng = random.Random(5)
    queue, kept = WaitingQueue(), {}
    for request in random_views(rng, 150):
        queue.add(request)
        kept[request.request_id] = request
        if rng.random() < 0.4:
            gone = rng.choice(list(kept))
            assert queue.remove(gone) == kept.pop(gone)
        in_order = sorted(kept.values(), key=lambda view: (view.arrival_s, view.request_id))
        assert (list(queue), len(queue), queue[:3]) == (in_order, len(kept), in_order[:3])
        assert sorted(map(tuple, queue.groups)) == sorted(map(tuple, WaitingQueue(in_order).groups))
        for group in queue.groups:
            assert group == sorted(group)
    with pytest.raises(ValueError, match=f"request {queue[0].request_id} is waiting already"):
        queue.add(queue[0])
    with pytest.raises(KeyError):
        queue.remove(9999)
    assert queue.get(9999) is None


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
def test_invalid_decisions_are_detected(decision: Decision, message: str) -> None:
    waiting = [view(0), view(1, side=192), view(2)]
    with pytest.raises(RuntimeError, match=message):
        check_decision(decision, Snapshot(0, waiting, [view(7)], 3), requires_one_resolution=True)


def test_stalled_decisions_are_detected() -> None:
    waiting = [view(0), view(1)]
    with pytest.raises(RuntimeError, match="admitted none of 2 waiting requests although nothing is active"):
        check_decision(Decision(), Snapshot(0, waiting, [], 3))
    check_decision(Decision(), Snapshot(0, waiting, [view(7)], 3))
    check_decision(Decision(), Snapshot(0, waiting, [], 3), is_decoding=True)
    check_decision(Decision(drop=((0, "late"), (1, "late"))), Snapshot(0, waiting, [], 3))
    check_decision(Decision(), Snapshot(0, [], [], 3))
