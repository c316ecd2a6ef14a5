"""Estimates, and intervals compared with scipy's."""

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from patchedserve.data.errors import UsageError
from patchedserve.data.statistics import Estimate, median_interval, ratios_of, wilson_interval


@pytest.mark.parametrize(("met", "total"), [(0, 5), (0, 7), (7, 7), (3, 7), (57, 60), (1, 1), (950, 1000)])
def test_wilson_interval_equals_scipy(met: int, total: int) -> None:
    theirs = binomtest(met, total).proportion_ci(0.95, method="wilson")
    low, high = wilson_interval(met, total)
    assert (low, high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)
    assert 0 <= low <= met / total <= high <= 1


def test_wilson_interval_of_a_half_count_lies_in_between() -> None:
    (low, high), below, above = wilson_interval(3.5, 7), wilson_interval(3, 7), wilson_interval(4, 7)
    assert low == pytest.approx(1 - high)
    assert below[0] < low < above[0]
    assert below[1] < high < above[1]


@pytest.mark.parametrize(("met", "total"), [(0, 0), (-1, 3), (4, 3)])
def test_wilson_interval_refuses_invalid_counts(met: int, total: int) -> None:
    with pytest.raises(ValueError, match="is not a share"):
        wilson_interval(met, total)


def test_estimates_round_trip_through_json() -> None:
    for each in (Estimate(1.5), Estimate.exact(2.0), Estimate.of_share(3, 4), Estimate.of_mean([1.0, 2.0, 4.0])):
        assert Estimate.from_json(each.to_json()) == each
    assert Estimate.from_json(3) == Estimate(3)
    assert Estimate.exact(2.0).is_exact
    assert not Estimate(2.0).is_exact
    assert Estimate.of_mean([2.0]).interval is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("3", "value is '3'"),
        ({"value": True}, "value is True"),
        ({"value": float("nan")}, "finite number"),
        ({"low": 1}, "'value' is missing"),
        ({"value": 1, "hihg": 2}, "'hihg' is unknown"),
        ({"value": 1, "low": 0}, "both ends or neither"),
        ({"value": 1, "low": 2, "high": 0}, "ends exchanged"),
        ({"value": 1, "n": 0}, "n is 0"),
    ],
)
def test_invalid_estimates_are_reported(content: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Estimate.from_json(content)


def test_interval_of_a_median_has_95_percent_coverage() -> None:
    assert median_interval([1.0, 2.0, 3.0, 4.0, 5.0]) is None
    assert median_interval([]) is None
    # With six values, the median lies below the smallest or above the largest with probability 2 / 64.
    assert median_interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == (1.0, 6.0)
    assert Estimate.of_median([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == Estimate(3.5, 1.0, 6.0, 6)
    assert Estimate.of_median([2.0]) == Estimate(2.0, n=1)
    rng = np.random.default_rng(0)
    found = [median_interval(rng.exponential(size=15).tolist()) or (9, 9) for _ in range(2000)]
    assert 0.95 < np.mean([low <= math.log(2) <= high for low, high in found]) < 0.98


def test_ratios_are_independent_of_machine_slowdowns() -> None:
    """Medians of two sides may come from a slow and a fast minute; both sides of one repeat run in the same minute."""
    moods = [1.0, 1.0, 1.3, 2.0, 2.0]
    base, patched = ([ms * mood for mood in moods] for ms in (15.0, 10.0))
    assert ratios_of(base, patched) == pytest.approx([1.5] * 5)
