"""Bounds on retries."""

from patchedserve.serving.core.retries import MAX_RESTARTS, RESTARTS_WITHIN_S, Restarts


def test_restarts_are_bounded_within_a_time() -> None:
    restarts = Restarts()
    assert [restarts.allow(float(at_s)) for at_s in range(MAX_RESTARTS + 1)] == [True] * MAX_RESTARTS + [False]
    # The first end does not count any more, but the four after it are within the time as well.
    assert not restarts.allow(RESTARTS_WITHIN_S)
    spread = Restarts()
    assert all(spread.allow(number * RESTARTS_WITHIN_S / MAX_RESTARTS) for number in range(20))
    # An end for which it was not at fault does not count.
    forgiven = Restarts()
    for at_s in range(20):
        assert forgiven.allow(float(at_s))
        forgiven.ended_s.pop()
