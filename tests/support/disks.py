"""Small disks, and disks that are nearly full."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .tools import need_tools


@contextlib.contextmanager
def tiny_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Mount a file system of `num_bytes` at a new folder, which needs the rights of root; otherwise skips the test."""
    need_tools("mount")
    folder.mkdir(parents=True)
    options = ["-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    mounted = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, leave: int) -> Path:
    """Write a file that leaves this many bytes free on the folder's disk, to the block."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    with ballast.open("r+b") as file:
        file.truncate(max(0, ballast.stat().st_size - leave))
    return ballast
