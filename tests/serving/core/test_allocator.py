"""Freed memory is kept for later allocations, which cause no page faults in any thread."""

import platform
import subprocess
import sys

import pytest

# Allocates forty tensors of 2 MB, repeatedly, in a thread other than the first.
SCRIPT = """
import ctypes, resource, sys, threading
import torch
from patchedserve.serving.core.allocator import keep_freed_memory

def work():
    for _ in range(20):
        held = [torch.ones(500_000) for _ in range(40)]
        del held

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a fault is of one page, however the machine is set.
if sys.argv[1] == "keep":
    keep_freed_memory()
faults()
# The least: the system may take away what nobody has touched for a while.
print(min(faults() for _ in range(3)))
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that gives memory back")
def test_steps_reuse_memory_of_earlier_ones() -> None:
    kept, given_back = (
        int(subprocess.run([sys.executable, "-c", SCRIPT, mode], check=True, capture_output=True, text=True).stdout)
        for mode in ("keep", "leave")
    )
    assert given_back > 1_000, "or the test shows nothing"
    assert kept < given_back / 10
