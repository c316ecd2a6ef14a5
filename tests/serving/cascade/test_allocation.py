"""Both solvers against exhaustive search, and invariants of every plan."""

import math
import random
import time
from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from patchedserve.data.errors import UsageError
from patchedserve.serving.cascade.allocators import Cluster, Observations, Shared
from patchedserve.serving.cascade.deferral import deferral_curve
from patchedserve.serving.cascade.enumeration import enumerate_plan
from patchedserve.serving.cascade.milp import Milp
from patchedserve.serving.cascade.problem import AllocationPlan, DeferralCurve, ModelTimes, Problem, waiting_s
from patchedserve.serving.cascade.systems import CascadeKnobs

from ...support.machine_speed import reference_s, slowness

BATCHES = (1, 2, 4, 8, 16, 32)


def times_of(chance: random.Random, step_s: float, names: tuple[str, ...], count: int) -> ModelTimes:
    """Return random times; larger batches take longer and draw more images a second."""
    gain = chance.uniform(0.5, 1.0)
    latency_s = {name: tuple(step_s * chance.uniform(0.7, 1.4) * b**gain for b in BATCHES[:count]) for name in names}
    throughput = tuple(b / (step_s * b**gain) for b in BATCHES[:count])
    return ModelTimes(BATCHES[:count], throughput, latency_s)


def random_problem(chance: random.Random) -> Problem:
    names = ("256x256", "128x256")[: chance.randint(1, 2)]
    workers, light_s = chance.randint(1, 16), chance.uniform(0.05, 0.5)
    light = times_of(chance, light_s, names, chance.randint(1, 6))
    heavy = times_of(chance, light_s * chance.uniform(1, 20), names, chance.randint(1, 6))
    # Few distinct confidences leave plateaus in the curve.
    confidences = [round(chance.betavariate(2, 2), chance.choice((1, 2, 6))) for _ in range(chance.randint(1, 200))]
    demand = chance.choice((0.0, 1.0, chance.uniform(0, 2 * workers / light_s)))
    slo_s = light.mean_latency_s(0) + heavy.mean_latency_s(0) * chance.uniform(0.3, 5)
    if chance.random() < 0.06:
        slo_s = 0.3 * light.mean_latency_s(0)
    return Problem(
        workers,
        demand,
        light,
        heavy,
        deferral_curve(confidences, chance.choice((0.005, 0.05))),
        {name: slo_s * chance.uniform(1, 2) for name in names},
        light_wait_s=chance.choice((0.0, chance.uniform(0, slo_s), math.inf)),
        heavy_wait_s=chance.choice((0.0, chance.uniform(0, slo_s), math.inf)),
        light_workers=chance.choice((None, chance.randint(0, workers))),
    )


def by_brute_force(problem: Problem, *, with_waiting: bool) -> float | None:
    """Return the largest feasible threshold over all worker counts, batch sizes and thresholds; None if none is."""
    best = None
    waits = (problem.light_wait_s, problem.heavy_wait_s) if with_waiting else (0.0, 0.0)
    load, workers = problem.load, problem.num_workers
    thresholds, shares = np.array(problem.curve.thresholds), np.array(problem.curve.shares)
    for light, heavy in product(range(len(problem.light.batch_sizes)), range(len(problem.heavy.batch_sizes))):
        alone_s, both_s = (
            max(
                problem.light.latency_s[name][light]
                + waits[0]
                + has_heavy * problem.heavy.latency_s[name][heavy]
                + (waits[1] if has_heavy else 0.0)
                - slo_s
                for name, slo_s in problem.slos_s.items()
            )
            for has_heavy in (False, True)
        )
        for num_light, num_heavy in product(range(1, workers + 1), range(workers)):
            if num_light + num_heavy > workers or num_light * problem.light.throughput[light] < load * (1 - 1e-9):
                continue
            is_drawn = num_heavy * problem.heavy.throughput[heavy] * (1 + 1e-9) >= load * shares
            is_fine = is_drawn & (num_heavy >= 1) & (both_s <= 0)
            is_fine[0] = alone_s <= 0
            if is_fine.any():
                best = max(best or 0.0, float(thresholds[is_fine].max()))
    return best


