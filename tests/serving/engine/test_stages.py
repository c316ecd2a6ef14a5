"""Stages beside the denoise loop, and what counts as a stall."""

import time

from patchedserve.serving.engine.stages import STALLED_S, STALLED_TIMES, UsualDuration


def is_stalled_after(usual: UsualDuration, duration_s: float) -> bool:
    return usual.is_exceeded(time.monotonic() - duration_s)


def test_one_long_pause_does_not_hide_the_next_stall() -> None:
    usual, step_s, paused_s = UsualDuration(), 0.1, 60.0
    for duration_s in (step_s, step_s, paused_s):
        usual.note(duration_s)
        assert is_stalled_after(usual, STALLED_S + 1)
    usual = UsualDuration()
    usual.note(step_s)
    usual.note(paused_s)
    assert is_stalled_after(usual, STALLED_S + 1)


def test_work_that_usually_takes_long_is_no_stall() -> None:
    usual = UsualDuration()
    assert is_stalled_after(usual, STALLED_S + 1)
    assert not is_stalled_after(usual, STALLED_S - 1)
    for duration_s in (0.1, 5.0, 5.0):
        usual.note(duration_s)
    assert not is_stalled_after(usual, STALLED_TIMES * 5.0 - 1)
    assert is_stalled_after(usual, STALLED_TIMES * 5.0 + 1)
