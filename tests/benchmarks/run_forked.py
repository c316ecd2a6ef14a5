"""Runs commands in forks of a process that has imported what they need, so that a machine's lease is not spent on it.

    run_forked.py OUT_DIR < PLAN

A line of the plan is `NAME SECONDS COMMAND ...`, where COMMAND is `psctl`, a Python file, or any program. `&` before it
starts it beside what follows, and a line `wait` waits for those. What is not finished after so many seconds is killed.
Each writes to OUT_DIR/NAME.log, and how it ended and when goes to OUT_DIR/times.txt. (The fork servers of
tests/support/psctl_process.py are for one thread and no device.)
"""

import multiprocessing
import os
import runpy
import shlex
import signal
import sys
import time
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

_IMPORTED = ("transformers", "patchedserve.profiling.steps.bench", "patchedserve.psctl.app")


def run(command: list[str], log: Path) -> None:
    """In the fork."""
    os.setpgid(0, 0)  # what it starts is killed with it
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if command[0] == "psctl":
        from patchedserve.psctl.app import main as psctl

        sys.exit(psctl(command[1:]))
    if not command[0].endswith(".py"):
        os.execvp(command[0], command)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    # Whether there is a device is asked in a way after which forks can use it.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(list(_IMPORTED))
    start_s, running = time.monotonic(), dict[BaseProcess, float]()

    def finish() -> None:
        """Wait for all that run, and bring their end about where it is time."""
        while running:
            soonest_s = max(0.0, min(running.values()) - time.monotonic())
            wait([process.sentinel for process in running], timeout=soonest_s)
            for process, end_s in list(running.items()):
                if process.is_alive() and time.monotonic() >= end_s:
                    os.killpg(process.pid or 0, signal.SIGKILL)
                    process.join()
                if not process.is_alive():
                    del running[process]
                    ended = f"{process.name}: exit {process.exitcode} at {time.monotonic() - start_s:.1f} s"
                    print(ended, flush=True)
                    with (out / "times.txt").open("a") as file:
                        print(ended, file=file)

    for line in map(str.strip, sys.stdin):
        if line and line != "wait":
            name, limit, *command = shlex.split(line.removeprefix("&"))
            process = server.Process(target=run, args=(command, out / f"{name}.log"), name=name)
            process.start()
            running[process] = time.monotonic() + float(limit)
        if line and not line.startswith("&"):
            finish()
    finish()


if __name__ == "__main__":
    main()
