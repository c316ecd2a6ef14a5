"""Random runs of requests, batches and faults, none of which breaks an invariant: FAULT_RUNS of them, or 4,300."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from ..support.faulty_disk import preloaded

SHORT, LONG = 100, 840
"""Numbers of runs of a test. Each is short, as a worker that begins the last one late keeps the others waiting."""
NUM_RUNS = int(os.environ.get("FAULT_RUNS", SHORT + 5 * LONG))
FIRST = [0, *(pytest.param(first, marks=pytest.mark.faults) for first in range(SHORT, NUM_RUNS, LONG))]
SEEN = {
    "drawn",
    "drains",
    "kills",
    "crashes",
    "stand still",
    "disk",
    "taken back",
    "batch completed",
    "batch cancelled",
    "batch failed",
    "deadline_unreachable",
    "engine_error",
    "generation_failed",
    "queue_full",
    "timeout",
    "draining",
    "left",
}
"""Events that each set of runs must include; without them the runs would prove little."""


@pytest.mark.slow
@pytest.mark.parametrize("first", FIRST)
def test_invariants_hold_under_random_faults(first: int) -> None:
    count = SHORT if first == 0 else min(LONG, NUM_RUNS - first)
    command: list[Any] = [sys.executable, "-m", "patchedserve.tests.support.random_faults", first, count]
    done = subprocess.run(
        [*map(str, command)], env=os.environ | preloaded(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout)
    assert {what for what in SEEN if seen.get(what, 0) >= 5} == SEEN, seen
