"""The command line itself: exit codes, the error table, and what goes to stdout and what to stderr."""

import errno
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.progress import Progress

import patchedserve
from patchedserve.data.errors import MissingExtraError, RunError, UsageError
from patchedserve.psctl.app import COMMANDS, apply_thread_settings
from patchedserve.psctl.errors import describe_error
from patchedserve.psctl.output import Output
from patchedserve.psctl.progress import Phases

from ..conftest import RunPsctl

# Adds a command to the application that runs the lines put in for BODY, then starts it as the console script does.
PROGRAM = """
import sys
from patchedserve.data.errors import RunError, UsageError
from patchedserve.psctl.app import app, main
from patchedserve.psctl.output import Json, Output, Quiet

@app.command("try")
def try_it(json: Json = False, quiet: Quiet = False) -> None:
    out = Output(json=json, quiet=quiet)
    BODY

sys.exit(main(["try", *sys.argv[1:]]))
"""


def run_body(
    body: str, *arguments: str, stdout: int = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("BODY", body.replace("\n", "\n    ")), *arguments],
        env=os.environ | environment,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


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
def test_error_is_one_line_and_an_exit_code(body: str, code: int, message: str) -> None:
    done = run_body(body)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == (1 if message else 0)


def test_a_bug_shows_where_it_is() -> None:
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


def test_reader_that_leaves_is_no_traceback() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = run_body("out.data({'a': 1})", stdout=write_end)
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (1, "")


def test_interrupt_signal_ends_with_130() -> None:
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


def test_only_our_own_bugs_are_unknown() -> None:
    assert describe_error(KeyError("a")) is None
    assert describe_error(ValueError("a")) is None
    assert describe_error(MissingExtraError("torchmetrics", "eval")) == (
        "torchmetrics is not installed; install it with: pip install 'psctl[eval]'",
        1,
    )
    assert isinstance(UsageError("a"), ValueError)
    assert not isinstance(RunError("a"), ValueError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bogus"], "No such command 'bogus'"),
        (["doctor", "--bogus"], "No such option: --bogus"),
        (["doctor", "extra"], "Got unexpected extra argument"),
    ],
)
def test_wrong_usage_exits_with_2(spawn_psctl: RunPsctl, arguments: list[str], message: str) -> None:
    done = spawn_psctl(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"Error: {message}")
    assert "--help')" in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_a_command_the_help_is_shown(spawn_psctl: RunPsctl) -> None:
    done = spawn_psctl()
    assert done.returncode == 2
    assert "doctor" in done.stdout


