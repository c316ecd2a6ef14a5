"""Wilson's interval against scipy's."""

import pytest
from scipy.stats import binomtest

from patchedserve.data.wilson import wilson_interval


@pytest.mark.parametrize(("met", "total"), [(0, 5), (0, 7), (7, 7), (3, 7), (57, 60), (1, 1), (950, 1000)])
def test_wilson_is_that_of_scipy(met: int, total: int) -> None:
    theirs = binomtest(met, total).proportion_ci(0.95, method="wilson")
    low, high = wilson_interval(met, total)
    assert (low, high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)
    assert 0 <= low <= met / total <= high <= 1


def test_a_half_counts_half() -> None:
    (low, high), below, above = wilson_interval(3.5, 7), wilson_interval(3, 7), wilson_interval(4, 7)
    assert low == pytest.approx(1 - high)
    assert below[0] < low < above[0]
    assert below[1] < high < above[1]


@pytest.mark.parametrize(("met", "total"), [(0, 0), (-1, 3), (4, 3)])
def test_wilson_of_nothing(met: int, total: int) -> None:
    with pytest.raises(ValueError, match="is no share"):
        wilson_interval(met, total)
