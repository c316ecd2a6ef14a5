"""A disk that fails at its k-th call, as SQLite's tests have it: see `faulty_disk.c`, which processes are started with.

It stands between a process and the C library, so that it meets every writer, also those that are not Python.
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
"""What happens to the k-th call: nothing; an error; half of a write, and then an error; no room from then on; half of a
write, and the end of the process.
"""


@functools.cache
def _library() -> Path:
    need_tools("g++")
    built = Path(tempfile.mkdtemp(prefix="psctl-faulty-disk-"), "faulty_disk.so")
    source = Path(__file__).with_suffix(".c")
    # As C: g++ brings gcc along.
    subprocess.run(["gcc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", built, source, "-ldl"], check=True)
    return built


def preloaded() -> dict[str, str]:
    """Environment of a process that may have such a disk; skips the test where nothing compiles."""
    return {"LD_PRELOAD": str(_library())}


def failing_at(call: int, mode: Mode, folder: Path, log: Path) -> dict[str, str]:
    """Environment of a process, or of its forks, of which a call for what is below a folder fails, from 1; each is
    written down as `NUMBER WHAT PATH`.
    """
    return preloaded() | {"FAULTY_DISK": f"{mode}:{call}:{log}:{folder}"}


def calls_in(log: Path) -> list[str]:
    """What a process has called, in its order: `write`, or `rename PATH`."""
    return [line.partition(" ")[2].strip() for line in log.read_text().splitlines()] if log.exists() else []


class FaultyDisk:
    """That of this process, which has been started with `preloaded`."""

    def __init__(self, folder: Path) -> None:
        self._folder = os.fsencode(folder)
        self._set = ctypes.CDLL(None).faulty_disk
        self._set.restype, self._set.argtypes = ctypes.c_long, [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_long]

    def fail_at(self, call: int, mode: Mode) -> int:
        """Let a call fail, counted from now; 0 for none. Returns how many there were since the last time."""
        return self._set(self._folder, mode.encode(), call)
