"""Progress of long work: bars on a terminal; in a pipe one line when a phase starts and one when it ends."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_SAMPLE_SHARE, _MAX_SAMPLE = 20, 20
"""The time of a phase is estimated from a twentieth of its units, but at most 20. The first reported units are left
out, because they include set-up, unless there are no others."""


class Phase:
    """One phase of the work. Call it with the number of units that are done.

    Args:
        what: name of the units, in the plural.
        total: number of units.
        done: number of units that an earlier run has done.
        expected_s: expected seconds for the rest; None to estimate them from the first units.
        bars: shows the phase on a terminal.
        notify: prints a line in a pipe.
    """

    def __init__(
        self,
        what: str,
        total: int,
        *,
        done: int = 0,
        expected_s: float | None = None,
        bars: "Progress",
        notify: Callable[[str], None] | None,
    ) -> None:
        self._what, self._num_left, self._done = what, total - done, 0
        self._bars, self._notify = bars, notify if self._num_left > 0 else None
        self._bar = bars.add_task(what, total=total, completed=done)
        self._started_s = self._first_s = time.monotonic()
        self._first = 0
        self._sample = max(1, min(_MAX_SAMPLE, self._num_left // _SAMPLE_SHARE))
        self._last_reached: int | None = None
        self._is_announced = False
        if expected_s is not None:
            self._announce(expected_s)

    def __call__(self, count: int = 1) -> None:
        self._done += count
        self._bars.advance(self._bar, count)
        is_first = self._done == count
        if is_first and self._sample > 1 and self._done < self._num_left:
            self._first, self._first_s = self._done, time.monotonic()
        elif not self._is_announced and self._done >= self._sample:
            passed_s = time.monotonic() - self._first_s
            self._announce(passed_s / (self._done - self._first) * self._num_left)
        if self._done >= self._num_left:
            self.end()

    def advance_to(self, number: int) -> None:
        """Record that unit `number`, from 1, is done. Units before the first recorded one belong to an earlier run."""
        if self._last_reached is None:
            self._num_left -= number - 1
            self._bars.advance(self._bar, number - 1)
        self(1 if self._last_reached is None else number - self._last_reached)
        self._last_reached = number

    def show(self, what: str) -> None:
        """Show the current work beside the bar."""
        self._bars.update(self._bar, description=what)

    def end(self) -> None:
        """Print what was done; further calls print nothing."""
        if self._notify is not None and self._is_announced:
            part = "" if self._done >= self._num_left else f" of {self._num_left:,}"
            self._notify(f"{self._what}: {self._done:,}{part} done in {_duration(time.monotonic() - self._started_s)}")
        self._notify = None

    def _announce(self, expected_s: float) -> None:
        self._is_announced = True
        if self._notify is not None:
            minutes = "less than a minute" if expected_s < 45 else f"about {round(expected_s / 60) or 1} min"
            self._notify(f"{self._what}: {self._num_left:,} to do, {minutes} ...")


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"


class Phases(AbstractContextManager["Phases"]):
    """Phases of one command, concurrent or consecutive. Call the object to start one.

    Args:
        console: console of stderr.
        notify: prints a line.
        is_quiet: whether to show no bars.
    """

    def __init__(self, console: "Console", notify: Callable[[str], None], *, is_quiet: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        is_shown = console.is_terminal and not is_quiet
        self._bars = Progress(*columns, console=console, transient=True, disable=not is_shown)
        self._notify = None if is_shown else notify
        self._phases: list[Phase] = []

    def __call__(self, what: str, total: int, *, done: int = 0, expected_s: float | None = None) -> Phase:
        """Start a phase; the arguments are those of `Phase`."""
        phase = Phase(what, total, done=done, expected_s=expected_s, bars=self._bars, notify=self._notify)
        self._phases.append(phase)
        return phase

    def last(self) -> Phase:
        """Return the phase that was started last."""
        return self._phases[-1]

    def __enter__(self) -> "Phases":
        self._bars.start()
        return self

    def __exit__(self, kind: Any, *details: object) -> None:
        self._bars.stop()
        if kind is None:
            for phase in self._phases:
                phase.end()
