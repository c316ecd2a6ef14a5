"""Runs of a command whose k-th call of the disk fails, for many k, in one process that imports everything once.

`python -m patchedserve.tests.support.disk_runs` reads `DiskRuns` from stdin, as JSON, and writes `DiskRun`s to stdout;
`faulty_disk.preloaded` must be in its environment.
"""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from patchedserve.profiling.report.run_data import RunData

from .faulty_disk import FaultyDisk, Mode, calls_in, failing_at, preloaded

OUT = "OUT"
"""Placeholder in arguments for the folder of a run."""


@dataclass(frozen=True, slots=True)
class DiskRun:
    """Outcome of a command with one failed call.

    Attributes:
        call, what, mode: number of the failed call, the call itself, and how it failed.
        code, err: exit code and stderr of the command.
        folder: folder that the command wrote into.
    """

    call: int
    what: str
    mode: Mode
    code: int
    err: str
    folder: str


@dataclass(frozen=True, slots=True)
class DiskRuns:
    """A command to run with one failing call at a time.

    Attributes:
        arguments: arguments of psctl.
        start: folder whose content each run's folder has at first.
        runs_in: parent folder of the runs' folders.
        one_in: one in this many of the differing calls fails in a run of its own.
    """

    arguments: Sequence[str]
    start: str
    runs_in: str
    one_in: int = 1

    def run(self) -> tuple[str, list[DiskRun]]:
        """Run the command in a separate process; returns the folder of a run without a failed call, and the other runs.

        Raises AssertionError: the run without a failed call did not succeed.
        """
        done = subprocess.run(
            [sys.executable, "-m", "patchedserve.tests.support.disk_runs"],
            input=json.dumps(asdict(self)),
            env=os.environ | failing_at(0, "count", Path("/nowhere"), Path(self.runs_in, "calls")) | preloaded(),
            stdout=subprocess.PIPE,
            stderr=None,
            text=True,
            check=True,
        )
        whole, *others = [DiskRun(**each) for each in json.loads(done.stdout)]
        assert whole.code == 0, whole.err
        return whole.folder, others


@contextlib.contextmanager
def plots_drawn_once() -> Iterator[None]:
    """Use the first report's plots in all reports: drawing takes most of the time of a run, and writes no file."""
    from patchedserve.profiling.report import html

    draw_all = html.draw_all
    drawn = dict[str, bytes]()

    def draw_once(data: RunData) -> dict[str, bytes]:
        drawn.update(drawn or draw_all(data))
        return drawn

    html.draw_all = draw_once
    try:
        yield
    finally:
        html.draw_all = draw_all


def _main() -> None:
    runs = DiskRuns(**json.load(sys.stdin))
    with plots_drawn_once():
        found = _runs(runs)
    json.dump([asdict(each) for each in found], sys.stdout)


def _runs(runs: DiskRuns) -> list[DiskRun]:
    log = Path(runs.runs_in, "calls")
    whole = _one(runs, 0, "", "count")
    calls = calls_in(log)
    found = [whole]
    for turn, call in enumerate(_distinct_calls(calls)[:: runs.one_in]):
        mode: Mode = ("eio", "enospc", "torn")[turn % 3]
        found.append(_one(runs, call, calls[call - 1], mode))
    return found


def _one(runs: DiskRuns, call: int, what: str, mode: Mode) -> DiskRun:
    from patchedserve.psctl.app import main

    folder, err = Path(runs.runs_in, f"{call:04}"), io.StringIO()
    shutil.copytree(runs.start, folder)
    disk, before = FaultyDisk(folder), Path.cwd()
    Path(runs.runs_in, "calls").unlink(missing_ok=True)
    os.chdir(folder)
    disk.fail_at(call, mode)
    try:
        with open(os.devnull, "w") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([each.replace(OUT, str(folder)) for each in runs.arguments])
    finally:
        disk.fail_at(0, "count")
        os.chdir(before)
    return DiskRun(call, what, mode, code, err.getvalue(), str(folder))


def _distinct_calls(calls: Sequence[str]) -> list[int]:
    """Return the numbers of calls, leaving out those between the first and the last of a series of equal ones."""
    changes = [number for number, (one, other) in enumerate(pairwise(calls), 1) if one != other]
    return sorted({1, *changes, *(number + 1 for number in changes), len(calls)})


if __name__ == "__main__":
    _main()
