"""Strips: the rows of an image that each rank draws."""

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.serving.parallel.strips import Strips


@pytest.mark.parametrize("height", range(1, 70))
@pytest.mark.parametrize("unit", [1, 2, 4, 8])
def test_every_height_is_fully_divided(height: int, unit: int) -> None:
    most = -(-height // unit)
    for count in range(1, min(most, 8) + 1):
        strips = Strips.of(height, unit, [1] * count)
        assert (strips.starts[0], strips.starts[-1], strips.count) == (0, height, count)
        assert all(start % unit == 0 for start in strips.starts[:-1])
        heights = strips.heights(1)
        assert min(heights) > 0
        assert max(heights) - min(heights[:-1] or heights) <= unit, "as even as whole units allow"
        for factor in (1, 2, 4, 8):
            if unit % factor == 0:
                assert sum(strips.heights(factor)) == -(-height // factor)
                assert min(strips.heights(factor)) > 0
                assert sum(strips.weights(factor)) == pytest.approx(1)
    with pytest.raises(UsageError, match=f"at most {most} can share them"):
        Strips.of(height, unit, [1] * (most + 1))


@pytest.mark.parametrize(
    ("shares", "heights"),
    [((2, 1), (20, 12)), ((1, 2), (12, 20)), ((3, 1, 1), (20, 4, 8)), ((1, 100), (4, 28)), ((100, 1, 1), (24, 4, 4))],
)
def test_shares(shares: tuple[float, ...], heights: tuple[int, ...]) -> None:
    assert Strips.of(32, 4, shares).heights(1) == heights
