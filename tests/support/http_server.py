"""A server as users start it: `psctl serve --http` in a process of its own, on a free port."""

import os
import queue
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import httpx

from patchedserve.data.workspace import Workspace
from patchedserve.serving.models.loading import fingerprint_of

from .psctl_process import PsctlProcess, start_psctl
from .tiny_models import save_tiny, tiny_sdxl
from .tools import SHARED_FOLDER

SIZES = ("32x32", "64x32")
READY = re.compile(r"Serving at (http://\S+)/v1")


def small_model(folder: Path) -> Path:
    """Save a model with random weights that draws two small sizes with 4 steps."""
    return save_tiny(folder, tiny_sdxl(), guidance_scale=3.0, resolutions=list(SIZES), num_inference_steps=4)


class HttpServer:
    """A running server; without a model, its options name two (`--cascade`). Its start measures for two seconds.

    Attributes:
        url: base URL without `/v1`.
        lines: lines of its stderr so far.
        start_s: seconds that it may take to become ready; once ready, the seconds that it has taken.
        reads_log: whether its stderr is read to the end, instead of only until it is ready.
    """

    def __init__(
        self,
        model: Path | str | None,
        workspace: Path,
        *options: str,
        env: Mapping[str, str] | None = None,
        start_s: float = 60.0,
        reads_log: bool = True,
    ) -> None:
        self.start_s, self._reads_log = start_s, reads_log
        self._tables = Workspace(workspace).for_model(str(model), "cpu").root / "tables"
        self._shared = None if model is None else _shared_tables(str(model))
        if self._shared is not None and not self._tables.parent.exists():
            _copy_new(self._shared, self._tables)
        self._began_s = time.monotonic()
        command = ["serve", "--http", "--port", "0"]
        if model is not None:
            measured = [] if "--calibrate" in options or "--calibrate-time" in options else ["--calibrate-time", "2"]
            command += ["--model", str(model), *measured]
        command += ["--workspace", str(workspace), "--dtype", "float32", *options]
        self.process = start_psctl(*command, env=env, stdout=subprocess.DEVNULL)
        self.lines: list[str] = []
        self._said: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            self._said.put(line)
            if not self._reads_log and READY.search(line):
                return
        self._said.put(None)

    def wait(self, pattern: re.Pattern[str], timeout_s: float = 60) -> re.Match[str]:
        """Wait for the next line that matches, and return the match."""
        while True:
            line = self._said.get(timeout=timeout_s)
            assert line is not None, "\n".join(["the server has ended:", *self.lines])
            if match := pattern.search(line):
                return match

    def metric(self, name: str) -> float:
        """Return a metric of `/metrics`, named with its labels; 0 if these labels have not been counted yet."""
        lines = httpx.get(f"{self.url}/metrics", timeout=30).raise_for_status().text.splitlines()
        if f"# TYPE {name.partition('{')[0].removesuffix('_total')}" not in "\n".join(lines):
            raise AssertionError(f"there is no metric {name}")
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} ")), 0.0)

    def stop(self, sig: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code, once all `lines` are read."""
        self.process.send_signal(sig)
        code = self.process.wait(60)
        self._reader.join(10)  # a process that outlives the server may keep its stderr open
        return code

    def __enter__(self) -> Self:
        self.url = self.wait(READY, self.start_s)[1]
        self.start_s = time.monotonic() - self._began_s
        if self._shared is not None:
            _copy_new(self._tables, self._shared)
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)


def _shared_tables(model: str) -> Path | None:
    """Return the folder of what servers of equal models have measured in this run of the tests; None outside of tests.

    Later servers start with copies, seconds sooner.
    """
    shared = os.environ.get(SHARED_FOLDER)
    return None if shared is None else Path(shared) / fingerprint_of(model)


def _copy_new(source: Path, target: Path) -> None:
    """Copy each table that the target lacks, or of which it has a smaller one, by renaming a whole copy."""
    target.mkdir(parents=True, exist_ok=True)
    for file in [*source.glob("[!.]*.json"), *source.glob("[!.]*.parquet")]:
        known = target / file.name
        if not known.exists() or known.stat().st_size < file.stat().st_size:
            part = target / f".{file.name}.{os.getpid()}"
            shutil.copy2(file, part)
            part.replace(known)


@contextmanager
def routing(*urls: str, options: tuple[str, ...] = ()) -> Iterator[tuple[str, PsctlProcess]]:
    """Run a router on a free port; yield its URL without `/v1`, and its process."""
    process = start_psctl("router", *urls, "--port", "0", *options, stdout=subprocess.DEVNULL)
    try:
        assert process.stderr is not None
        ready = (re.search(r"Routing at (http://\S+)/v1 to", line) for line in process.stderr)
        yield next(match[1] for match in ready if match), process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(60)
