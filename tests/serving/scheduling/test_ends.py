"""How requests have fared lately."""

from typing import Any

import pytest

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.core.request_state import RequestRecord
from patchedserve.serving.scheduling.ends import RecentEnds
from patchedserve.serving.scheduling.policies import ALL_IN_TIME, Lately

S, L = Resolution(128, 128), Resolution(256, 256)


def record(
    size: Resolution, status: Any = "completed", *, late: bool = False, slo_s: float | None = 1.0
) -> RequestRecord:
    closed = RequestRecord.of(Request(0, "a cat", size, 4, slo_s=slo_s))
    closed.close(status, 2.0 if late else 0.5, None if status == "completed" else "why")
    return closed


def noted(ends: RecentEnds, *records: RequestRecord) -> Lately:
    for each in records:
        ends.note(each)
    return ends.lately


def test_at_first_all_are_in_time_and_what_says_nothing_does_not_count() -> None:
    ends = RecentEnds()
    assert ends.lately == ALL_IN_TIME
    nothing = [record(S, "cancelled"), record(S, "failed"), record(S, slo_s=None), record(S, late=True, slo_s=None)]
    assert noted(ends, *nothing) == ALL_IN_TIME
    after = noted(ends, *[record(S)] * 50)
    assert (after.in_time, after.behind, after.count) == (pytest.approx(1), frozenset(), pytest.approx(100))


def test_a_few_that_are_lost_do_not_make_an_overload_but_many_do_and_they_are_forgotten() -> None:
    ends = RecentEnds()
    assert noted(ends, *[record(S, "discarded")] * 5).in_time > 0.95
    assert noted(ends, *[record(S, late=True)] * 5).in_time < 0.95
    assert noted(ends, *[record(S)] * 300).in_time > 0.95


def test_a_resolution_of_which_clearly_fewer_are_in_time_is_behind_until_it_has_caught_up() -> None:
    ends = RecentEnds()
    both = [record(S), record(L)]
    assert noted(ends, *both * 20).behind == frozenset()
    assert noted(ends, record(L, "discarded")).behind == frozenset(), "one is chance"
    lately = noted(ends, *[record(S), record(L, "discarded")] * 10)
    assert lately.behind == {L}
    # 41 + 1 + 20 have ended, of which 11 of L were lost: a little less than that, as all were in time before.
    assert lately.in_time == pytest.approx(1 - 11 / 100, abs=0.02)
    assert noted(ends, *both * 100).behind == frozenset()
    # Where all are lost alike, nobody is behind.
    assert noted(ends, *[record(S, late=True), record(L, "discarded")] * 100).behind == frozenset()


def test_what_is_kept_is_bounded() -> None:
    ends = RecentEnds()
    for side in range(1, 2000):
        ends.note(record(Resolution(8 * side, 8)))
    assert len(ends._ended) < 400
