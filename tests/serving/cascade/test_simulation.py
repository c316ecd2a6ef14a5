"""The simulated cascade: every request ends once, thresholds decide on deferral, and workers follow the plans."""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.cascade.allocators import (
    Allocator,
    Cluster,
    DiffServe,
    Fixed,
    Observations,
    Proteus,
    clipper,
    static,
)
from patchedserve.serving.cascade.controller import Controller
from patchedserve.serving.cascade.deferral import deferral_curve
from patchedserve.serving.cascade.dispatcher import Dispatcher, OnLate
from patchedserve.serving.cascade.legs import Leg
from patchedserve.serving.cascade.problem import AllocationPlan, ModelTimes
from patchedserve.serving.cascade.result import CascadeResult
from patchedserve.serving.cascade.simulation import CascadeModel, simulate_cascade
from patchedserve.serving.scheduling.routers import FewestPixels
from patchedserve.serving.simulator.stage_times import StageTimes
from patchedserve.serving.simulator.step_durations import ProfiledSteps, StepDurations

SIZE = Resolution(128, 128)
BATCHES = (1, 2, 4, 8)


class Steps:
    """Step latencies of `step_s` for one request, and half as much again for each further one."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    def step_latency_s(self, active: Sequence[Any]) -> float:
        return self._step_s * (1 + 0.5 * (len(active) - 1))


def model(num_steps: int, step_s: float, decode_s: float = 0.01, switch_s: float = 0.1) -> CascadeModel:
    steps = Steps(step_s)
    latency_s = tuple(num_steps * steps.step_latency_s([SIZE] * b) + b * decode_s for b in BATCHES)
    times = ModelTimes(
        BATCHES, tuple(b / each for b, each in zip(BATCHES, latency_s, strict=True)), {str(SIZE): latency_s}
    )
    return CascadeModel(
        num_steps,
        4.0,
        times,
        StepDurations(ProfiledSteps(steps)),
        StageTimes({SIZE: 0.001}, {SIZE: decode_s}),
        switch_s,
    )


MODELS: dict[Leg, CascadeModel] = {"light": model(2, 0.05), "heavy": model(20, 0.05)}
SLO_S = 3.0
CLUSTER = Cluster(6, MODELS["light"].batches, MODELS["heavy"].batches, {str(SIZE): SLO_S})
CONFIDENCES = [random.Random(1).betavariate(2, 2) for _ in range(500)]


def trace(rate: float, count: int, seed: int = 0) -> list[Request]:
    chance, now_s, found = random.Random(seed), 0.0, []
    for number in range(count):
        now_s += chance.expovariate(rate)
        found.append(Request(number, "a cat", SIZE, 20, 4.0, seed=number, arrival_s=now_s, slo_s=SLO_S))
    return found


def confidence_of(number: int) -> float:
    return CONFIDENCES[number % len(CONFIDENCES)]


def run(
    requests: list[Request],
    allocate: Allocator,
    confidence_of: Callable[[int], float] = confidence_of,
    *,
    direct: Callable[[int], float] = lambda number: 0.0,
    on_late: OnLate = "discard",
) -> CascadeResult:
    dispatcher = Dispatcher(MODELS, Controller(allocate, CONFIDENCES), FewestPixels(), direct, on_late, "plan")
    return simulate_cascade(requests, MODELS, dispatcher, confidence_of, num_workers=6)


def check(result: CascadeResult, requests: list[Request]) -> None:
    """Check the invariants of every run."""
    assert [record.request_id for record in result.records] == [request.request_id for request in requests]
    assert all(record.status in ("completed", "discarded") for record in result.records)
    legs = Counter((row.request_id, row.leg) for row in result.legs if row.status == "completed")
    assert max(legs.values()) == 1
    for row in result.legs:
        if row.confidence is not None:
            assert row.is_deferred == (row.confidence < (row.threshold or 0.0))
    served = {row.request_id: row for row in result.legs if row.status == "completed" and not row.is_deferred}
    served_by = result.served_by()
    for record in result.records:
        if record.status == "completed":
            assert served[record.request_id].leg == served_by[record.request_id]
            assert (record.finish_s or 0.0) - record.arrival_s >= 0.1
    for plan_row in result.plans:
        assert plan_row.plan.num_light + plan_row.plan.num_heavy == 6


def test_thresholds_decide_and_every_request_ends_once() -> None:
    requests = trace(8.0, 600)
    result = run(requests, DiffServe(CLUSTER))
    check(result, requests)
    shares = Counter(result.served_by().values())
    assert shares["light"] > 50
    assert shares["heavy"] > 50
    late = sum(record.slo_met is not True for record in result.records)
    assert late < 0.2 * len(requests)
    assert result == run(requests, DiffServe(CLUSTER))


def test_more_demand_reduces_the_heavy_share_and_the_plan_follows() -> None:
    calm, busy = (run(trace(rate, 400), DiffServe(CLUSTER)) for rate in (2.0, 30.0))
    share = [Counter(result.served_by().values())["heavy"] / len(result.records) for result in (calm, busy)]
    assert share[0] > share[1] + 0.2
    assert calm.plans[-1].plan.num_light < busy.plans[-1].plan.num_light
    assert busy.num_switches > 0


def test_baseline_systems() -> None:
    requests = trace(6.0, 300)
    light, heavy = (
        run(requests, clipper(CLUSTER, "light")),
        run(requests, clipper(CLUSTER, "heavy"), direct=lambda _: 0.5),
    )
    check(light, requests)
    check(heavy, requests)
    assert set(light.served_by().values()) == {"light"}
    assert set(heavy.served_by().values()) == {"heavy"}
    assert not any(row.confidence for row in (*light.legs, *heavy.legs))
    chance = random.Random(3)
    draws = [chance.random() for _ in requests]
    proteus = run(requests, Proteus(CLUSTER), direct=lambda number: draws[number])
    check(proteus, requests)
    assert 0 < Counter(proteus.served_by().values())["light"] < 300
    # No request is drawn twice.
    assert proteus.wasted_s == 0


def test_at_constant_demand_static_and_dynamic_plans_are_the_same() -> None:
    curve = deferral_curve(CONFIDENCES)
    plan = static(CLUSTER, curve, 6.0).plan
    assert DiffServe(CLUSTER)(Observations(6.0, curve)) == plan


def test_late_heavy_image_may_be_replaced_by_the_light_one() -> None:
    plan = AllocationPlan(5, 1, 4, 1, 0.6, 0.5)
    requests = trace(10.0, 200)
    discarded, light = (run(requests, Fixed(plan), on_late=each) for each in ("discard", "light"))
    check(discarded, requests)
    lost = [record for record in discarded.records if record.status == "discarded"]
    assert len(lost) > 20
    assert all(record.status == "completed" for record in light.records)
    assert all("late" in (record.reason or "") for record in lost)


def test_deferred_requests_without_a_heavy_worker_wait_and_are_refused() -> None:
    requests = trace(5.0, 50)
    result = run(requests, Fixed(AllocationPlan(6, 0, 4, 0, 0.5, 0.5)))
    check(result, requests)
    assert {record.reason for record in result.records if record.status == "discarded"} == {
        "no worker has the heavy model"
    }


def test_nan_confidence_is_deferred() -> None:
    result = run(trace(1.0, 20), DiffServe(CLUSTER), lambda _: math.nan)
    assert set(result.served_by().values()) == {"heavy"}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_simulating_100000_requests_takes_under_a_minute() -> None:
    import time

    requests = trace(12.0, 100_000)
    start_s = time.perf_counter()
    result = run(requests, DiffServe(CLUSTER))
    assert time.perf_counter() - start_s < 60
    check(result, requests)


def test_replacing_a_plan_keeps_workers_that_have_not_switched_yet() -> None:
    """Plans alternate every period: a worker that has not left its model yet keeps it, and no request is lost."""
    first, second = AllocationPlan(5, 1, 2, 2, 0.5, 0.4), AllocationPlan(2, 4, 2, 2, 0.5, 0.4)
    plans = iter([first, *([second, first] * 200)])
    requests = trace(8.0, 300)
    result = run(requests, lambda observed: next(plans))
    check(result, requests)
    assert result.num_switches > 10
    assert replace(first, num_light=2, num_heavy=4) == second
