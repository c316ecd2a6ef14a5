"""The deferral curve f(t): the share of light images that is deferred at threshold t."""

import math

import numpy as np
import pytest

from patchedserve.data.errors import UsageError
from patchedserve.serving.cascade.deferral import OnlineDeferral, deferral_curve, score, threshold_at
from patchedserve.serving.cascade.demand import MovingAverage


def test_curve_is_the_share_below_each_threshold() -> None:
    confidences = [0.1, 0.1, 0.5, 0.9]
    curve = deferral_curve(confidences, 0.25)
    for threshold, share in zip(curve.thresholds, curve.shares, strict=True):
        assert share == (np.mean([each < threshold for each in confidences]) if threshold else 0)
    assert {0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0} == set(curve.thresholds)
    assert curve.share(0.6) == 0.5


def test_nan_confidence_is_deferred_at_any_positive_threshold() -> None:
    curve = deferral_curve([math.nan, 0.5], 0.1)
    assert curve.shares[:2] == (0.0, 0.5)
    assert not any(map(math.isnan, curve.thresholds))


def test_costs_change_thresholds_and_weight_shares_by_heavy_work() -> None:
    chance = np.random.default_rng(1)
    confidences, costs = chance.beta(3, 2, 400), chance.choice([0.4, 1.0, 2.5], 400)
    curve = deferral_curve(confidences, 0.05, costs)
    for threshold, share in zip(curve.thresholds[1:], curve.shares[1:], strict=True):
        # Slightly lower and higher thresholds give the bounds, as roots of powers are rounded.
        low, high = (
            costs[confidences < [threshold_at(threshold * hair, cost) for cost in costs]].sum() / costs.sum()
            for hair in (1 - 1e-9, 1 + 1e-9)
        )
        assert low - 1e-9 <= share <= high + 1e-9
    online = OnlineDeferral(list(confidences), window=400, costs=list(costs))
    assert online.curve.share(0.6) == pytest.approx(deferral_curve(confidences, costs=costs).share(0.6))
    for _ in range(400):
        online.note(0.5, 2.0)
    assert (online.curve.share(0.7), online.curve.share(0.71)) == (0, 1)


def test_equal_costs_have_no_effect_and_costly_images_a_lower_threshold() -> None:
    confidences = list(np.random.default_rng(2).beta(3, 2, 100))
    assert deferral_curve(confidences, costs=[1.0] * 100) == deferral_curve(confidences)
    assert threshold_at(0.5, 2.0) < 0.5 < threshold_at(0.5, 0.5)
    assert (threshold_at(0.0, 3.0), threshold_at(1.0, 3.0)) == (0, 1)
    assert score(math.nan, 2.0) == -1


def test_empty_confidences_are_refused() -> None:
    with pytest.raises(UsageError, match="needs as many of both"):
        deferral_curve([])


def test_profile_is_mixed_in_and_dropped_after_500_requests() -> None:
    """The curve is within 0.05 of the truth 500 requests after the mix has changed."""
    chance = np.random.default_rng(0)
    profiled, now = chance.beta(5, 2, 5000), chance.beta(2, 3, 2000)
    online = OnlineDeferral(list(profiled))
    assert distance(online, profiled) < 0.01
    for number, confidence in enumerate(now[:500]):
        online.note(confidence)
        if number == 249:
            assert distance(online, np.concatenate([profiled, np.repeat(now[:250], 20)])) < 0.05
    assert distance(online, now) < 0.05
    # Between two thresholds, the curve has the share of the lower one.
    assert distance(online, now[:500]) < 0.01


def distance(online: OnlineDeferral, confidences: np.ndarray) -> float:
    """Return the largest difference between f and the share of confidences below a threshold."""
    return max(abs(online.curve.share(t) - np.mean(confidences < t)) for t in np.linspace(0.005, 1, 200))


def test_few_profiled_confidences_are_used_until_the_window_is_full() -> None:
    online = OnlineDeferral([0.2, 0.8], window=3)
    assert online.curve.share(0.5) == 0.5
    for confidence in (0.1, 0.2, 0.3):
        online.note(confidence)
    assert online.curve.share(0.5) == 1


def test_averages_follow_observations() -> None:
    demand = MovingAverage()
    assert demand.value == demand.latest == 0
    demand.note(5.0)
    assert demand.value == demand.latest == 5
    for _ in range(100):
        demand.note(8.0)
    assert demand.value == pytest.approx(8)
    demand.note(80.0)
    # The newest of 20 samples has weight 1 / 3.1, before the weights are scaled to sum to 1.
    assert demand.value == pytest.approx(8 + 72 / 3.1 / (1 - (1 - 1 / 3.1) ** 20))
    assert demand.latest == 80
