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


def attainment_after(tracker: AttainmentTracker, *records: RequestRecord) -> RecentAttainment:
    for each in records:
        tracker.note(each)
    return tracker.attainment


def test_initial_attainment_is_full_and_uninformative_ends_do_not_count() -> None:
    tracker = AttainmentTracker()
    assert tracker.attainment == ALL_IN_TIME
    nothing = [record(S, "cancelled"), record(S, "failed"), record(S, slo_s=None), record(S, late=True, slo_s=None)]
    assert attainment_after(tracker, *nothing) == ALL_IN_TIME
    after = attainment_after(tracker, *[record(S)] * 50)
    assert (after.in_time, after.behind, after.count) == (pytest.approx(1), frozenset(), pytest.approx(100))


def test_many_late_requests_signal_overload_until_forgotten() -> None:
    tracker = AttainmentTracker()
    assert attainment_after(tracker, *[record(S, "discarded")] * 5).in_time > 0.95
    assert attainment_after(tracker, *[record(S, late=True)] * 5).in_time < 0.95
    assert attainment_after(tracker, *[record(S)] * 300).in_time > 0.95


def test_resolution_with_clearly_lower_attainment_is_behind_until_recovery() -> None:
    tracker = AttainmentTracker()
    both = [record(S), record(L)]
    assert attainment_after(tracker, *both * 20).behind == frozenset()
    assert attainment_after(tracker, record(L, "discarded")).behind == frozenset(), "one is chance"
    attainment = attainment_after(tracker, *[record(S), record(L, "discarded")] * 10)
    assert attainment.behind == {L}
    # 41 + 1 + 20 have ended, of which 11 of L were lost. The tracker starts with all in time, so the loss shows less.
    assert attainment.in_time == pytest.approx(1 - 11 / 100, abs=0.02)
    assert attainment_after(tracker, *both * 100).behind == frozenset()
    # Where both resolutions lose all their requests, neither is behind.
    assert attainment_after(tracker, *[record(S, late=True), record(L, "discarded")] * 100).behind == frozenset()


def test_tracker_memory_is_bounded() -> None:
    tracker = AttainmentTracker()
    for side in range(1, 2000):
        tracker.note(record(Resolution(8 * side, 8)))
    assert len(tracker._ended) < 400
