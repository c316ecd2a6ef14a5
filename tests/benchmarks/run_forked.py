"""Runs commands in forks of a process that has imported what they need, so that a machine's lease is not spent on it.

    run_forked.py OUT_DIR < PLAN

A line of the plan is `NAME SECONDS COMMAND ...`, where COMMAND is `psctl`, a Python file, or any program. `&` before it
starts it beside what follows, and a line `wait` waits for those. What is not finished after so many seconds is killed.
Each writes to OUT_DIR/NAME.log; `done` and how long each took goes to OUT_DIR/times.txt.
"""

import os
import runpy
import shlex
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Started:
    """A command that runs."""

    name: str
    pid: int
    start_s: float
    limit_s: float

    def has_ended(self, out: Path) -> bool:
        """Whether it has; its end is brought about where it is time, and noted."""
        took_s = time.monotonic() - self.start_s
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0 and took_s > self.limit_s:
            os.killpg(self.pid, signal.SIGKILL)
            pid, status = os.waitpid(self.pid, 0)
        if pid:
            took = f"{self.name}: exit {os.waitstatus_to_exitcode(status)} after {took_s:.1f} s"
            print(took, flush=True)
            with (out / "times.txt").open("a") as file:
                print(took, file=file)
        return pid != 0


def wait_for(running: list[Started], out: Path) -> None:
    """Wait until all have ended."""
    while running := [each for each in running if not each.has_ended(out)]:
        time.sleep(0.05)


def started(line: str, out: Path) -> Started:
    """Start the command of a line."""
    name, limit, *command = shlex.split(line)
    start_s, pid = time.monotonic(), os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        log = os.open(out / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os._exit(_run(command))
    return Started(name, pid, start_s, float(limit))


def _run(command: list[str]) -> int:
    """In the fork."""
    try:
        if command[0] == "psctl":
            from patchedserve.psctl.app import main as psctl

            code: object = psctl(command[1:])
        elif command[0].endswith(".py"):
            sys.argv = command
            runpy.run_path(command[0], run_name="__main__")
            code = 0
        else:
            os.execvp(command[0], command)
    except SystemExit as ending:
        code = ending.code
    except BaseException:  # noqa: BLE001  it ends here
        import traceback

        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return int(code) if isinstance(code, int) else 0


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    # Whether there is a device is asked in a way after which forks can use it.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import diffusers  # noqa: F401
    from diffusers import StableDiffusion3Pipeline, StableDiffusionXLPipeline  # noqa: F401
    from transformers import CLIPTextModelWithProjection  # noqa: F401

    import patchedserve.profiling.report.tables
    import patchedserve.profiling.steps.bench
    import patchedserve.psctl.app
    import patchedserve.serving.models.loading  # noqa: F401

    beside: list[Started] = []
    for line in map(str.strip, sys.stdin):
        if line == "wait":
            wait_for(beside, out)
            beside = []
        elif line.startswith("&"):
            beside.append(started(line[1:], out))
        elif line:
            wait_for([started(line, out)], out)
    wait_for(beside, out)


if __name__ == "__main__":
    main()
