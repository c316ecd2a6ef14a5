"""Parses bodies with images in processes of their own, with limits that no client's file can exceed.

A file of a few megabytes can keep a decoder busy for minutes, and make it take any amount of memory. No torch.
"""

import asyncio
import contextlib
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ..core.processes import start_process
from .edits import Part, parse_edit
from .errors import ApiError, invalid, overloaded
from .limits import Limits
from .protocol import Generation, ModelFacts

_ENTRY = f"{__name__}:serve"
_MOST_PROCESSES = 4
"""More than the bodies of one key that are parsed at a time."""
ANSWER_WITHIN_S = 60.0
_NICENESS = 10
_FROM_OUTSIDE = {signal.SIGTERM: {"Retry-After": "1"}, signal.SIGKILL: {"x-should-retry": "false"}}
"""Signals that come from an operator or from a kernel without memory, with the headers of the answer. Clients do not
retry after SIGKILL by themselves, as the image may be what needed the memory.
"""


class EditProcesses:
    """Processes that run `parse_edit`. `start` starts one, others start when they are needed; all are kept.

    Args:
        model, limits: as for `parse_edit`.
        decode_s: seconds of processor time that a form may take.
        most_bytes: bytes of memory that it may take.
    """

    def __init__(self, model: ModelFacts, limits: Limits, *, decode_s: int = 10, most_bytes: int = 2 << 30) -> None:
        self._args = model, limits, decode_s, most_bytes
        self._free = asyncio.Semaphore(_MOST_PROCESSES)
        self._idle: list[_Process] = []
        self._pool = ThreadPoolExecutor(_MOST_PROCESSES, thread_name_prefix="psctl-edits")

    async def start(self) -> None:
        """Start a process in advance, so that the first edit does not lose time before its deadline."""
        process = _Process(*self._args)
        await asyncio.get_running_loop().run_in_executor(self._pool, process.start)
        self._idle.append(process)

    async def parse(self, parts: Sequence[tuple[str, Part]] | bytes, header_slo: str | None) -> Generation:
        """Run `parse_edit` in a process; cancelling the call kills the process.

        Raises:
            ApiError: as `parse_edit`; also if the images take too much processor time or memory (400), the machine is
                too busy to decode them in time (429), or the process is killed from outside (503).
        """
        async with self._free:
            process = self._next()
            work = asyncio.get_running_loop().run_in_executor(self._pool, process.parse, parts, header_slo)
            try:
                async with asyncio.timeout(ANSWER_WITHIN_S):
                    answer = await work
            except TimeoutError:
                process.kill()
                raise overloaded("the images could not be decoded in time", "too_many_uploads", 10.0) from None
            except BaseException:
                process.kill()
                raise
            self._idle.append(process)
            if isinstance(answer, ApiError):
                raise answer
            return answer

    def _next(self) -> "_Process":
        """Return an idle process that still runs, or else one that is not started yet."""
        while self._idle:
            if (process := self._idle.pop()).is_alive:
                return process
        return _Process(*self._args)


class _Process:
    """One process, which must not be used after an error."""

    def __init__(self, model: ModelFacts, limits: Limits, decode_s: int, most_bytes: int) -> None:
        self._args = model, limits, decode_s, most_bytes
        self._started: tuple[BaseProcess, Connection] | None = None

    @property
    def is_alive(self) -> bool:
        """Whether it has been started and has not ended."""
        return self._started is not None and self._started[0].is_alive()

    def start(self) -> tuple[BaseProcess, Connection]:
        """Start the process, and wait until its imports are done. Raises EOFError if it has ended at once."""
        ours, theirs = Pipe()
        with theirs:
            process = start_process(_ENTRY, theirs, *self._args, device="none", name="psctl-edits")
        self._started = process, ours
        ours.recv()
        return self._started

    def parse(self, parts: Sequence[tuple[str, Part]] | bytes, header_slo: str | None) -> Generation | ApiError:
        """Return what `parse_edit` returns or raises.

        Raises:
            ApiError: the form has ended the process (400), or a signal from outside has (503).
            RuntimeError: a defect has ended it.
        """
        try:
            _, connection = self._started or self.start()
            connection.send((parts, header_slo))
            return connection.recv()
        except (EOFError, OSError):
            if self._started is None:  # it could not be started
                raise
            process, _ = self._started
            process.join()
            code = process.exitcode or 0
            if code == -signal.SIGXCPU:
                too_long = f"the images take more than {self._args[2]} s of a processor to decode"
                raise invalid(too_long, "image") from None
            if (headers := _FROM_OUTSIDE.get(signal.Signals(-code)) if code < 0 else None) is not None:
                message = f"the process that decodes images was killed ({signal.Signals(-code).name})"
                raise ApiError(503, message, code="not_ready", headers=headers) from None
            if code < 0:
                raise invalid(f"the images end their decoder ({signal.Signals(-code).name})", "image") from None
            raise RuntimeError(f"the process that decodes images has ended with exit code {code}") from None

    def kill(self) -> None:
        """Kill the process, which ends a call of `parse` that waits for it."""
        if self._started is not None:
            self._started[0].kill()


def serve(connection: Connection, model: ModelFacts, limits: Limits, decode_s: int, most_bytes: int) -> None:
    """Parse the bodies that arrive on the connection until it is closed."""
    # Denoising steps have priority.
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        # In addition to what the interpreter and its libraries have mapped.
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + most_bytes, mapped + most_bytes))
    answer: Any = None
    with contextlib.suppress(EOFError, OSError):
        connection.send(answer)
        while True:
            parts, header_slo = connection.recv()
            until_s = math.ceil(time.process_time()) + decode_s
            resource.setrlimit(resource.RLIMIT_CPU, (until_s, resource.RLIM_INFINITY))
            try:
                answer = parse_edit(parts, model, limits, header_slo=header_slo)
            except ApiError as error:
                answer = error
            except MemoryError:
                answer = invalid(f"the images take more than {most_bytes / (1 << 30):g} GiB to decode", "image")
            connection.send(answer)
