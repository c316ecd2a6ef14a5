"""Settings and fixtures that all tests share."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# A shell without job control starts background jobs with Ctrl-C ignored, and children inherit that. The tests of
# interrupts need it as at a terminal.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


RunPsctl = Callable[..., subprocess.CompletedProcess[str]]


def pytest_configure() -> None:
    """Set the environment before any test module imports torch."""
    # One thread makes small models faster, and results the same on every machine.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", "1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["MPLBACKEND"] = "Agg"
    # What developers have set for their own runs must not reach the tests.
    for name in [name for name in os.environ if name.startswith("PSCTL_")]:
        del os.environ[name]


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout, which is the package `patchedserve`."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def psctl_script() -> str:
    """Path of the installed console script."""
    script = shutil.which("psctl", path=str(Path(sys.executable).parent))
    assert script is not None, "psctl is not installed beside this Python; run `make setup`"
    return script


@pytest.fixture
def run_psctl(psctl_script: str, tmp_path: Path) -> RunPsctl:
    """A function that runs `psctl ARGUMENTS...` as a process in an empty folder and returns the finished process.

    Keyword arguments are added to the environment.
    """

    def run(*arguments: str | Path, timeout_s: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [psctl_script, *map(str, arguments)],
            cwd=tmp_path,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    return run
