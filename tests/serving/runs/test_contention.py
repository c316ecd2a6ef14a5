"""Contention is measured if the system reports how long threads wait for a core, and is unknown otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from patchedserve.serving.runs import contention
from patchedserve.serving.runs.contention import Contention, contention_now

from ...support.tools import skip_reason


def test_other_work_is_measured() -> None:
    if not Path("/proc/self/schedstat").exists():
        pytest.skip(skip_reason("this test is for Linux that tells how long threads wait (/proc/self/schedstat)"))
    busy = [
        subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
        for _ in range(2 * len(os.sched_getaffinity(0)))
    ]
    try:
        for process in busy:
            assert process.stdout is not None
            process.stdout.readline()
        found = contention_now(1.0)
        assert found is not None
        assert found > 0.3
    finally:
        for process in busy:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("told", [None, "", "no numbers"])
def test_missing_schedstat_gives_no_share(told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contention, "_TASKS", tmp_path / "task")
    if told is not None:
        (tmp_path / "task" / "1").mkdir(parents=True)
        (tmp_path / "task" / "1" / "schedstat").write_text(told)
    with Contention() as measured:
        pass
    assert measured.share is None
    assert contention_now(0.0) is None