@pytest.mark.exhaustive
@pytest.mark.slow
def test_both_solvers_equal_brute_force() -> None:
    chance, milp, seen = random.Random(0), Milp(), Counter[str]()
    for _ in range(200):
        problem = random_problem(chance)
        plan = enumerate_plan(problem)
        seen[plan.status] += 1
        seen["plateau"] += len(set(problem.curve.shares)) < len(problem.curve.shares) / 2
        assert milp(problem) == plan
        wanted = {
            name: by_brute_force(problem, with_waiting=name == "optimal") for name in ("optimal", "without-queues")
        }
        if wanted["optimal"] is not None:
            assert (plan.status, plan.threshold) == ("optimal", wanted["optimal"])
        elif wanted["without-queues"] is not None:
            assert (plan.status, plan.threshold) == ("without-queues", wanted["without-queues"])
        else:
            assert plan.status in ("light-only", "overloaded")
        check(problem, plan)
    assert milp.num_replaced == 0
    assert sum(seen[name] for name in ("without-queues", "light-only", "overloaded")) >= 30
    assert min(seen["light-only"], seen["overloaded"], seen["without-queues"], seen["plateau"]) >= 5


def check(problem: Problem, plan: AllocationPlan) -> None:
    """Check equations 1 to 4 of DiffServe."""
    assert plan.num_light + plan.num_heavy == problem.num_workers
    assert plan.threshold is not None
    assert plan.share == problem.curve.share(plan.threshold)
    if plan.status in ("light-only", "overloaded"):
        assert (plan.num_heavy, plan.threshold) == (0, 0.0)
        return
    light = problem.light.batch_sizes.index(plan.light_batch)
    assert plan.num_light * problem.light.throughput[light] >= problem.load * (1 - 1e-9)
    heavy = problem.heavy.batch_sizes.index(plan.heavy_batch) if plan.heavy_batch else None
    assert (heavy is None) == (plan.threshold == 0)
    if heavy is not None:
        assert plan.num_heavy * problem.heavy.throughput[heavy] >= problem.load * plan.share * (1 - 1e-9)
    assert problem.is_in_time(light, heavy, with_waiting=plan.status == "optimal")


def test_threshold_never_rises_with_demand() -> None:
    chance = random.Random(1)
    for _ in range(50):
        problem = replace(random_problem(chance), light_wait_s=0.0, heavy_wait_s=0.0)
        plans = [enumerate_plan(replace(problem, demand=demand)) for demand in np.linspace(0, 40, 60)]
        thresholds = [plan.threshold or 0.0 for plan in plans if plan.status == "optimal"]
        assert thresholds == sorted(thresholds, reverse=True)


def test_improving_curve_finds_the_best_feasible_threshold() -> None:
    chance, seen = random.Random(3), Counter[bool]()
    for _ in range(60):
        problem = random_problem(chance)
        most = by_brute_force(problem, with_waiting=True)
        if most is None:
            continue
        worth = {threshold: round(chance.random(), 1) for threshold in problem.curve.thresholds}
        plan = enumerate_plan(replace(problem, curve=problem.curve.improving(worth.__getitem__)))
        possible = [threshold for threshold in problem.curve.thresholds if threshold <= most]
        assert plan.status == "optimal"
        assert plan.threshold is not None
        assert worth[plan.threshold] == max(worth[threshold] for threshold in possible)
        assert plan.share == problem.curve.share(plan.threshold)
        seen[plan.threshold == most] += 1
    assert min(seen[True], seen[False]) >= 5


def test_monotonic_worth_keeps_every_threshold() -> None:
    curve = example().curve
    assert curve.improving(lambda threshold: threshold) == curve
    assert curve.improving(lambda threshold: -threshold) == DeferralCurve((0.0,), (0.0,))
    knobs = CascadeKnobs(quality=((0.0, 30.0), (0.5, 20.0), (1.0, 24.0)))
    worth = knobs.worth()
    assert worth is not None
    assert [worth(threshold) for threshold in (0.0, 0.25, 0.5, 1.0)] == [-30.0, -25.0, -20.0, -24.0]
    assert curve.improving(worth).thresholds == (0.0, 0.25, 0.5)
    assert CascadeKnobs().worth() is None


