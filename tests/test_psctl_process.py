"""Forked commands behave like started ones."""

import signal
import subprocess
from pathlib import Path

import pytest

from .support.http_server import READY, small_model
from .support.psctl_process import ForkedPsctl, start_psctl


@pytest.mark.exhaustive
@pytest.mark.slow
def test_forked_and_started_commands_have_equal_output(tmp_path: Path) -> None:
    for arguments, code in ((["--version"], 0), (["models", "list", "--json"], 0), (["generate", "--seed", "x"], 2)):
        forked, started = (start_psctl(*arguments, env=env, cwd=tmp_path) for env in ({}, {"PSCTL_THREADS": "1"}))
        assert isinstance(forked, ForkedPsctl)
        assert isinstance(started, subprocess.Popen)
        assert forked.communicate(timeout=60) == started.communicate(timeout=60)
        assert forked.returncode == started.returncode == code


def test_thread_options_need_a_started_process(tmp_path: Path) -> None:
    process = start_psctl("doctor", env={"PSCTL_THREADS": "many"})
    assert isinstance(process, subprocess.Popen)
    assert "PSCTL_THREADS is 'many'" in process.communicate(timeout=60)[1]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("sig", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 0), (signal.SIGINT, 0)])
def test_signals_reach_a_forked_server(tmp_path: Path, sig: int, code: int) -> None:
    model = small_model(tmp_path / "tiny")
    options = ("--model", model, "--workspace", "ws", "--dtype", "float32", "--port", "0")
    process = start_psctl("serve", "--http", *options, cwd=tmp_path, stdout=subprocess.DEVNULL)
    assert isinstance(process, ForkedPsctl)
    assert process.stderr is not None
    assert any(READY.search(line) for line in process.stderr)
    assert process.poll() is None
    assert (tmp_path / "ws").is_dir()
    process.send_signal(sig)
    assert process.wait(60) == code
    assert process.poll() == code
