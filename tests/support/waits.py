"""Waiting for effects of other processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from .psctl_process import PsctlProcess


def until(is_so: Callable[[], bool], timeout_s: float = 30.0, every_s: float = 0.05) -> None:
    """Wait until a condition is true that another process brings about. Raises AssertionError: it is not in time."""
    end = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end, f"not so after {timeout_s:g} s"
        time.sleep(every_s)


def is_alive(process: int) -> bool:
    """Whether a process with this id is running; one that has ended but is not reaped yet does not count."""
    try:
        os.kill(process, 0)
        stat = Path(f"/proc/{process}/stat")
        return not stat.exists() or stat.read_text().rpartition(") ")[2][0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def kill_parent(code: str, *arguments: str) -> list[int]:
    """Run Python code that prints the ids of processes that it has started, and kill it; returns these ids.

    Raises AssertionError: one of them does not run before the kill, or outlives it by 5 s.
    """
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        others = [int(number) for number in process.stdout.readline().split()]
        assert all(map(is_alive, others))
        process.kill()
    until(lambda: not any(map(is_alive, others)), timeout_s=5)
    return others


def interrupted_when(
    process: PsctlProcess, is_so: Callable[[], bool], timeout_s: float = 240.0, every_s: float = 0.05
) -> tuple[str, str]:
    """Send Ctrl-C as soon as a condition is true or the command has ended; returns its outputs.

    A command that does not end in time is killed, which raises AssertionError or `subprocess.TimeoutExpired`.
    """
    try:
        until(lambda: is_so() or process.poll() is not None, timeout_s, every_s)
        process.send_signal(signal.SIGINT)
        return process.communicate(timeout=timeout_s)
    finally:
        process.kill()
