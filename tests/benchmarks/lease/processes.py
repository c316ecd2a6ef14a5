"""Worker processes of a lease, started on demand and killed when a part takes too long."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .context import Row
from .plan import Part

_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class End:
    """End of a part: `done`, `partial`, `failed` or `killed`, the reason, and its notes."""

    status: str
    reason: str
    notes: dict[str, Any]


class Worker:
    """A process that runs parts. It has a process group of its own, so that its children are killed with it.

    Args:
        name: name of its model.
        folder: state folder, which gets the log.
        options: options for the worker's command line.
    """

    def __init__(self, name: str, folder: Path, options: Sequence[str]) -> None:
        command = [
            sys.executable,
            "-P",
            "-m",
            "patchedserve.tests.benchmarks.lease.worker",
            name,
            str(folder),
            *options,
        ]
        # All workers and the next run share the compilers' results.
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
        with (folder / f"{name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | caches,
                process_group=0,  # in this session, so that it ends with the session at the latest
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdout.fileno(), False)
        self._received = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def run(
        self, part: Part, known: Sequence[str], seconds: float, limit_s: float, on_row: Callable[[Row], None]
    ) -> End:
        """Run a part; if it does not end in time, or the process dies, the process is killed.

        Args:
            part: part to run.
            known: labels of rows that are measured already.
            seconds: time that the part may plan for.
            limit_s: time after which the process is killed.
            on_row: called with each row.
        """
        end_s = time.monotonic() + limit_s
        asked = {"part": part.name, "source": part.source, "known": list(known), "seconds": seconds}
        try:
            self._stdin.write(json.dumps(asked).encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError:
            return self._died()
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            while True:
                while (line := self._line()) is not None:
                    message = json.loads(line)
                    if "end" in message:
                        return End(message["end"], message["reason"], message["notes"])
                    on_row(message["row"])
                if not selector.select(max(0.0, end_s - time.monotonic())):
                    self.kill()
                    return End("killed", f"killed after {limit_s:.0f} s", {})
                chunk = os.read(self._stdout.fileno(), _READ_BYTES)
                if not chunk:
                    return self._died()
                self._received += chunk

    def kill(self) -> None:
        """Kill the process and all its children."""
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself, with all its children
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._stdout.close()

    def close(self) -> None:
        """End the process if it is alive; it is waiting for a part."""
        if self.is_alive:
            self.kill()

    def _line(self) -> bytes | None:
        line, newline, rest = self._received.partition(b"\n")
        if not newline:
            return None
        self._received = rest
        return line

    def _died(self) -> End:
        self.kill()
        code = self._process.returncode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return End("failed", f"the worker has ended ({how})", {})
