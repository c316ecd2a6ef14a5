"""Intervals of statements, from made-up results and from committed ones."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from patchedserve.data.statistics import Estimate
from patchedserve.eval.reproduce.batches import gains_by_round, savings_by_round, savings_differ, splitting_shares
from patchedserve.eval.reproduce.serving import attainment_statements, many_gpu_statements
from patchedserve.eval.reproduce.statement import statements_of
from patchedserve.profiling.sweep.figures import FinishedRun, sweep_figures

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "reproduce"
STUDENT_3, STUDENT_2 = 4.3027, 12.7062
"""Student's 97.5 % quantiles for three and for two values."""


def student(values: Sequence[float]) -> tuple[float, float, float]:
    """Return mean and interval of three or two values, computed by hand."""
    half = {3: STUDENT_3, 2: STUDENT_2}[len(values)] * np.std(values, ddof=1) / math.sqrt(len(values))
    return float(np.mean(values)), float(np.mean(values) - half), float(np.mean(values) + half)


def ends(given: Estimate | None) -> tuple[float | None, ...]:
    assert given is not None
    return given.value, given.low, given.high


def served(**by_system: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return figures of a sweep of 100 requests per trace, from each system's shares in time by seed and rate."""
    runs = []
    for name, seeds in by_system.items():
        for seed, shares in enumerate(seeds):
            for rate, share in enumerate(shares, 1):
                met = round(100 * share)
                latencies, ended = np.ones(100), {"completed": 100}
                runs.append(FinishedRun("real", name.replace("_", "-"), rate, seed, met, ended, {}, latencies, 100.0))
    return sweep_figures(runs)


SERVED = {
    "nirvana": [(0.96, 0.5, 0.1), (1.0, 0.6, 0.1), (0.98, 0.4, 0.1)],
    "patched_fcfs": [(1.0, 1.0, 0.5), (1.0, 0.99, 0.4), (1.0, 0.98, 0.6)],
    "patchedserve": [(1.0, 1.0, 0.8), (1.0, 1.0, 0.7), (1.0, 1.0, 0.75)],
    "distrifusion_fcfs": [(1.0, 0.2, 0.1), (1.0, 0.1, 0.0), (1.0, 0.3, 0.05)],
}


def test_attainment_is_paired_over_seeds() -> None:
    mean, at_lowest, at_highest, to_nirvana, *to_cache = attainment_statements(served(**SERVED))
    gains = [100 * float(np.mean(np.subtract(SERVED["patchedserve"][s], SERVED["nirvana"][s]))) for s in range(3)]
    assert ends(mean.ours) == pytest.approx(student(gains), rel=1e-4)
    assert ends(at_highest.ours) == pytest.approx(student([30, 30, 15]), rel=1e-4)
    # Three seeds at 100 % have the interval of 300 requests.
    assert at_lowest.ours is not None
    assert at_lowest.ours.low == pytest.approx(300 / (300 + 1.96**2), rel=1e-4)
    assert at_lowest.verdict == "cannot be told"
    # Ratio of sustained rates within each seed.
    own = [2 + (1 - 0.95) / (1 - last) for last in (0.8, 0.7, 0.75)]
    base = [1 + (first - 0.95) / (first - then) for first, then in ((0.96, 0.5), (1.0, 0.6), (0.98, 0.4))]
    _, low, high = np.exp(student(np.log(np.divide(own, base)).tolist()))
    assert to_nirvana.ours is not None
    assert (to_nirvana.ours.low, to_nirvana.ours.high) == pytest.approx((low, high), rel=1e-4)
    assert to_nirvana.verdict == "agrees"
    assert [each.paper for each in to_cache] == [(1.5,), (1.12,), (1.1,)]


@pytest.mark.parametrize("first", [0.90, 0.96])
def test_bounds_and_single_traces_give_no_interval_of_held_rates(first: float) -> None:
    """NIRVANA has 90 % at the lowest rate and so sustains no measured rate: the ratio is only bounded from below."""
    one = {name: [(first, *seeds[0][1:]) if name == "nirvana" else seeds[0]] for name, seeds in SERVED.items()}
    three = {name: seeds * 3 for name, seeds in one.items()}
    for given, is_sure in ((one, False), (three, first > 0.95)):
        found = attainment_statements(served(**given))[3]
        assert found.text.endswith(", at least") == (first < 0.95)
        assert found.ours is not None
        assert found.ours.value > 2
        assert (found.verdict == "agrees") == is_sure
        assert is_sure or found.verdict == "cannot be told"


def test_one_seed_gives_no_interval() -> None:
    figures = served(**{name: seeds[:1] for name, seeds in SERVED.items()})
    found = [*attainment_statements(figures), *many_gpu_statements(figures, 2)]
    assert {each.verdict for each in found} == {"cannot be told"}


def test_best_baseline_on_many_gpus_is_chosen_over_all_seeds() -> None:
    best, at_lowest, at_highest = many_gpu_statements(served(**SERVED), 8)
    gains = [100 * float(np.mean(np.subtract(SERVED["patchedserve"][s], SERVED["patched_fcfs"][s]))) for s in range(3)]
    assert ends(best.ours) == pytest.approx(student(gains), rel=1e-4)
    assert ends(at_lowest.ours) == pytest.approx(student([-4, 0, -2]), rel=1e-4)
    assert not at_lowest.is_more
    assert ends(at_highest.ours) == pytest.approx(student([0, 10, 5]), rel=1e-4)
    assert best.text == "8 GPUs: PatchedServe over the best other, mean of the rates"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/figure-1[123].json")), ids=lambda path: path.parent.name)
def test_committed_sweeps_reproduce_numbers_and_intervals(path: Path) -> None:
    result = json.loads(path.read_text())
    if "gpus" in result["ours"]:
        by_gpus = result["ours"]["gpus"].items()
        found = [each for n, own in by_gpus for each in many_gpu_statements(own["engines"]["simulator"], int(n))]
    else:
        found = attainment_statements(result["ours"]["engines"]["real"])
    stored = statements_of(result)
    assert [each.text for each in found] == [each.text for each in stored]
    values, known = ([None if each.ours is None else each.ours.value for each in some] for some in (found, stored))
    assert values == pytest.approx(known)
    if result["version"] > 1:  # earlier files have no intervals
        assert [each.interval_text for each in found] == [each.interval_text for each in stored]
        assert [each.verdict for each in found] == [each["verdict"] for each in result["statements"]]
    assert sum(each.ours is not None and each.ours.interval is not None for each in found) >= 5


def test_sizes_with_different_skipped_shares() -> None:
    shares = {"64x64": [0.3, 0.4, 0.5], "96x96": [0.9] * 3, "128x128": [0.2, 0.3, 0.2]}
    # The side that skips more counts; the interval starts at 0 if this is uncertain.
    mean, low, high = student([10, 10, 30])
    assert low < 0
    for given in (shares, dict(reversed(shares.items()))):
        assert ends(savings_differ(given).ours) == pytest.approx((mean, 0, high), rel=1e-4)
    sure = savings_differ({"64x64": [0.2, 0.3], "128x128": [0.41, 0.52]})
    assert ends(sure.ours) == pytest.approx((21.5, 21.5 - STUDENT_2 * 0.5, 21.5 + STUDENT_2 * 0.5), rel=1e-4)
    assert sure.verdict == "agrees"
    # One request of each size.
    assert savings_differ({"64x64": [0.2], "128x128": [0.9]}).verdict == "cannot be told"


def test_times_are_paired_by_round() -> None:
    # A slow second round affects all sides.
    rows = [
        {
            "requests": 2,
            "seconds_by_round": {"baseline": [10.0, 20.0], "patched": [8.0, 16.0], "patched + cache": [2.0, 4.4]},
            "overhead_s_by_round": [0.2, 0.4],
        },
        {
            "requests": 8,
            "seconds_by_round": {"baseline": [40.0, 80.0], "patched": [38.0, 80.0], "patched + cache": [19.0, 40.0]},
            "overhead_s_by_round": [0.4, 0.88],
        },
    ]
    less, declines, cached, managed = gains_by_round(rows)
    assert ends(less.ours) == pytest.approx(student([(20 + 5) / 2, (20 + 0) / 2]), rel=1e-4)
    assert ends(declines.ours) == pytest.approx(student([15, 20]), rel=1e-4)
    ratios = [math.sqrt(0.25 * 0.5), math.sqrt(0.275 * 0.5)]
    assert ends(cached.ours) == pytest.approx(np.exp(student(np.log(ratios).tolist())), rel=1e-4)
    assert ends(managed.ours) == pytest.approx(np.exp(student(np.log([0.5, 0.55]).tolist())), rel=1e-4)
    assert (cached.is_more, managed.is_more) == (False, False)


def test_splitting_share_excludes_what_plain_diffusers_spends() -> None:
    def side(step_ms: float, first_ms: float, *stitching: float) -> dict[str, Any]:
        return {"step_ms": step_ms, "first_ms": first_ms, "ms_by_repeat": [{"stitching": ms} for ms in stitching]}

    row = {"sides": {"patched": side(40, 60, 4, 5), "same_resolution": side(50, 90, 1, 1.5)}}
    assert splitting_shares(row, num_steps=10) == pytest.approx([(3 + 2) / 40, (3.5 + 2) / 40])


def test_savings_are_paired_by_round() -> None:
    def kind(seconds: list[float], *saved: float) -> dict[str, Any]:
        return {"seconds_by_round": seconds, "saved_by_round": list(saved)}

    found = {
        "64x64": {
            "off": kind([10.0, 10.0]),
            "patch": kind([8.0, 9.0], 0.7, 0.8),
            "image": kind([4.0, 5.0], 0.6, 0.75),
        },
        "128x128": {
            "off": kind([40.0, 40.0]),
            "patch": kind([20.0, 20.0], 0.5, 0.55),
            "image": kind([30.0, 31.0], 0.4, 0.4),
        },
    }
    statements = savings_by_round(found, is_sdxl=True)
    more, slower, _, faster, smallest, quicker = statements
    assert ends(more.ours) == pytest.approx(student([10, 5]), rel=1e-4)
    assert ends(slower.ours) == pytest.approx(np.exp(student(np.log([2, 1.8]).tolist())), rel=1e-4)
    assert [each.verdict for each in (slower, faster)] == ["cannot be told", "agrees"]
    assert ends(smallest.ours) == pytest.approx(student([20, 25]), rel=1e-4)
    assert ends(quicker.ours) == pytest.approx(student([80 - 50, 90 - 50]), rel=1e-4)
    assert savings_by_round(found, is_sdxl=False) == statements[:4]
    # The side is slower in every one of many rounds.
    found["64x64"]["patch"]["seconds_by_round"] = [8.0, 10.0] * 5
    found["64x64"]["image"]["seconds_by_round"] = [4.0, 5.1] * 5
    assert savings_by_round(found, is_sdxl=False)[1].verdict == "differs"
