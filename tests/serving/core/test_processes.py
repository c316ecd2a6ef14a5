"""Child processes: started from a script without a main guard, named, and ended with their parent."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from patchedserve.serving.core.processes import is_parent_alive, start_process

from ...support.waits import is_alive, until

_SCRIPT = """
import multiprocessing, sys
print("once", flush=True)
from patchedserve.serving.core.processes import start_process

ours, theirs = multiprocessing.Pipe()
entry = "patchedserve.tests.serving.core.test_processes:send_state"
process = start_process(entry, theirs, device=sys.argv[1], name="psctl-one")
print(process.pid, *ours.recv(), flush=True)
process.join()
"""


_ANY = {"device": "cpu", "name": "psctl-code"}


def send_state(connection: Connection) -> int:
    """Send the process's name and whether it has its own session and a live parent; return when the parent ends."""
    connection.send((Path("/proc/self/comm").read_text().strip(), os.getsid(0) == os.getpid(), is_parent_alive()))
    until(lambda: not is_parent_alive())
    return 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.slow)])
def test_start_from_a_script_without_main_guard(device: str, tmp_path: Path) -> None:
    """With a CUDA device, the process is started fresh instead of forked; the test needs no GPU."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    with subprocess.Popen([sys.executable, script, device], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "once\n"
        number, *said = parent.stdout.readline().split()
        assert said == ["psctl-one", "True", "True"]
        assert is_alive(int(number))
        parent.kill()
        assert parent.stdout.read() == ""
    until(lambda: not is_alive(int(number)), timeout_s=5)


@pytest.mark.exhaustive
def test_exit_code_is_the_return_value() -> None:
    process = start_process(f"{__name__}:code_of", 7, **_ANY)
    process.join(60)
    assert process.exitcode == 7


@pytest.mark.exhaustive
@pytest.mark.slow
def test_main_module_is_restored_after_concurrent_starts() -> None:
    script = sys.modules["__main__"]
    with ThreadPoolExecutor(8) as pool:
        processes = [*pool.map(lambda number: start_process(f"{__name__}:code_of", number, **_ANY), range(8))]
    assert sys.modules["__main__"] is script
    for number, process in enumerate(processes):
        process.join(60)
        assert process.exitcode == number


def code_of(number: int) -> int:
    return number
