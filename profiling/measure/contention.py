"""Whether other work had the processor while something was measured: how long our threads waited for a core."""

import time
from pathlib import Path
from types import TracebackType
from typing import Self

MOST_WAITED = 0.2
"""What is measured with a greater share tells of other work as well."""
_TASKS = Path("/proc/self/task")


class Contention:
    """A context whose `share` says afterwards how much of the time in which our threads wanted a core they had none.

    Two busy threads on two cores with another busy process beside each wait half of the time. Linux tells; elsewhere
    the share is None.
    """

    share: float | None = None

    def __enter__(self) -> Self:
        self._waited_s, self._ran_s = _waited_s(), time.process_time()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        waited_s, ran_s = _waited_s(), time.process_time() - self._ran_s
        if waited_s is not None and self._waited_s is not None:
            # A thread that has ended meanwhile takes its waiting with it.
            waited_s = max(0.0, waited_s - self._waited_s)
            self.share = waited_s / (waited_s + ran_s) if waited_s + ran_s > 0 else 0.0


def contention_now(seconds: float = 0.1) -> float | None:
    """The share over so much of busy waiting, on one core."""
    with Contention() as contention:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            pass
    return contention.share


def _waited_s() -> float | None:
    """Seconds that this process's threads have waited for a core, all together."""
    waited_ns = 0
    try:
        for task in _TASKS.iterdir():
            try:
                waited_ns += int((task / "schedstat").read_text().split()[1])
            except ProcessLookupError:  # it has just ended
                continue
    except (OSError, IndexError, ValueError):  # no Linux, or one that does not tell
        return None
    return waited_ns / 1e9
