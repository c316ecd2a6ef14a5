"""Recent SLO attainment of requests."""

from typing import Any

import pytest

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.core.request_state import RequestRecord
from patchedserve.serving.scheduling.ends import AttainmentTracker
from patchedserve.serving.scheduling.policies import ALL_IN_TIME, RecentAttainment

S, L = Resolution(128, 128), Resolution(256, 256)


def record(
    size: Resolution, status: Any = "completed", *, late: bool = False, slo_s: float | None = 1.0
) -> RequestRecord:
    closed = RequestRecord.of(Request(0, "a cat", size, 4, slo_s=slo_s))
    closed.close(status, 2.0 if late else 0.5, None if status == "completed" else "why")
    return closed


def noted(tracker: AttainmentTracker, *records: RequestRecord) -> RecentAttainment:
    for each in records:
        tracker.note(each)
    return tracker.attainment


def test_at_first_all_are_in_time_and_what_says_nothing_does_not_count() -> None:
    tracker = AttainmentTracker()
    assert tracker.attainment == ALL_IN_TIME
    nothing = [record(S, "cancelled"), record(S, "failed"), record(S, slo_s=None), record(S, late=True, slo_s=None)]
    assert noted(tracker, *nothing) == ALL_IN_TIME
    after = noted(tracker, *[record(S)] * 50)
    assert (after.in_time, after.behind, after.count) == (pytest.approx(1), frozenset(), pytest.approx(100))


def test_a_few_that_are_lost_do_not_make_an_overload_but_many_do_and_they_are_forgotten() -> None:
    tracker = AttainmentTracker()
    assert noted(tracker, *[record(S, "discarded")] * 5).in_time > 0.95
    assert noted(tracker, *[record(S, late=True)] * 5).in_time < 0.95
    assert noted(tracker, *[record(S)] * 300).in_time > 0.95


def test_a_resolution_of_which_clearly_fewer_are_in_time_is_behind_until_it_has_caught_up() -> None:
    tracker = AttainmentTracker()
    both = [record(S), record(L)]
    assert noted(tracker, *both * 20).behind == frozenset()
    assert noted(tracker, record(L, "discarded")).behind == frozenset(), "one is chance"
    attainment = noted(tracker, *[record(S), record(L, "discarded")] * 10)
    assert attainment.behind == {L}
    # 41 + 1 + 20 have ended, of which 11 of L were lost. The tracker starts with all in time, so the loss shows less.
    assert attainment.in_time == pytest.approx(1 - 11 / 100, abs=0.02)
    assert noted(tracker, *both * 100).behind == frozenset()
    # Where both resolutions lose all their requests, neither is behind.
    assert noted(tracker, *[record(S, late=True), record(L, "discarded")] * 100).behind == frozenset()


def test_what_is_kept_is_bounded() -> None:
    tracker = AttainmentTracker()
    for side in range(1, 2000):
        tracker.note(record(Resolution(8 * side, 8)))
    assert len(tracker._ended) < 400
