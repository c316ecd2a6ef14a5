"""Parts that tests plan: one that works, and those that go wrong."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from patchedserve.tests.benchmarks.lease.context import Context, Row


def fine(context: Context) -> Iterator[Row]:
    """Two rows, and a line in a file for each that is measured."""
    yield from context.measured((label, lambda label=label: _recorded_row(context, label)) for label in ("one", "two"))


def _recorded_row(context: Context, label: str) -> Row:
    with (context.folder / "measured.txt").open("a") as file:
        print(label, file=file)
    return {"value": 1.0}


def hangs(context: Context) -> Iterator[Row]:
    """A row, then nothing."""
    yield {"label": "before", "value": 1.0}
    time.sleep(600)


def dies(context: Context) -> Iterator[Row]:
    """A row, then the end of the process, unless a file says that the cause is gone."""
    yield {"label": "before", "value": 1.0}
    if not Path(context.folder, "repaired").exists():
        os.kill(os.getpid(), signal.SIGKILL)


def raises(context: Context) -> Iterator[Row]:
    """One row of two can be measured, and one is not a number."""

    def wrong() -> Row:
        raise ValueError("no such kernel\nand more")

    tasks = {"wrong": wrong, "right": lambda: {"value": 1.0}, "nan": lambda: {"value": float("nan")}}
    yield from context.measured(tasks.items())


def slow(context: Context) -> Iterator[Row]:
    """More rows than there is time for."""

    def row() -> Row:
        time.sleep(0.25)
        return {"value": 1.0}

    yield from context.measured((f"row {number}", row) for number in range(20))
