"""Output to stdout and stderr: data, phases, bars, tables."""

import io
import json
import math
import re
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.progress import Progress

from patchedserve.psctl.output import Output
from patchedserve.psctl.progress import Phases

from ..support.own_command import run_body
from ..support.waits import until


@pytest.mark.slow
def test_data_goes_to_stdout_and_the_rest_to_stderr() -> None:
    body = "out.note('starting')\nout.warn('slow')\nout.data({'images': 3})"
    done = run_body(body)
    assert (done.stdout, done.stderr) == ("images: 3\n", "starting\nWarning: slow\n")
    done = run_body(body, "--quiet", "--json")
    assert (json.loads(done.stdout), done.stderr) == ({"images": 3}, "Warning: slow\n")
    done = run_body(body, PSCTL_TRY_QUIET="1", PSCTL_JSON="true")
    assert (json.loads(done.stdout), done.stderr) == ({"images": 3}, "Warning: slow\n")


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "cp932", "utf-16", "latin-1", "cp437", "cp1252", "utf-8"])
def test_every_encoding_accepts_all_output(encoding: str) -> None:
    text = "café 猫 … 🐈"
    body = f"""
from rich.table import Table
table = Table("{text}")
table.add_row("{text}")
out.note("{text}")
out.warn("{text}")
with out.phases() as start:
    start("{text}", 1)()
with out.status("{text}"):
    pass
out.data({{"{text}": "{text}"}})
out.data("{text}")
out.data(["{text}"], table=table)
raise UsageError("{text}")"""
    for options in ((), ("--json",)):
        done = run_body(body, *options, encoding=encoding, PYTHONIOENCODING=encoding)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 6
        assert "Traceback" not in done.stderr
        shown = text.encode(encoding, "backslashreplace").decode(encoding)
        assert done.stderr.splitlines()[-1] == f"Error: {shown}"
        if options:
            decoder, found, rest = json.JSONDecoder(), [], done.stdout
            while rest:
                value, end = decoder.raw_decode(rest)
                found, rest = [*found, value], rest[end:].lstrip()
            assert found == [{text: text}, text, [text]]
        else:
            assert done.stdout.startswith(f"{shown}: {shown}\n{shown}\n")
            assert done.stdout.count(shown) == 5


@pytest.mark.slow
def test_phases_in_a_pipe_print_one_line_at_start_and_one_at_end() -> None:
    body = "with out.phases() as start:\n    advance = start('images', total=40)\n    [advance() for _ in range(40)]"
    done = run_body(body)
    assert (done.returncode, done.stdout) == (0, "")
    first, last = done.stderr.splitlines()
    assert first == "images: 40 to do, less than a minute ..."
    assert re.fullmatch(r"images: 40 done in \d+ s", last)
    assert run_body(body, "--quiet").stderr == ""


def phases_of(told: list[str], *, width: int = 80) -> Phases:
    return Phases(Console(file=io.StringIO(), force_terminal=False, width=width), told.append, is_quiet=False)


def test_phase_start_estimates_its_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    clock = [0.0]
    # rich keeps the clock that it finds at its first import, which must not be the patched one.
    assert Progress.__module__ == "rich.progress"
    monkeypatch.setattr("patchedserve.psctl.progress.time.monotonic", lambda: clock[0])
    with phases_of(told) as start:
        # An estimate that is known beforehand is printed at once.
        start("runs", 4, expected_s=600)
        assert told == ["runs: 4 to do, about 10 min ..."]
        # Otherwise the estimate comes from the first twentieth of the units, here 3 of the 60 that an earlier run
        # left, without the very first, which includes the set-up.
        advance = start("visits", 100, done=40)
        for seconds in (90, 6, 6):
            assert len(told) == 1
            clock[0] += seconds
            advance()
        assert told[1:] == ["visits: 60 to do, about 6 min ..."]
        clock[0] += 102
        advance(20)
        start("features", 0)
    # Ctrl-C may end work early; a phase with nothing to do prints nothing.
    assert told[2:] == ["runs: 0 of 4 done in 3.4 min", "visits: 23 of 60 done in 3.4 min"]


@pytest.mark.parametrize(("seconds", "expected"), [((90, 3.2), "about 1 min"), ((90,), None)])
def test_first_batch_gives_no_estimate(
    monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, ...], expected: str | None
) -> None:
    told: list[str] = []
    clock = [0.0]
    monkeypatch.setattr("patchedserve.psctl.progress.time.monotonic", lambda: clock[0])
    with phases_of(told) as start:
        advance = start("features", 640)
        for passed in seconds:
            clock[0] += passed
            advance(32)
        assert told == ([] if expected is None else [f"features: 640 to do, {expected} ..."])


def test_units_of_an_earlier_run_are_not_counted() -> None:
    told: list[str] = []
    with phases_of(told) as start:
        start("steps", 50)
        for number in (46, 47, 50):
            start.last().advance_to(number)
    assert told[0].startswith("steps: 5 to do, ")
    assert told[1].startswith("steps: 5 done in ")
    assert len(told) == 2


def test_failed_phase_prints_no_end() -> None:
    done = run_body("with out.phases() as start:\n    start('images', 2)()\n    raise RunError('no')")
    assert done.stderr.splitlines() == ["images: 2 to do, less than a minute ...", "Error: no"]


@pytest.mark.slow
def test_terminal_shows_progress_bars_with_time_left() -> None:
    screen, told = io.StringIO(), list[str]()
    console = Console(file=screen, force_terminal=True, width=100)
    with Phases(console, told.append, is_quiet=False) as start:
        advance = start("requests", 8, expected_s=3)
        advance(3)
        time.sleep(0.1)
        advance(1)
        # The bar's clock runs: a bar that was never started shows no time. rich redraws it twice a second.
        until(lambda: re.search(r"\d:\d\d:\d\d", screen.getvalue()) is not None, 10)
    text = screen.getvalue()
    assert "requests" in text
    assert "4/8" in text
    assert told == []
    quiet = io.StringIO()
    with Phases(Console(file=quiet, force_terminal=True), told.append, is_quiet=True) as start:
        start("requests", 8)(8)
    assert quiet.getvalue() == ""


@dataclass
class Row:
    path: Path
    latency_s: float


def test_json_serializes_values_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_table_is_built_only_without_json(capsys: pytest.CaptureFixture[str]) -> None:
    made: list[str] = []

    def table() -> str:
        made.append("table")
        return "a table"

    Output(json=True).data({}, table=table)
    assert made == []
    Output().data({}, table=table)
    assert capsys.readouterr().out == "{}\na table\n"
