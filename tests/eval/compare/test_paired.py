"""Comparisons of two configurations, image by image."""

import numpy as np
import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.statistics import wilson_interval
from patchedserve.eval.compare.paired import compare_values


def test_paired_comparison_matches_manual_values() -> None:
    first = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}
    second = {"d": 4.0, "c": 5.0, "b": 2.5, "a": 0.0}
    found = compare_values("x", first, second, "higher", seed=1)
    assert (found.first, found.second, found.difference) == pytest.approx((2.5, 2.875, 0.375))
    assert (found.win_rate, found.tie_rate, found.n) == (0.625, 0.25, 4)  # two wins, one tie, one loss
    assert compare_values("x", first, second, "lower").win_rate == 0.375
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0.375 < found.high
    same = compare_values("x", first, first, "higher")
    assert (same.difference, same.low, same.high, same.win_rate, same.tie_rate) == (0, 0, 0, 0.5, 1)


def test_winning_every_pair_leaves_uncertainty() -> None:
    first, second = dict.fromkeys("abcd", 1.0), dict.fromkeys("abcd", 2.0)
    always, never = (compare_values("x", first, second, direction) for direction in ("higher", "lower"))
    # Wilson's bound for k = n is n / (n + z^2).
    assert (always.win_rate, always.win_low, always.win_high) == (1, pytest.approx(4 / (4 + 1.959964**2)), 1)
    assert (never.win_rate, never.win_low, never.win_high) == (0, 0, pytest.approx(1 - 4 / (4 + 1.959964**2)))
    # One pair gives a wide interval; a tie counts half.
    one = compare_values("x", {"a": 1.0}, {"a": 1.0}, "higher")
    assert (one.win_rate, one.win_low, one.win_high) == (0.5, *map(pytest.approx, wilson_interval(0.5, 1)))


def test_wilsons_interval_of_a_share() -> None:
    # Newcombe, "Two-sided confidence intervals for the single proportion" (1998), table I, method 3.
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson_interval(0, 20) == (0, pytest.approx(0.1611, abs=5e-5))
    assert wilson_interval(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)
    for met, num in ((1, 0), (-1, 3), (4, 3)):
        with pytest.raises(ValueError, match="is not a share"):
            wilson_interval(met, num)


def test_paired_comparison_detects_small_differences() -> None:
    rng = np.random.default_rng(0)
    prompts = rng.normal(30, 5, 100)
    first = {str(i): value for i, value in enumerate(prompts)}
    second = {str(i): value + 0.2 + rng.normal(0, 0.3) for i, value in enumerate(prompts)}
    found = compare_values("clip", first, second, "higher")
    assert found.low is not None
    assert found.low > 0.1  # although either side's own interval is about 2 wide


def test_unpaired_values_are_refused() -> None:
    with pytest.raises(UsageError, match="1 are on one side only; b is on the second"):
        compare_values("x", {"a": 1.0}, {"a": 1.0, "b": 2.0}, "higher")
    with pytest.raises(UsageError, match="no pair"):
        compare_values("x", {}, {}, "higher")
    assert compare_values("x", {"a": 1.0}, {"a": 2.0}, "higher").low is None


def test_fid_difference_is_paired() -> None:
    import torch

    from patchedserve.eval.compare.paired import compare_fid
    from patchedserve.eval.metrics.fid import frechet_distance

    rng = np.random.default_rng(0)
    reference, first = (torch.from_numpy(rng.normal(size=(120, 6))) for _ in range(2))
    worse = first + 0.4
    found = compare_fid(first, worse, reference, num_resamples=60)
    expected = frechet_distance(reference, worse) - frechet_distance(reference, first)
    assert found.difference == pytest.approx(expected)
    assert found.low is not None
    assert found.low > 0
    same = compare_fid(first, first, reference, num_resamples=20)
    assert (same.difference, same.low, same.high) == (0, 0, 0)
    with pytest.raises(UsageError, match="pairs need as many"):
        compare_fid(first[:5], worse, reference)
