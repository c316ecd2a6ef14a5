"""Contention for the processor during a measurement: how long our threads waited for a core."""

import time
from pathlib import Path
from types import TracebackType
from typing import Self

MAX_WAITED = 0.2
"""Maximum share of waiting; a measurement with a greater share also reflects other work."""
_TASKS = Path("/proc/self/task")


class Contention:
    """A context manager that measures contention.

    After the context, `share` is the part of the time in which our threads were ready to run but waited for a core. Two
    busy threads on two cores, each shared with another busy process, wait half of the time. Only Linux reports it;
    elsewhere `share` is None.
    """

    share: float | None = None

    def __enter__(self) -> Self:
        self._waited_s, self._ran_s = _waited_s(), time.process_time()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        waited_s, ran_s = _waited_s(), time.process_time() - self._ran_s
        if waited_s is not None and self._waited_s is not None:
            # The waiting time of a thread that has ended meanwhile is lost.
            waited_s = max(0.0, waited_s - self._waited_s)
            self.share = waited_s / (waited_s + ran_s) if waited_s + ran_s > 0 else 0.0


def contention_now(seconds: float = 0.1) -> float | None:
    """Return the contention share over `seconds` of busy waiting on one core."""
    with Contention() as contention:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            pass
    return contention.share


def _waited_s() -> float | None:
    """Return the total seconds that this process's threads have waited for a core; None if it is not reported."""
    waited_ns = 0
    try:
        for task in _TASKS.iterdir():
            try:
                waited_ns += int((task / "schedstat").read_text().split()[1])
            except ProcessLookupError:  # the thread has just ended
                continue
    except (OSError, IndexError, ValueError):  # not Linux, or a kernel without schedstat
        return None
    return waited_ns / 1e9