def test_version(spawn_psctl: RunPsctl) -> None:
    # PSCTL_VERSION is a likely name in an image; it must not be taken for the option.
    done = spawn_psctl("--version", PSCTL_VERSION="3")
    assert (done.returncode, done.stdout) == (0, f"psctl {patchedserve.__version__}\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, _ in COMMANDS])
def test_every_command_has_examples_and_the_common_options(run_psctl: RunPsctl, name: str) -> None:
    done = run_psctl(*name.split(), "--help", COLUMNS="200")
    assert done.returncode == 0
    assert "Examples:" in done.stdout
    assert f"  psctl {name}" in done.stdout
    for word in ("--json", "--quiet", "PSCTL_JSON"):
        assert word in done.stdout


@pytest.mark.slow
def test_data_goes_to_stdout_and_the_rest_to_stderr() -> None:
    body = "out.note('starting')\nout.warn('slow')\nout.data({'images': 3})"
    done = run_body(body)
    assert (done.stdout, done.stderr) == ("images: 3\n", "starting\nWarning: slow\n")
    done = run_body(body, "--quiet", "--json")
    assert (json.loads(done.stdout), done.stderr) == ({"images": 3}, "Warning: slow\n")
    done = run_body(body, PSCTL_TRY_QUIET="1", PSCTL_JSON="true")
    assert (json.loads(done.stdout), done.stderr) == ({"images": 3}, "Warning: slow\n")


@pytest.mark.slow
def test_in_a_pipe_a_phase_is_one_line_when_it_starts_and_one_when_it_ends() -> None:
    body = "with out.phases() as start:\n    advance = start('images', total=40)\n    [advance() for _ in range(40)]"
    done = run_body(body)
    assert (done.returncode, done.stdout) == (0, "")
    first, last = done.stderr.splitlines()
    assert first == "images: 40 to do, less than a minute ..."
    assert re.fullmatch(r"images: 40 done in \d+ s", last)
    assert run_body(body, "--quiet").stderr == ""


def phases_of(told: list[str], *, width: int = 80) -> Phases:
    return Phases(Console(file=io.StringIO(), force_terminal=False, width=width), told.append, is_quiet=False)


def test_the_start_of_a_phase_tells_how_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    clock = [0.0]
    # rich keeps the clock that it finds when it is first imported, which must not be this one.
    assert Progress.__module__ == "rich.progress"
    monkeypatch.setattr("patchedserve.psctl.progress.time.monotonic", lambda: clock[0])
    with phases_of(told) as start:
        # What is known beforehand is told at once.
        start("runs", 4, expected_s=600)
        assert told == ["runs: 4 to do, about 10 min ..."]
        # Otherwise the first units tell: a twentieth of them, here 3 of the 60 that an earlier run has left; but not
        # the very first, which sets everything up.
        advance = start("visits", 100, done=40)
        for seconds in (90, 6, 6):
            assert len(told) == 1
            clock[0] += seconds
            advance()
        assert told[1:] == ["visits: 60 to do, about 6 min ..."]
        clock[0] += 102
        advance(20)
        start("features", 0)
    # Ctrl-C may end work early; what has nothing to do is not told.
    assert told[2:] == ["runs: 0 of 4 done in 3.4 min", "visits: 23 of 60 done in 3.4 min"]


def test_units_of_an_earlier_run_are_not_counted() -> None:
    told: list[str] = []
    with phases_of(told) as start:
        start("steps", 50)
        for number in (46, 47, 50):
            start.last().reach(number)
    assert told[0].startswith("steps: 5 to do, ")
    assert told[1].startswith("steps: 5 done in ")
    assert len(told) == 2


def test_a_phase_that_fails_has_no_end() -> None:
    done = run_body("with out.phases() as start:\n    start('images', 2)()\n    raise RunError('no')")
    assert done.stderr.splitlines() == ["images: 2 to do, less than a minute ...", "Error: no"]


@pytest.mark.slow
def test_on_a_terminal_there_are_bars_with_the_time_left() -> None:
    screen, told = io.StringIO(), list[str]()
    console = Console(file=screen, force_terminal=True, width=100)
    with Phases(console, told.append, is_quiet=False) as start:
        advance = start("requests", 8, expected_s=3)
        advance(3)
        time.sleep(0.1)
        advance(1)
        time.sleep(0.6)  # rich draws the time left anew twice a second
    text = screen.getvalue()
    assert "requests" in text
    assert "4/8" in text
    # The bar's clock runs: a bar that was never started shows no time.
    assert re.search(r"\d:\d\d:\d\d", text)
    assert told == []
    quiet = io.StringIO()
    with Phases(Console(file=quiet, force_terminal=True), told.append, is_quiet=True) as start:
        start("requests", 8)(8)
    assert quiet.getvalue() == ""


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), [("train-model", "models train"), ("model-card", "models card")])
def test_old_names_work_and_say_the_new_one(run_psctl: RunPsctl, old: str, new: str) -> None:
    assert old not in run_psctl("--help", COLUMNS="200").stdout
    done = run_psctl(old, "nothing-such")
    assert done.returncode == 2
    assert "Invalid value for" in done.stderr
    wanted, options = run_psctl(*new.split(), "--help"), run_psctl(old, "--help")
    assert options.returncode == wanted.returncode == 0
    assert "--seed" in options.stdout


def test_help_has_the_commands_as_a_day_goes(spawn_psctl: RunPsctl) -> None:
    shown = spawn_psctl("--help", COLUMNS="120").stdout
    names = [
        "serve",
        "generate",
        "edit",
        "templates",
        "batch",
        "demo",
        "profile",
        "train-predictor",
        "simulate",
        "bench",
        "reproduce",
        "eval",
        "gate",
        "models",
        "doctor",
    ]
    commands = [line.split()[1] for line in shown.splitlines() if line.startswith("│ ") and line[2].isalpha()]
    assert commands == names


def test_help_waits_for_nothing_heavy() -> None:
    heavy = "('torch', 'numpy', 'pandas', 'pyarrow', 'PIL', 'matplotlib', 'sklearn')"
    program = f"import sys, patchedserve.psctl.app; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.slow
