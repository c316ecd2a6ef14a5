"""Comparisons of two configurations image by image."""

import numpy as np
import pytest

from patchedserve.data.errors import UsageError
from patchedserve.eval.paired import compare_values


def test_paired_comparison_by_hand() -> None:
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


def test_pairs_find_what_separate_figures_cannot() -> None:
    rng = np.random.default_rng(0)
    prompts = rng.normal(30, 5, 100)
    first = {str(i): value for i, value in enumerate(prompts)}
    second = {str(i): value + 0.2 + rng.normal(0, 0.3) for i, value in enumerate(prompts)}
    found = compare_values("clip", first, second, "higher")
    assert found.low is not None
    assert found.low > 0.1  # although either side's own interval is about 2 wide


def test_pairs_must_be_pairs() -> None:
    with pytest.raises(UsageError, match="1 are on one side only; b is on the second"):
        compare_values("x", {"a": 1.0}, {"a": 1.0, "b": 2.0}, "higher")
    with pytest.raises(UsageError, match="no pair"):
        compare_values("x", {}, {}, "higher")
    assert compare_values("x", {"a": 1.0}, {"a": 2.0}, "higher").low is None


def test_fid_difference_is_paired() -> None:
    import torch

    from patchedserve.eval.fid_stats import frechet_distance
    from patchedserve.eval.paired import compare_fid

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
