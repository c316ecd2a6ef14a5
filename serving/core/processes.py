"""Processes that psctl starts on the same machine (workers, ranks and stages), and memory for them. No torch."""

import contextlib
import io
import multiprocessing
import os
import select
import sys
import tempfile
import threading
from collections.abc import Iterator
from importlib import import_module
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, cast

from .garbage import imports_are_no_garbage

_PRELOADED = "patchedserve.serving.preload"
_MAX_LETTERS = 15
"""Longest process name on Linux."""
_STDERR = 2
INTERRUPTED = 130
"""Exit code of an interrupted process."""
_starting = threading.Lock()


def start_process(entry: str, *arguments: Any, device: str, name: str) -> BaseProcess:
    """Start a process, which must not outlive this one: it polls `is_parent_alive` or watches a connection.

    It has a session of its own, so that only this process receives Ctrl-C.

    Args:
        entry: function to run, as `module:function`. It returns the exit code, or None for 0. Threads that remain are
            not waited for.
        arguments: arguments of the function. They are pickled, and may be sockets and connections.
        device: device that the process computes on; "none" if it needs no torch.
        name: name of the process, also in the system's tools.
    """
    process = _context_for(device).Process(target=_begin, args=(entry, name, *arguments), name=name, daemon=True)
    # Without the lock, a second thread would save the first one's stand-in as the script.
    with _starting, _without_script():
        process.start()
    return process


def is_parent_alive() -> bool:
    """Return whether the process that has started this one is still alive."""
    parent = multiprocessing.parent_process()
    return parent is None or parent.is_alive()


def end_at_once(why: str, code: int) -> NoReturn:
    """End this process and its child processes at once, with a line on stderr: some of its threads cannot be ended."""
    with contextlib.suppress(OSError):
        # Without waiting for the reader of stderr.
        if sys.__stderr__ is not None and select.select([], [_STDERR], [], 0)[1]:
            os.write(_STDERR, f"{why}\n".encode())
    for process in multiprocessing.active_children():
        process.kill()
    os._exit(code)


def end_at_second_signal(*_: object) -> NoReturn:
    """End this process at once, as the handler of a signal that follows another one."""
    end_at_once("Ended at once by a second signal; what was open is lost", INTERRUPTED)


def memory_file() -> int:
    """Return the descriptor of an unnamed file, in memory if the system supports it. It vanishes with its last user."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("psctl")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _context_for(device: str) -> ForkServerContext | SpawnContext:
    """Return the start method for a device. Processes are never forks of this one, whose torch threads do not survive.

    On a CPU they are forks of a process that has only imported packages: the first start takes as long as without it,
    and all others take 4 CPU seconds less. A fork cannot use CUDA if any package has queried the devices.
    """
    if device != "cpu":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOADED])
    return context


@contextlib.contextmanager
def _without_script() -> Iterator[None]:
    """Hide the main module from processes that are started in this context.

    Python would import it again in each of them, which would run any code of a user's script outside
    `if __name__ == "__main__"`.
    """
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _begin(entry: str, name: str, *arguments: Any) -> None:
    os.setsid()
    with contextlib.suppress(OSError):  # other systems have no such file
        Path("/proc/self/comm").write_text(name[:_MAX_LETTERS])
    errors = cast("io.BufferedWriter", _LossyErrors())
    sys.stderr = io.TextIOWrapper(errors, "utf-8", "backslashreplace", line_buffering=True)
    module, _, function = entry.partition(":")
    with imports_are_no_garbage():
        run = getattr(import_module(module), function)
    code = run(*arguments) or 0
    sys.stdout.flush()
    sys.stderr.flush()
    # Shutting torch down takes a second or more on a busy machine, for which the process would outlive its parent.
    os._exit(code)


class _LossyErrors(io.RawIOBase):
    """Writes to stderr, as far as its reader takes it: a full or closed pipe must not end the work of a process."""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return _STDERR

    def write(self, line: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        with contextlib.suppress(OSError):
            os.write(_STDERR, line)
        return len(line)
