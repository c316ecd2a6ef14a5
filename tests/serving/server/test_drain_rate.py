"""The rate at which a queue is drawn."""

import pytest

from patchedserve.serving.server.drain_rate import DrainRate


def test_idle_hour_does_not_change_the_rate_of_full_batches() -> None:
    rate = DrainRate()
    assert rate.value is None
    for _ in range(5):
        rate.note(128 * 128, 0.01)
    assert rate.value == pytest.approx(128 * 128 / 0.01), "all that is known"
    for _ in range(40):
        rate.note(16 * 192 * 192, 0.15)
    full = rate.value
    assert full == pytest.approx(16 * 192 * 192 / 0.15)
    for _ in range(1000):
        rate.note(128 * 128, 0.02)
    assert rate.value == full


def test_drain_rate_follows_a_slowing_machine() -> None:
    rate = DrainRate()
    for seconds in (*[0.1] * 100, *[0.2] * 20):
        rate.note(10**6, seconds)
    assert rate.value == pytest.approx(10**6 / 0.2)


def test_single_steps_give_no_rate() -> None:
    """Neither the first steps of a size nor two steps of a minute, as of a paused process, change the rate."""
    rate = DrainRate()
    for _ in range(4):
        rate.note(10**6, 0.1)
        assert rate.value is None
    rate.note(10**6, 0.1)
    for seconds in (60.0, 60.0):
        rate.note(2 * 10**6, seconds)
        rate.note(10**6, seconds)
        assert rate.value == pytest.approx(10**6 / 0.1)
    for _ in range(3):
        rate.note(2 * 10**6, 0.15)
    assert rate.value == pytest.approx(2 * 10**6 / 0.15)
