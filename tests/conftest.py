"""Settings and fixtures that all tests share."""

import contextlib
import io
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
    # Workers of pytest-xdist inherit the width of a terminal, and commands in a pipe have none.
    os.environ.pop("COLUMNS", None)
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
def spawn_psctl(psctl_script: str, tmp_path: Path) -> RunPsctl:
    """A function that runs `psctl ARGUMENTS...` as a process in an empty folder and returns the finished process.

    Keyword arguments are added to the environment. Most tests are as good with `run_psctl`, which starts no process.
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


@pytest.fixture
def run_psctl(tmp_path: Path) -> RunPsctl:
    """As `spawn_psctl`, but in this process: importing torch and diffusers anew takes seconds.

    What runs is `main`, the function of the console script, with its output in a pipe's place, its own environment and
    folder.
    """

    def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        from patchedserve.psctl.app import main

        out, err = io.StringIO(), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            patch.chdir(tmp_path)
            for name, value in environment.items():
                patch.setenv(name, value)
            code = main([str(argument) for argument in arguments])
        return subprocess.CompletedProcess(["psctl", *map(str, arguments)], code, out.getvalue(), err.getvalue())

    return run
