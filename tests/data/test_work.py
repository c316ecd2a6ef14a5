"""Works: a whole image equals its resolution; parts, and images with references, sort and hash together with it."""

import math

import pytest

from patchedserve.data.resolution import Resolution
from patchedserve.data.work import Work, is_part, resolution_of, share_of, work_of

S, L = Resolution(128, 128), Resolution(256, 128)


def test_work_of_a_whole_image_is_its_resolution() -> None:
    assert work_of(S) is S
    part = work_of(L, 0.25)
    assert (part, str(part), resolution_of(part), resolution_of(S)) == (Work(256, 128, 0.25), "25.0% of 256x128", L, S)
    assert sorted([part, L, S, work_of(S, 0.5)]) == [S, work_of(S, 0.5), L, part]
    assert len({S, L, part, work_of(L, 0.25)}) == 3
    assert list(map(share_of, (S, part, work_of(S, 2.5)))) == [1.0, 0.25, 2.5]
    assert list(map(is_part, (S, part, work_of(S, 2.5)))) == [False, True, False]


@pytest.mark.parametrize("share", [0.0, -0.1, math.inf, math.nan])
def test_shares_out_of_range_are_refused(share: float) -> None:
    with pytest.raises(ValueError, match="must be above 0 and finite"):
        work_of(S, share)
