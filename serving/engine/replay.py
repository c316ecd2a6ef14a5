"""Replay of a trace: every request is submitted to the engine at its arrival time."""

import threading
from collections.abc import Sequence

from ..core.checked_request import CheckedRequest
from ..core.request_state import RequestRecord
from .engine import Engine
from .run_result import RunResult


def replay(engine: Engine, requests: Sequence[CheckedRequest], *, skips_idle: bool = False) -> RunResult:
    """Serve a trace. Each request is submitted at its `arrival_s` on the engine's clock, which starts now.

    A thread sleeps until each arrival and submits it. It does nothing else, so a busy denoise loop delays a submission
    by no more than the interpreter's switch interval; latencies count from `arrival_s` in any case.

    Args:
        engine: a new engine.
        requests: the trace as the engine's model has checked it, in order of arrival, with unique ids.
        skips_idle: whether the engine's clock is set forward to the next arrival when nothing is open. Latencies, steps
            and the order of events are those of the wall clock, but a trace of light load takes no longer than its
            work.

    Returns:
        The engine's result; after Ctrl-C the requests that had not arrived are "cancelled" as well.
    """
    errors: list[BaseException] = []
    num_submitted = 0
    engine.start()

    def submit_all() -> None:
        nonlocal num_submitted
        try:
            for checked in requests:
                if not engine.wait_until(checked.request.arrival_s, skips_idle=skips_idle):
                    return
                engine.submit_checked(checked)
                num_submitted += 1
        except BaseException as error:  # noqa: BLE001  raised in the caller's thread below
            errors.append(error)
        finally:
            engine.close()

    thread = threading.Thread(target=submit_all, name="psctl-replay", daemon=True)
    thread.start()
    try:
        result = engine.run()
    finally:
        thread.join()  # it ends as well, because the engine is closed now
    # An interrupted engine is closed, so that a submission at that very moment is refused.
    if errors and not result.was_interrupted:
        raise errors[0]
    for checked in requests[num_submitted:]:
        record = RequestRecord.of(checked.request)
        record.close("cancelled", result.duration_s, "the run was stopped before it arrived")
        engine.collector.on_finish(record, None, None)
    return result
