"""Processes that psctl starts beside its own, on the same machine: workers, ranks and stages. No torch."""

import contextlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from .garbage import imports_are_no_garbage

_PRELOADED = "patchedserve.serving.preload"
_MOST_LETTERS = 15
"""Of a process's name, as Linux has it."""
_starting = threading.Lock()


def start_process(entry: str, *arguments: Any, device: str, name: str) -> BaseProcess:
    """Start a process, which must not outlive this one: it looks at `parent_lives`, or at a connection.

    It has a session of its own, so that Ctrl-C is this process's to handle.

    Args:
        entry: what it does, as `module:function`, which returns the exit code, or None for 0. Threads that are left
            then are not waited for.
        arguments: of the function; they are pickled, and may be sockets and connections.
        device: what it computes on; "none" for one that needs no torch.
        name: what it is called, also by the system's tools.
    """
    process = _context_for(device).Process(target=_begin, args=(entry, name, *arguments), name=name, daemon=True)
    # Of two threads at once, one would take the other's stand-in for the script.
    with _starting, _without_script():
        process.start()
    return process


def parent_lives() -> bool:
    """Whether the process is still there that has started this one."""
    parent = multiprocessing.parent_process()
    return parent is None or parent.is_alive()


def _context_for(device: str) -> ForkServerContext | SpawnContext:
    """How processes are begun: never as forks of this one, whose threads of torch they would have in no usable state.

    On a CPU they are forks of one that has done nothing but import: the first takes as long as ever, and those beside
    it and after it take 4 CPU seconds less. A fork has no use of CUDA if any package has asked for devices.
    """
    if device != "cpu":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOADED])
    return context


@contextlib.contextmanager
def _without_script() -> Iterator[None]:
    """Let processes that are started meanwhile know nothing of this one's main module, which Python would import again
    in each: of users' scripts, that would run what stands outside of `if __name__ == "__main__"`.
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
        Path("/proc/self/comm").write_text(name[:_MOST_LETTERS])
    module, _, function = entry.partition(":")
    with imports_are_no_garbage():
        run = getattr(import_module(module), function)
    code = run(*arguments) or 0
    sys.stdout.flush()
    sys.stderr.flush()
    # Taking torch down would take a second or more on a busy machine, in which the process outlives its parent.
    os._exit(code)
