"""Waiting for what other processes bring about."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from .psctl_process import PsctlProcess


def until(is_so: Callable[[], bool], timeout_s: float = 30.0, every_s: float = 0.05) -> None:
    """Wait for something that another process brings about. Raises AssertionError: it has not come in time."""
    end = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end, f"not so after {timeout_s:g} s"
        time.sleep(every_s)


def is_alive(process: int) -> bool:
    """Whether a process of this number is running: one that has ended may wait for a while to be reaped."""
    try:
        os.kill(process, 0)
        stat = Path(f"/proc/{process}/stat")
        return not stat.exists() or stat.read_text().rpartition(") ")[2][0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def killed_with_others(code: str, *arguments: str) -> list[int]:
    """Run Python code that prints the numbers of processes that it has started, and kill it; returns these. Raises
    AssertionError: one of them is not there before that, or outlives it by 5 s.
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
    """Press Ctrl-C as soon as something is so, or the command has ended; returns its outputs. It is killed if it is
    not over in time, which raises AssertionError or `subprocess.TimeoutExpired`.
    """
    try:
        until(lambda: is_so() or process.poll() is not None, timeout_s, every_s)
        process.send_signal(signal.SIGINT)
        return process.communicate(timeout=timeout_s)
    finally:
        process.kill()
