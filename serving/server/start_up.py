"""Progress of a server's start, which `/readyz` returns until the server is ready. No torch."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi.responses import JSONResponse, Response

from ...data.files import quarantine, write_json
from .errors import not_ready

_RETRY_S = 5.0
"""Seconds until clients try again, where the length of the start is unknown."""


class StartUp:
    """Phase of the start, and an estimate of the time left. Call it as an `OnProgress`, from any thread.

    The estimate uses the durations of the previous start, which a file keeps, and of the current phase the units that
    are done.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._phases: dict[str, float] = {}
        # Replaced as a whole, since it is written and read in different threads.
        self._now = ("loading", 0, 0, self._began_s)
        self._before: dict[str, float] = {}
        self._file: Path | None = None

    def __call__(self, what: str, done: int = 0, total: int = 0) -> None:
        """Report progress; a new phase ends the one before it."""
        last, _, _, since_s = self._now
        if what != last:
            now_s = self._clock()
            self._phases[last] = self._phases.get(last, 0.0) + now_s - since_s
            since_s = now_s
        self._now = (what, done, total, since_s)

    def remember_in(self, file: Path) -> None:
        """Use the durations in a file for the estimate, and keep those of this start there once it is over."""
        self._file = file
        if file.exists():
            try:
                self._before = {str(name): float(value) for name, value in json.loads(file.read_text()).items()}
            except (ValueError, AttributeError, TypeError) as error:
                quarantine(file, str(file), error)

    def end(self) -> None:
        """Keep the durations for the next start. Raises OSError."""
        self("ready")
        if self._file is not None:
            write_json(self._file, {name: round(seconds, 3) for name, seconds in self._phases.items()})

    @property
    def doing(self) -> str:
        """The current phase in words, such as "tuning 3 of 9"."""
        what, done, total, _ = self._now
        return f"{what} {done} of {total}" if total else what

    @property
    def left_s(self) -> float | None:
        """Estimated seconds until the server is ready; None if there is nothing to estimate it from."""
        what, done, total, since_s = self._now
        passed_s = self._clock() - since_s
        # A phase that has gone by in another order is not expected again.
        to_come = [seconds for name, seconds in self._before.items() if name not in self._phases and name != what]
        if total and done:
            return passed_s / done * (total - done) + sum(to_come)
        return max(0.0, self._before[what] - passed_s) + sum(to_come) if what in self._before else None

    def answer(self, path: str) -> Response:
        """Return the response to a request that arrives before there is an application."""
        if path in ("/livez", "/health"):
            return JSONResponse({"status": "alive" if path == "/livez" else "starting"})
        wait_s = math.ceil(self.left_s or _RETRY_S)
        headers = {"Retry-After": str(max(1, wait_s))}
        if path in ("/readyz", "/ready"):
            return JSONResponse(self.to_json(), 503, headers)
        return JSONResponse(not_ready(f"the server is starting: {self.doing}").to_json(), 503, headers)

    def to_json(self) -> dict[str, Any]:
        """Return the body of `/readyz`."""
        what, done, total, _ = self._now
        left_s = self.left_s
        return {
            "status": "starting",
            "doing": what,
            **({"done": done, "total": total} if total else {}),
            "elapsed_s": round(self._clock() - self._began_s, 1),
            "estimated_s": None if left_s is None else round(left_s, 1),
        }
