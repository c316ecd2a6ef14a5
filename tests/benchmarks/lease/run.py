"""Run the parts of a lease within its time, each in the worker of its model. Imports no torch.

A part that does not fit into the remaining time is left out and named; later, shorter parts still run. A part that
takes too long, or whose worker dies, has failed, and the others continue. A second run with the same state folder
measures the missing parts, those that have not failed before first.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from patchedserve.data.errors import UsageError

from .context import Row
from .forms import problems_of
from .plan import PLAN, Part
from .processes import Worker
from .scale import FULL, REHEARSAL, Scale
from .state import State

_RESERVE_S = 4.0
"""Time reserved for writing the results and ending the processes."""
_GRACE_S = 3.0
"""Margin between the time that a part plans for and the time after which it is killed."""


@dataclass(slots=True)
class Lease:
    """One run.

    Attributes:
        state: results so far.
        scale: sizes of all parts.
        started_s, end_s: start of the run and time by which it has to end, on the monotonic clock.
        workers: running workers by name.
    """

    state: State
    scale: Scale
    started_s: float
    end_s: float
    workers: dict[str, Worker] = field(default_factory=dict)

    def run(self, plan: Sequence[Part]) -> bool:
        """Run the missing parts of a plan; return whether all parts are done."""
        wanted = [part for part in plan if self.state.status_of(part) != "done"]
        # A part that failed may fail again and use the time of parts that have not been tried.
        wanted.sort(key=lambda part: self.state.status_of(part) == "failed")
        try:
            for number, part in enumerate(wanted):
                self._run_part(part)
                self.state.save(time.monotonic() - self.started_s)
                self._close_except({later.worker for later in wanted[number + 1 :]})
        finally:
            self._close_except(set())
        self.state.save(time.monotonic() - self.started_s)
        return all(self.state.status_of(part) == "done" for part in plan)

    def _run_part(self, part: Part) -> None:
        result = self.state.result_of(part.name)
        left_s, least_s = self.end_s - _RESERVE_S - time.monotonic(), part.least_s * self.scale.least_share
        if left_s < least_s:
            reason = f"it needs {least_s:.0f} s, and {max(0.0, left_s):.0f} s are left"
            if self.state.status_of(part) in (None, "left out"):  # otherwise its earlier status is more informative
                self.state.keep_end(result, "left out", reason, {}, 0.0)
            _print(f"{part.name}: left out: {reason}")
            return
        result["errors"] = []
        start_s = time.monotonic()
        worker = self.workers.get(part.worker)
        if worker is None or not worker.is_alive:
            options = ["--rehearse"] if self.scale.is_rehearsal else []
            worker = self.workers[part.worker] = Worker(part.worker, self.state.folder, options)

        known = [row["label"] for row in result["rows"]]

        def keep(row: Row) -> None:
            if row["label"] in known:
                return
            self.state.keep_row(result, row)
            self.state.save(time.monotonic() - self.started_s)

        most_s = part.most_s * self.scale.most_share
        limit_s = min(most_s, left_s)
        end = worker.run(part, known, max(0.5, limit_s - _GRACE_S), limit_s, keep)
        taken_s, status = time.monotonic() - start_s, end.status
        if status == "killed":
            # At the end of the run, the part may have just started.
            status = "failed" if limit_s == most_s else "partial"
        self.state.keep_end(result, status, end.reason, end.notes, taken_s)
        why = f": {end.reason}" if end.reason else ""
        _print(f"\n{part.name}: {status} in {taken_s:.1f} s, at {time.monotonic() - self.started_s:.0f} s{why}")
        for table in self.state.tables(part.name):
            _print(table.to_markdown())

    def _close_except(self, names: set[str]) -> None:
        """End the workers that no later part needs, which frees the device memory of their models."""
        for name in [name for name in self.workers if name not in names]:
            self.workers.pop(name).close()


def _print(text: str) -> None:
    print(text, flush=True)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"lease.sh: {message}\n")


def main(arguments: Sequence[str] | None = None, plan: Sequence[Part] = PLAN) -> int:
    """Run `lease.sh`; return the exit code: 1 if a part failed, or in a rehearsal is missing or malformed."""
    parser = _Parser(prog="lease.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=560.0, help="the run ends within this time (560)")
    parser.add_argument("--rehearse", nargs="?", const="", metavar="FOLDER", help="tiny models on the CPU")
    parser.add_argument("--state", type=Path, default=Path("/tmp/psctl-lease"), help="of all runs on this machine")
    parser.add_argument("--out", type=Path, help="gets lease.tar.gz (the state folder)")
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if not 0 < given.seconds < float("inf"):
        parser.error(f"--seconds is {given.seconds:g}, but it must be above 0 and finite")
    # The script may have run for a while before this process started.
    before_s = 0.0 if given.started is None else max(0.0, time.time() - given.started)
    started_s = time.monotonic() - before_s
    is_rehearsal = given.rehearse is not None
    folder = given.state
    if is_rehearsal:
        folder = Path(given.rehearse or tempfile.mkdtemp(prefix="psctl-rehearsal-"))
    folder = folder.absolute()
    try:
        state = State(folder, given.out or folder, is_rehearsal=is_rehearsal)
    except (UsageError, OSError) as error:
        parser.error(str(error))
    lease = Lease(state, REHEARSAL if is_rehearsal else FULL, started_s, started_s + given.seconds)
    is_done = lease.run(plan)
    parts = state.manifest["parts"]
    problems = [problem for name in parts for problem in problems_of(name, state.result_of(name))]
    for problem in problems:
        _print(f"malformed: {problem}")
    counts = {status: [name for name in parts if parts[name]["status"] == status] for status in _STATUSES}
    ended = "; ".join(f"{status}: {', '.join(names)}" for status, names in counts.items() if names)
    _print(f"\n{ended}\n{given.out or folder}/lease.tar.gz after {time.monotonic() - started_s:.0f} s")
    if is_rehearsal:
        return 0 if is_done and not problems else 1
    return 1 if counts["failed"] else 0


_STATUSES = ("done", "partial", "failed", "left out")

if __name__ == "__main__":
    sys.exit(main())
