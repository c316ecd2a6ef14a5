"""A disk whose k-th call fails, as in SQLite's tests; implemented in `faulty_disk.c`, which processes preload.

It stands between a process and the C library, so that it affects every writer, also those not written in Python.
"""

import ctypes
import functools
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Literal

from .tools import need_tools

Mode = Literal["count", "eio", "enospc", "torn", "full", "kill"]
"""Effect on the k-th call: nothing; an I/O error; no space left; half of a write, and then an error; no space left from
then on; half of a write, and the end of the process.
"""


@functools.cache
def _library() -> Path:
    need_tools("gcc")
    built = Path(tempfile.mkdtemp(prefix="psctl-faulty-disk-"), "faulty_disk.so")
    source = Path(__file__).with_suffix(".c")
    subprocess.run(["gcc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", built, source, "-ldl"], check=True)
    return built


def preloaded() -> dict[str, str]:
    """Return the environment of a process that may have such a disk; skips the test if there is no compiler."""
    return {"LD_PRELOAD": str(_library())}


def failing_at(call: int, mode: Mode, folder: Path, log: Path) -> dict[str, str]:
    """Return the environment of a process, or of its forks, in which one call below a folder fails.

    Calls count from 1; each is logged as `NUMBER WHAT PATH`.
    """
    return preloaded() | {"FAULTY_DISK": f"{mode}:{call}:{log}:{folder}"}


def calls_in(log: Path) -> list[str]:
    """Return the calls of a process in their order: `write`, or `rename PATH`."""
    return [line.partition(" ")[2].strip() for line in log.read_text().splitlines()] if log.exists() else []


class FaultyDisk:
    """The faulty disk of this process, which must have been started with `preloaded`."""

    def __init__(self, folder: Path) -> None:
        self._folder = os.fsencode(folder)
        self._set = ctypes.CDLL(None).faulty_disk
        self._set.restype, self._set.argtypes = ctypes.c_long, [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_long]

    def fail_at(self, call: int, mode: Mode) -> int:
        """Make a call fail, counted from now; 0 for none. Returns the number of calls since the last time."""
        return self._set(self._folder, mode.encode(), call)
