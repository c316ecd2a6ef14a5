"""Errors as users see them: one line on stderr and an exit code."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from patchedserve.data.errors import MissingExtraError, RunError, UsageError
from patchedserve.psctl.errors import describe_error

from ..support.own_command import PROGRAM, run_body


@pytest.mark.product(most=6)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("raise UsageError('rate is -1; it must be above 0')", 2, "Error: rate is -1; it must be above 0\n"),
        ("raise RunError('request 3 failed\\nout of luck')", 1, "Error: request 3 failed out of luck\n"),
        ("raise KeyboardInterrupt", 130, "Error: interrupted\n"),
        ("raise MemoryError", 1, "Error: out of memory"),
        ("open('/nowhere/trace.csv')", 1, "Error: no such file or folder: /nowhere/trace.csv\n"),
        ("open('/dev/full', 'w').write('x' * 10**6)", 1, "Error: disk full\n"),
        ("import typer; raise typer.BadParameter('no')", 2, "Error: Invalid value: no"),
        ("import torch; torch.empty(2**60, dtype=torch.uint8)", 1, "Error: out of memory; use smaller resolutions"),
        ("import typer; raise typer.Exit(1)", 1, ""),
        ("pass", 0, ""),
    ],
)
def test_error_gives_one_line_and_an_exit_code(body: str, code: int, message: str) -> None:
    done = run_body(body)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == (1 if message else 0)


def test_internal_error_shows_its_location() -> None:
    done = run_body("raise TypeError('oops')")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("Error: TypeError: oops (this is a bug")


@pytest.mark.slow
def test_debug_shows_the_traceback_of_any_error() -> None:
    assert "Traceback" in run_body("raise UsageError('no')", PSCTL_DEBUG="1").stderr
    assert "Traceback" not in run_body("raise UsageError('no')", PSCTL_DEBUG="0").stderr


def test_full_disk_behind_stdout_is_reported_once() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        done = run_body("out.data({'a': 1})", stdout=full)
    finally:
        os.close(full)
    assert (done.returncode, done.stderr) == (1, "Error: disk full\n")


def test_broken_pipe_gives_no_traceback() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = run_body("out.data({'a': 1})", stdout=write_end)
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (1, "")


def test_interrupt_exits_with_130() -> None:
    body = "print('ready', flush=True)\nimport time\ntime.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.replace("BODY", body.replace("\n", "\n    "))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr) == (130, "Error: interrupted\n")


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (errno.ENOSPC, "disk full: a.png"),
        (errno.EACCES, "no permission: a.png"),
        (errno.EROFS, "the file system is read-only: a.png"),
        (errno.ENOENT, "no such file or folder: a.png"),
        (errno.ENOTDIR, "is not a folder: a.png"),
        (errno.EIO, "input/output error: a.png"),
    ],
)
def test_os_errors_name_the_file(code: int, line: str) -> None:
    assert describe_error(OSError(code, os.strerror(code), "a.png")) == (line, 1)


def test_only_internal_errors_have_no_description() -> None:
    assert describe_error(KeyError("a")) is None
    assert describe_error(ValueError("a")) is None
    assert describe_error(MissingExtraError("torchmetrics", "eval")) == (
        "torchmetrics is not installed; install it with: pip install 'psctl[eval]'",
        1,
    )
    assert isinstance(UsageError("a"), ValueError)
    assert not isinstance(RunError("a"), ValueError)
