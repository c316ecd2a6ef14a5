"""training/cache/schedule.py: the search compared with all choices, plans of other lengths, and files."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.data.tables.block_facts import ProfiledModel
from patchedserve.training.cache.schedule import CacheSchedule, StepPlan, search_plans, shares

NUM_STEPS = 7
FACTS = ProfiledModel("tiny", "abc", "EulerDiscreteScheduler")


def error_of(plan: StepPlan, outputs: np.ndarray, weights: np.ndarray) -> float:
    """Return the error that the search minimises, computed directly from the outputs (steps, values)."""
    error, before = 0.0, None
    for step, end, own in plan.gaps():
        off = np.zeros(outputs.shape[1])
        for at, share in zip(range(step, end), own, strict=True):
            slope = 0.0 if before is None else outputs[step] - outputs[before]
            off += weights[at] * (outputs[at] - outputs[step] - share * slope)
        error += float(off @ off)
        before = step
    return error


def test_found_choice_of_steps_is_optimal() -> None:
    random = np.random.default_rng(0)
    outputs = np.cumsum(random.normal(size=(NUM_STEPS, 40)), axis=0)
    weights = random.uniform(0.1, 1.0, NUM_STEPS)
    found = search_plans(outputs @ outputs.T, weights.tolist(), NUM_STEPS)
    assert list(found) == list(range(1, NUM_STEPS + 1))
    for count, plan in found.items():
        others = [StepPlan(NUM_STEPS, (0, *steps)) for steps in itertools.combinations(range(1, NUM_STEPS), count - 1)]
        assert len(plan.steps) == count
        assert error_of(plan, outputs, weights) == pytest.approx(
            min(error_of(other, outputs, weights) for other in others), abs=1e-9
        )


def test_forecasts_damp_the_extrapolation() -> None:
    assert shares(2, 4).tolist() == [0, 1 / 3, 2 / 4, 3 / 5]
    [first, second] = StepPlan(6, (0, 3)).gaps()
    assert (first.step, first.end, first.shares) == (0, 3, (0, 0, 0))
    assert (second.step, second.end) == (3, 6)
    assert second.shares == (0, 1 / 4, 2 / 5)


def test_plans_for_other_numbers_of_steps() -> None:
    schedule = CacheSchedule(FACTS, {30: StepPlan(30, (0, 3, 10, 20)), 10: StepPlan(10, (0, 1, 5))})
    assert schedule.plan_of(30).steps == (0, 3, 10, 20)
    assert schedule.plan_of(59).steps == (0, 6, 20, 40)
    assert schedule.plan_of(10, first=4).steps == (0, 1)
    assert schedule.plan_of(30, first=2).steps == (0, 1, 8, 18)
    for num_steps in range(1, 80):
        for first in range(num_steps):
            plan = schedule.plan_of(num_steps, first)
            assert plan.num_steps == num_steps - first
            assert plan.steps[0] == 0
    assert schedule.plan_of(1).saved_share == 0


def test_requests_without_cache_skip_nothing() -> None:
    schedule = CacheSchedule(FACTS, {30: StepPlan(30, (0, 3, 10, 20))})
    request = Request(0, "", Resolution(64, 64), num_inference_steps=30)
    assert schedule.num_computed(request) == 4
    assert schedule.num_computed(Request(0, "", Resolution(64, 64), num_inference_steps=30, cache=False)) == 30


def test_files(tmp_path: Path) -> None:
    schedule = CacheSchedule(FACTS, {30: StepPlan(30, (0, 3)), 4: StepPlan(4, (0,))}, {"target_ssim": 0.9})
    file = tmp_path / "schedule.json"
    schedule.save(file)
    assert CacheSchedule.load(file) == schedule
    with pytest.raises(UsageError, match="there is no cache schedule"):
        CacheSchedule.load(tmp_path / "none.json")

    content = json.loads(file.read_text())
    damaged = {
        "is no cache schedule: it is of kind other": content | {"kind": "other"},
        "is no cache schedule: it has no plans": content | {"plans": {}},
        "is no cache schedule: plans: 4: step 9 is to be computed, but there are 4": content | {"plans": {"4": [0, 9]}},
        "is no cache schedule: plans: 4: computed steps are .3, 1., but": content | {"plans": {"4": [3, 1]}},
        "is no cache schedule: plans: content is None": {name: content[name] for name in content if name != "plans"},
        "is no cache schedule: plans: four": content | {"plans": {"four": [0]}},
    }
    for message, changed in damaged.items():
        file.write_text(json.dumps(changed))
        with pytest.raises(UsageError, match=message):
            CacheSchedule.load(file)
    file.write_text(json.dumps(content)[:50])
    with pytest.raises(UsageError, match="not valid JSON, perhaps half-written"):
        CacheSchedule.load(file)