def example(**changes: object) -> Problem:
    light = ModelTimes((1, 2), (10.0, 14.0), {"a": (0.1, 0.15)})
    heavy = ModelTimes((1, 2), (1.0, 1.5), {"a": (1.0, 1.4)})
    curve = DeferralCurve((0.0, 0.25, 0.5, 0.75, 1.0), (0.0, 0.1, 0.2, 0.2, 0.9))
    return replace(Problem(8, 20.0, light, heavy, curve, {"a": 3.0}), **changes)  # type: ignore[arg-type]


def test_plans_match_manual_values() -> None:
    # 21 requests a second need 2 light workers with batches of 2; 6 heavy ones draw 9 a second, or 42.8 %.
    assert enumerate_plan(example()) == AllocationPlan(2, 6, 2, 2, 0.75, 0.2)
    # With light batches of 1, 3 and 5 workers suffice as well; if 3 are light already, none has to switch.
    assert enumerate_plan(example(light_workers=3)) == AllocationPlan(3, 5, 1, 2, 0.75, 0.2)
    assert enumerate_plan(example(demand=0.0)) == AllocationPlan(1, 7, 1, 2, 1.0, 0.9)
    assert enumerate_plan(example(heavy_wait_s=1.9)) == AllocationPlan(3, 5, 1, 1, 0.75, 0.2)
    assert enumerate_plan(example(heavy_wait_s=5.0)) == AllocationPlan(3, 5, 1, 0, 0.0, 0.0)
    assert enumerate_plan(example(light_wait_s=5.0)) == AllocationPlan(2, 6, 2, 2, 0.75, 0.2, "without-queues")
    assert enumerate_plan(example(demand=200.0)) == AllocationPlan(8, 0, 2, 0, 0.0, 0.0, "light-only")
    assert enumerate_plan(example(slos_s={"a": 0.12}, demand=200.0)) == AllocationPlan(
        8, 0, 1, 0, 0.0, 0.0, "light-only"
    )
    assert enumerate_plan(example(slos_s={"a": 0.05})) == AllocationPlan(8, 0, 2, 0, 0.0, 0.0, "overloaded")
    assert enumerate_plan(example(num_workers=1, demand=1.0)) == AllocationPlan(1, 0, 1, 0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_workers": 0}, "there are 0 workers"),
        ({"demand": -1.0}, "demand is -1 requests a second"),
        ({"demand": math.nan}, "demand is nan"),
        ({"overprovision": 0.0}, "lambda is 0, but it must be a positive number"),
        ({"overprovision": math.nan}, "lambda is nan"),
        ({"slos_s": {"b": 3.0}}, "the light model is profiled for a, but SLOs are given for b"),
    ],
)
def test_values_out_of_range_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        example(**changes)


@pytest.mark.parametrize("numbers", [(1.0,), (1.0, 0.0), (1.0, -2.0), (1.0, math.nan), (1.0, math.inf)])
def test_profiles_have_positive_numbers_only(numbers: tuple[float, ...]) -> None:
    with pytest.raises(UsageError, match="for throughput, but it must have a positive number for each"):
        ModelTimes((1, 2), numbers, {"a": (1.0, 2.0)})
    with pytest.raises(UsageError, match="for a, but it must have a positive number"):
        ModelTimes((1, 2), (1.0, 2.0), {"a": numbers})


