"""`psctl` in processes of its own, most of which are forks of one that has imported everything.

The imports of torch, diffusers and transformers take 4 to 6 CPU seconds, which tests of servers, of Ctrl-C and of kills
need not spend on each of their processes. The tests of a pytest worker share fork servers: processes that only import.
They have one thread, use no device, and ignore Ctrl-C. For each command, a fork server forks a keeper. The keeper forks
the command, and reports its process id and, at its end, its exit code. A forked command has the same arguments,
environment, folder, outputs and signal handlers as a started one, and runs the console script as `__main__`. Its
process id, signals, pipes and exit code are real. At its end it waits for its threads, calls its exit handlers and
flushes its outputs, but does not finalise the interpreter, which would take another 1.4 CPU seconds.

Libraries read environment variables at import, so a fork server has read them from its own environment. There is
therefore one for each environment, apart from the variables of psctl, and the last two are kept. A command is started
as a new process if torch uses several threads, which a fork would lack (in benchmarks, that is), if PSCTL_THREADS is
set (which libraries read), and if coverage is measured. Tests of the start itself (imported packages, their output, the
time of the help) do not use this module, nor do ranks and workers, which psctl starts in its own ways.
"""

import atexit
import contextlib
import functools
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from patchedserve.psctl.app import apply_thread_settings
from patchedserve.serving.core.garbage import imports_are_no_garbage
from patchedserve.serving.core.quiet import quiet_imports

_MODULE = "patchedserve.tests.support.psctl_process"
_PRELOADED = (
    "patchedserve.serving.preload",
    "patchedserve.serving.families.sdxl",
    "diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl",
    "patchedserve.serving.runs.draw",
    "patchedserve.serving.server.local",
    "patchedserve.serving.server.run",
    "matplotlib.pyplot",
)
"""Modules that most commands import, except pyarrow, which starts a thread."""
_NOT_FOR_LIBRARIES = {
    "PYTEST_CURRENT_TEST",
    "FAULTY_DISK",
    "GOMP_SPINCOUNT",
    "DIFFUSERS_VERBOSITY",
    "TRANSFORMERS_VERBOSITY",
    "KINETO_LOG_LEVEL",
    "TORCHINDUCTOR_CACHE_DIR",
}
"""Other variables that may differ: pytest sets them for each test, faulty disks need them, or psctl or torch set them.
"""
_MOST_BYTES = 1 << 18


