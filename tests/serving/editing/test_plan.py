"""Plans of masked passes: the optimal plan equals the best of all choices."""

import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from patchedserve.serving.editing.plan import UnitTimes, latency_of, optimal_plan, paper_plan

from ...benchmarks.edit_plans import COMPARED

NUM_INSTANCES = 10_000


def instances(num: int, *, most_units: int = 12, seed: int = 0) -> list[list[UnitTimes]]:
    """Return random units: free loads and loads longer than all the rest, reuse that does not pay, equal times."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(num):
        shape, speed = (int(rng.integers(1, most_units + 1)), 4), 10 ** rng.uniform(-1.5, 1.5)
        times = rng.integers(0, 8, shape) / 4 if rng.random() < 0.3 else rng.random(shape)
        times *= [2.0, 1.0, speed, speed * rng.integers(0, 2)]
        found.append([UnitTimes(*map(float, row)) for row in times])
    return found


def all_latencies(units: list[UnitTimes]) -> NDArray[np.float64]:
    """Return the latency of every choice; bit `i` of a choice's number says whether unit `i` reuses its record."""
    choices = np.arange(1 << len(units))
    load, comp = np.zeros(len(choices)), np.zeros(len(choices))
    was_active = np.zeros(len(choices), bool)
    for place, unit in enumerate(units):
        is_active = (choices >> place & 1).astype(bool)
        loads = is_active | was_active
        load = np.where(loads, load + np.where(is_active, unit.load_s, unit.return_s), load)
        comp = np.where(loads, np.maximum(comp, load), comp) + np.where(is_active, unit.active_s, unit.all_s)
        was_active = is_active
    return comp


@pytest.mark.exhaustive
def test_optimal_plan_equals_brute_force() -> None:
    for units in instances(NUM_INSTANCES):
        latencies, plan = all_latencies(units), optimal_plan(units)
        assert plan.latency_s == latencies.min()
        number = sum(reuses << place for place, reuses in enumerate(plan.reuses))
        assert latencies[number] == plan.latency_s == latency_of(units, plan.reuses)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_optimal_plan_with_earlier_loads_equals_brute_force() -> None:
    for units in instances(2_000, most_units=10, seed=2):
        plan, choices = optimal_plan(units, is_ahead=True), []
        for number in range(1 << len(units)):
            reuses = [bool(number >> place & 1) for place in range(len(units))]
            loads = [
                unit.load_s if is_active else unit.return_s * was_active
                for unit, is_active, was_active in zip(units, reuses, [False, *reuses], strict=False)
            ]
            computed = [
                unit.active_s if is_active else unit.all_s for unit, is_active in zip(units, reuses, strict=True)
            ]
            choices.append(max(sum(loads), sum(computed)))
        assert plan.latency_s == pytest.approx(min(choices), rel=1e-12)
        assert plan.latency_s == latency_of(units, plan.reuses, is_ahead=True)
        assert plan.latency_s <= optimal_plan(units).latency_s + 1e-9


def test_unrecorded_layers_are_never_returned_to() -> None:
    """If records lack what a return to all tokens needs, units with all tokens precede those that reuse."""
    for units in instances(500, seed=3):
        for is_ahead in (False, True):
            reuses = optimal_plan([replace(each, return_s=math.inf) for each in units], is_ahead=is_ahead).reuses
            assert list(reuses) == sorted(reuses)


def test_greedy_plan_of_the_paper_lets_loads_delay_later_layers() -> None:
    units = [UnitTimes(all_s=11, active_s=1, load_s=10)] * 2
    assert paper_plan(units).reuses == (True, True)
    assert paper_plan(units).latency_s == 21
    assert optimal_plan(units).reuses == (False, True)
    assert optimal_plan(units).latency_s == 12


def test_only_free_loads_are_faster_than_the_optimal_plan() -> None:
    is_better = dict.fromkeys(COMPARED, 0)
    for units in instances(500, most_units=40, seed=1):
        found = {name: make(units).latency_s for name, make in COMPARED.items()}
        best = found["optimal"]
        assert found["ideal"] <= best + 1e-9
        for name in ("paper", "strawman", "none"):
            assert best <= found[name]
            is_better[name] += best < found[name]
        assert found["strawman"] <= found["sequential"] + 1e-9
        assert found["none"] == pytest.approx(sum(unit.all_s for unit in units))
    # Each of these plans is worse than the optimal one on many instances.
    assert all(is_better[name] > 50 for name in ("paper", "strawman", "none"))


def test_plan_is_trivial_for_free_or_endless_loads() -> None:
    free = [UnitTimes(all_s=2.0, active_s=1.0, load_s=0.0)] * 20
    assert optimal_plan(free).reuses == (True,) * 20
    endless = [UnitTimes(all_s=2.0, active_s=1.0, load_s=1e6)] * 20
    assert optimal_plan(endless).reuses == (False,) * 20
    assert optimal_plan([]).latency_s == 0.0


def test_returning_to_all_tokens_has_a_cost() -> None:
    """Reuse does not pay in the middle unit, but computing all of its tokens requires loading the missing ones."""
    first, last = (UnitTimes(all_s=10.0, active_s=1.0, load_s=0.1) for _ in range(2))
    middle = [UnitTimes(all_s=2.0, active_s=2.5, load_s=0.1, return_s=each) for each in (0.1, 50.0)]
    assert [optimal_plan([first, each, last]).reuses[1] for each in middle] == [False, True]