def test_bundled_models_are_listed(run_psctl: RunPsctl) -> None:
    models = json.loads(run_psctl("models", "list", "--json").stdout)
    assert list(models) == ["emoji-xl", "emoji-3", "emoji-xl-turbo", "emoji-clip"]
    assert models["emoji-xl"]["resolutions"] == ["128x128", "192x192", "256x256"]
    lines = run_psctl("models", "list").stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(models)


@dataclass
class Row:
    path: Path
    latency_s: float


def test_json_takes_what_commands_have(capsys: pytest.CaptureFixture[str]) -> None:
    payload = {
        "row": Row(Path("a/b.png"), math.nan),
        "mean": np.float32(0.5),
        "count": np.int64(3),
        "all": np.array([1.0, math.inf]),
        192: (True, None, "é"),
    }
    Output(json=True).data(payload, table="not shown")
    assert json.loads(capsys.readouterr().out) == {
        "row": {"path": "a/b.png", "latency_s": None},
        "mean": 0.5,
        "count": 3,
        "all": [1.0, None],
        "192": [True, None, "é"],
    }
    with pytest.raises(TypeError, match="cannot print object as JSON"):
        Output(json=True).data(object())


def test_table_is_made_only_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    made: list[str] = []

    def table() -> str:
        made.append("table")
        return "a table"

    Output(json=True).data({}, table=table)
    assert made == []
    Output().data({}, table=table)
    assert capsys.readouterr().out == "{}\na table\n"


def test_threads_are_set_before_libraries_load() -> None:
    environment = {"PSCTL_THREADS": "3", "OMP_NUM_THREADS": "8", "GOMP_SPINCOUNT": "1"}
    apply_thread_settings(environment)
    assert environment == {
        "PSCTL_THREADS": "3",
        "OMP_NUM_THREADS": "3",
        "MKL_NUM_THREADS": "3",
        "GOMP_SPINCOUNT": "1",
    }


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({}, {"GOMP_SPINCOUNT": "20000"}),
        ({"OMP_NUM_THREADS": "2"}, {"GOMP_SPINCOUNT": "20000"}),
        ({"GOMP_SPINCOUNT": "0"}, {}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {}),
        ({"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "5"}, {}),
    ],
)
def test_idle_threads_spin_briefly_unless_the_user_says_otherwise(given: dict[str, str], added: dict[str, str]) -> None:
    environment = dict(given)
    apply_thread_settings(environment)
    assert environment == given | added


@pytest.mark.parametrize("threads", ["0", "-1", "two", "", "1.5", "²"])
def test_bad_threads_are_a_usage_error(threads: str) -> None:
    with pytest.raises(UsageError, match="must be a whole number of at least 1"):
        apply_thread_settings({"PSCTL_THREADS": threads})


def test_bad_threads_exit_with_2(spawn_psctl: RunPsctl) -> None:
    done = spawn_psctl("doctor", PSCTL_THREADS="many")
    assert (done.returncode, done.stderr) == (
        2,
        "Error: PSCTL_THREADS is 'many'; it must be a whole number of at least 1\n",
    )


@pytest.mark.slow
def test_doctor_reports_the_machine(run_psctl: RunPsctl, tmp_path: Path) -> None:
    done = run_psctl("doctor", "--json", "--quiet", "--workspace", tmp_path / "not" / "there")
    report = json.loads(done.stdout)
    assert done.returncode == (1 if report["problems"] else 0)
    assert report["is_ok"] == (not report["problems"])
    assert report["psctl"] == patchedserve.__version__
    assert report["libraries"]["torch"] is not None
    cpu = report["devices"][0]
    assert cpu["device"] == "cpu"
    assert cpu["dtypes"]["float32"] is True
    assert report["extras"]["ray"]["install"] == "pip install 'psctl[ray]'"
    assert report["extras"]["dev"]["is_installed"] == (report["extras"]["dev"]["missing"] == [])
    assert set(report["models"]) >= {"emoji-xl", "emoji-3", "emoji-clip"}
    assert report["workspace"] == report["workspace"] | {"exists": False, "is_writable": True}
    assert report["workspace"]["free_bytes"] > 0
    # Looking at the workspace does not create it.
    assert not (tmp_path / "not").exists()


@pytest.mark.slow
def test_doctor_shows_people_the_same(run_psctl: RunPsctl) -> None:
    done = run_psctl("doctor", "--quiet")
    for word in ("libraries", "devices", "extras", "models", "workspace", "psctl[gpu]", "emoji-xl"):
        assert word in done.stdout