class ForkedPsctl:
    """A command that the fork server has forked, with the part of `subprocess.Popen`'s interface that tests need.

    Attributes:
        pid, returncode, stdout, stderr: as in `subprocess.Popen`.
    """

    def __init__(self, server: socket.socket, command: Mapping[str, object], stdout: int, stderr: int) -> None:
        self.returncode: int | None = None
        self.stdout, out = _output(stdout)
        self.stderr, err = _output(stderr)
        self._keeper, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(server, [json.dumps(command).encode()], [theirs.fileno(), out, err])
        for each in (out, err):
            os.close(each)
        self.pid = int(self._keeper.recv(_MOST_BYTES))

    def poll(self) -> int | None:
        """Return the exit code; None while the command is running."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the command to end and return its exit code. Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            if not select.select([self._keeper], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("psctl", timeout or 0.0)
            self.returncode = int(self._keeper.recv(_MOST_BYTES))
            self._keeper.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read both outputs and wait for the end; an output without a pipe is "".

        After the timeout, the command is killed and `subprocess.TimeoutExpired` raised.
        """
        with ThreadPoolExecutor(2) as pool:
            texts = [pool.submit(each.read) if each else None for each in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            out, err = (text.result() if text else "" for text in texts)
        return out, err

    def send_signal(self, sig: int) -> None:
        """Send a signal, if the command is still running."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ends at this moment
                os.kill(self.pid, sig)

    def kill(self) -> None:
        """Kill the command."""
        self.send_signal(signal.SIGKILL)


PsctlProcess = ForkedPsctl | subprocess.Popen[str]


def start_psctl(
    *arguments: str | Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdout: int = subprocess.PIPE,
    stderr: int = subprocess.PIPE,
) -> PsctlProcess:
    """Start `psctl ARGUMENTS...`.

    Args:
        arguments: arguments of `psctl`.
        env: variables added to this process's environment.
        cwd: working folder; None for this process's.
        stdout, stderr: `subprocess.PIPE` or `subprocess.DEVNULL`.
    """
    command = [find_script(), *map(str, arguments)]
    environment = {**os.environ, **(env or {})}
    is_measured = any(name.startswith("COVERAGE_") for name in environment)
    has_one_thread = environment.get("OMP_NUM_THREADS") == "1"
    if is_measured or not has_one_thread or "PSCTL_THREADS" in environment:
        return subprocess.Popen(command, env=environment, cwd=cwd, stdout=stdout, stderr=stderr, text=True)
    told = {"argv": command, "environment": environment, "cwd": str(cwd or Path.cwd())}
    return ForkedPsctl(_fork_server(frozenset(_for_libraries(environment).items())), told, stdout, stderr)


@functools.cache
def find_script() -> str:
    """Return the path of the installed console script."""
    script = shutil.which("psctl", path=str(Path(sys.executable).parent))
    assert script is not None, "psctl is not installed beside this Python; run `make setup`"
    return script


def _for_libraries(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith("PSCTL_") and name not in _NOT_FOR_LIBRARIES
    }


@functools.lru_cache(maxsize=2)
def _fork_server(environment: frozenset[tuple[str, str]]) -> socket.socket:
    """Start a fork server with this environment and return its socket.

    The server exits when the socket is closed: after two others have been requested, or when this process ends.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        number = theirs.fileno()
        command = [sys.executable, "-m", _MODULE, str(number)]
        _started.append(subprocess.Popen(command, pass_fds=[number], env=dict(environment)))
    return ours


_started: list[subprocess.Popen[bytes]] = []
"""Fork servers, kept because no code waits for them."""


def _output(wanted: int) -> tuple[IO[str] | None, int]:
    """Open an output; returns the end that this process reads (None for DEVNULL), and the end that is written to."""
    if wanted == subprocess.DEVNULL:
        return None, os.open(os.devnull, os.O_WRONLY)
    ours, theirs = os.pipe()
    return open(ours), theirs


def _serve(channel: socket.socket) -> dict[str, Any] | None:
    """Run the fork server. Returns None in the server when its pytest worker ends, and the settings in each command."""
    while True:
        told, numbers, _, _ = socket.recv_fds(channel, _MOST_BYTES, 3)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not told:
            return None
        if not os.fork():
            channel.close()
            _keep(*numbers)
            return json.loads(told)
        for number in numbers:
            os.close(number)


def _keep(keeper: int, stdout: int, stderr: int) -> None:
    """Fork and return in the command only; this process waits for its end and reports its exit code."""
    process = os.fork()
    if not process:
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
    for number in (stdout, stderr):
        os.close(number)
    with socket.socket(fileno=keeper) as end:
        if process:
            end.send(str(process).encode())
            end.send(str(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])).encode())
            os._exit(0)


def main() -> None:
    """Run the fork server, and every command that it forks."""
    exit_code = 1  # for an uncaught exception
    # The first registered handler is called last.
    atexit.register(lambda: _leave(exit_code))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel, sys.path[0] = socket.socket(fileno=int(sys.argv[1])), str(Path(find_script()).parent)
    apply_thread_settings(os.environ)
    with imports_are_no_garbage():
        quiet_imports()
        for module in _PRELOADED:
            import_module(module)
    num_threads = len([*Path("/proc/self/task").iterdir()])
    assert num_threads == 1, f"a fork would lack {num_threads - 1} threads"
    told = _serve(channel)
    if told is None:
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(told["environment"])
    os.chdir(told["cwd"])
    sys.argv = told["argv"]
    # The server's stdout may be a file, while the command's is a pipe, which cannot seek.
    sys.stdout = open(1, "w", encoding=sys.stdout.encoding, closefd=False)  # noqa: SIM115  it stays open
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as left:
        exit_code = int(left.code or 0)
        raise


def _leave(exit_code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    main()