@pytest.mark.parametrize(
    ("thresholds", "shares", "message"),
    [
        ((), (), "0 thresholds and 0 shares"),
        ((0.0, 0.5), (0.0,), "2 thresholds and 1 shares"),
        ((0.1, 0.5), (0.0, 0.5), "nothing is deferred at threshold 0"),
        ((0.0, 0.5, 0.4), (0.0, 0.5, 0.6), "must ascend"),
        ((0.0, 0.5, math.nan), (0.0, 0.5, 0.6), "must ascend"),
        ((0.0, 0.5, 0.6), (0.0, 0.5, 0.4), "must not descend"),
        ((0.0, 0.5), (0.0, 1.5), "must not descend, and be 1 at most"),
    ],
)
def test_invalid_curves_are_refused(thresholds: tuple[float, ...], shares: tuple[float, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DeferralCurve(thresholds, shares)


def test_waiting_time_follows_littles_law() -> None:
    assert waiting_s(0, 0, 0) == 0
    assert waiting_s(6, 2, 100) == 3
    assert waiting_s(6, 0, 3) == 2
    assert waiting_s(6, 0, 0) == math.inf


@pytest.mark.exhaustive
@pytest.mark.slow
def test_planning_is_fast() -> None:
    """With 16 workers, 201 thresholds and all batch sizes, p95 on a core is < 50 ms (HiGHS), < 2 ms (enumeration)."""
    chance = random.Random(2)
    problems = []
    while len(problems) < 30:
        problem = random_problem(chance)
        if not len(problem.light.batch_sizes) == len(problem.heavy.batch_sizes) == 6:
            continue
        curve = deferral_curve([chance.betavariate(2, 2) for _ in range(5000)], 0.005)
        kept = tuple(range(0, len(curve.thresholds), max(1, len(curve.thresholds) // 201)))[:200]
        curve = DeferralCurve(
            (*(curve.thresholds[k] for k in kept), 1.0), (*(curve.shares[k] for k in kept), curve.shares[-1])
        )
        problems.append(replace(problem, num_workers=16, curve=curve, light_workers=None))
    for solver, most_s in ((enumerate_plan, 0.002), (Milp(), 0.05)):
        taken_s = []
        for problem in problems:
            # CPU time, the least of five tries, divided by the machine's current slowdown: other work takes its caches.
            tries_s, references_s = [], []
            for _ in range(5):
                references_s.append(reference_s())
                start_s = time.process_time()
                solver(problem)
                tries_s.append(time.process_time() - start_s)
            taken_s.append(min(tries_s) / slowness(min(references_s)))
        assert np.percentile(taken_s, 95) < most_s


def test_shared_workers_get_the_largest_feasible_threshold() -> None:
    chance, seen = random.Random(1), Counter[str]()
    for _ in range(600):
        problem = random_problem(chance)
        count = min(len(problem.light.batch_sizes), len(problem.heavy.batch_sizes))
        light, heavy = (_first(times, count) for times in (problem.light, problem.heavy))
        cluster = Cluster(problem.num_workers, light, heavy, dict(problem.slos_s))
        waiting, arrivals = chance.choice((0, 0, 3)), chance.uniform(0.1, 10)
        plan = Shared(cluster)(Observations(problem.demand, problem.curve, waiting, 0.0, arrivals, 0.0))
        seen[plan.status] += 1
        assert (plan.num_light, plan.num_heavy, plan.light_batch) == (problem.num_workers,) * 2 + (plan.heavy_batch,)
        wanted = {}
        for name, wait_s in (("optimal", waiting / arrivals), ("without-queues", 0.0)):
            fine = [
                t
                for t, f in zip(problem.curve.thresholds, problem.curve.shares, strict=True)
                for b in range(count)
                if problem.load * (1 / light.throughput[b] + f / heavy.throughput[b]) <= problem.num_workers + 1e-9
                and all(
                    light.latency_s[size][b] + wait_s + (heavy.latency_s[size][b] + wait_s if t > 0 else 0) <= slo_s
                    for size, slo_s in problem.slos_s.items()
                )
            ]
            if fine:
                wanted[name] = max(fine)
        if wanted:
            status = next(iter(wanted))
            assert (plan.status, plan.threshold) == (status, wanted[status])
        else:
            assert plan.status in ("light-only", "overloaded")
    assert min(seen[status] for status in ("optimal", "without-queues", "light-only", "overloaded")) >= 3


def _first(times: ModelTimes, count: int) -> ModelTimes:
    latency_s = {name: numbers[:count] for name, numbers in times.latency_s.items()}
    return ModelTimes(times.batch_sizes[:count], times.throughput[:count], latency_s)
