"""The tests of kernels and engines, while there is time; failed and left-out tests are named."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from patchedserve.data.files import write_json

from ..context import Context, Row
from ..versions import REPOSITORY

_PLUGIN = "patchedserve.tests.benchmarks.lease.pytest_plugin"
_WORKERS = 4
_POLL_S = 0.2


def suite(context: Context) -> Iterator[Row]:
    """Yield a row for each test as soon as it ends: `passed`, `failed`, `skipped` or `left out`."""
    report = context.folder / f"tests-{time.time_ns()}.jsonl"
    scale, environment = context.scale, os.environ.copy()
    known = context.folder / "known-tests.json"
    write_json(known, sorted(context.known))
    environment |= {"LEASE_TESTS_REPORT": str(report), "LEASE_TESTS_KNOWN": str(known), "PYTHONUNBUFFERED": "1"}
    if scale.is_rehearsal:
        environment["GPU_TESTS_DEVICE"] = "cpu"
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", _PLUGIN]
    command += ["--import-mode=importlib", *scale.tests]
    if not scale.is_rehearsal and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(_WORKERS)]
    report.touch()
    # In the process group of this worker, so that both are killed together.
    process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=sys.stderr)
    collected: list[str] | None = None
    ended = set[str]()
    try:
        with report.open(encoding="utf-8") as lines:
            while True:
                is_over = process.poll() is not None
                for message in _messages(lines.readlines()):
                    collected = message.get("collected", collected)
                    if (row := message.get("row")) is not None and row["label"] not in ended:
                        ended.add(row["label"])
                        yield row
                if is_over:
                    break
                if context.seconds_left <= 0:
                    process.kill()
                time.sleep(_POLL_S)
    finally:
        process.kill()
        process.wait()
        report.unlink()
    if collected is None:
        raise RuntimeError(f"pytest has collected nothing (exit code {process.returncode}); its log is tests.log")
    if missing := [name for name in collected if name not in ended]:
        context.notes["not_run"] = missing
        context.stopped = f"no time for {len(missing)} of {len(collected)} tests, which the notes name"


def _messages(lines: list[str]) -> Iterator[dict[str, Any]]:
    yield from map(json.loads, lines)
