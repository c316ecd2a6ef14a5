"""The command line itself: commands, their help, threads, and `psctl doctor`."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import patchedserve
from patchedserve.data.errors import UsageError
from patchedserve.psctl.app import COMMANDS, apply_thread_settings, command_tree
from patchedserve.psctl.long_help import FIRST_OPTIONS

from ..conftest import RunPsctl


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
    # PSCTL_VERSION is a likely variable in a container image; it must not set the option.
    done = spawn_psctl("--version", PSCTL_VERSION="3")
    assert (done.returncode, done.stdout) == (0, f"psctl {patchedserve.__version__}\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, _ in COMMANDS])
def test_every_command_has_examples_and_the_common_options(run_psctl: RunPsctl, name: str) -> None:
    done = run_psctl(*name.split(), "--help-all" if name in FIRST_OPTIONS else "--help", COLUMNS="200")
    assert done.returncode == 0
    assert "Examples:" in done.stdout
    assert f"  psctl {name}" in done.stdout
    for word in ("--json", "--quiet", "PSCTL_JSON"):
        assert word in done.stdout
    about = done.stdout.partition("Examples:")[0]
    paragraphs = [text.split("\n") for text in re.split(r"\n\s*\n", about.strip()) if "Usage:" not in text]
    assert all(len(text) == 1 or len(text[0].strip()) > 150 for text in paragraphs), "broken by the terminal only"


@pytest.mark.parametrize("name", [name for name, _ in COMMANDS])
def test_help_of_many_options_is_short_and_the_whole_help_is_by_topic(run_psctl: RunPsctl, name: str) -> None:
    command = command_tree()
    for word in name.split():
        command = command.commands[word]
    params = [param.opts[0] for param in command.params if param.param_type_name == "option"]
    if name not in FIRST_OPTIONS:
        assert len(params) <= 32
        return
    first = FIRST_OPTIONS[name].split()
    short, whole = (run_psctl(*name.split(), option, COLUMNS="120").stdout for option in ("--help", "--help-all"))
    assert options_in(short) == [*first, "--help-all", "--help"]
    assert short.count("╭") - short.count("╭─ Arguments") == 1
    assert f"{len(params) - len(first) - 1} more options: psctl {name} --help-all" in short
    assert sorted(options_in(whole)) == sorted([*params, "--help"])
    assert "more options" not in whole
    titles = re.findall(r"╭─ (.+?) ─", whole)
    assert len(titles) == len({*titles})
    assert {"Options", "Output"} <= {*titles}
    if "--compile" in params:
        assert (
            whole.index("╭─ Engine")
            < whole.index("--compile")
            < whole.index("╭─ Cache")
            < whole.index("--warmup-steps")
        )


def options_in(shown: str) -> list[str]:
    """Return the first name of each option in a help, in order."""
    return re.findall(r"^│ [* ]{0,6}(--[a-z-]+)", shown, re.MULTILINE)


def test_help_lists_commands_in_order_of_use(spawn_psctl: RunPsctl) -> None:
    shown = spawn_psctl("--help", COLUMNS="120").stdout
    names = [
        "serve",
        "router",
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
        "config",
        "doctor",
    ]
    commands = [line.split()[1] for line in shown.splitlines() if line.startswith("│ ") and line[2].isalpha()]
    assert commands == names


def test_help_imports_nothing_heavy() -> None:
    heavy = "('torch', 'numpy', 'pandas', 'pyarrow', 'PIL', 'matplotlib', 'sklearn')"
    program = f"import sys, patchedserve.psctl.app; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.slow
def test_bundled_models_are_listed(run_psctl: RunPsctl) -> None:
    models = json.loads(run_psctl("models", "list", "--json").stdout)
    assert list(models) == ["emoji-xl", "emoji-3", "emoji-xl-turbo", "emoji-edit", "emoji-clip"]
    assert models["emoji-xl"]["resolutions"] == ["128x128", "192x192", "256x256"]
    lines = run_psctl("models", "list").stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(models)


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
def test_idle_threads_spin_briefly_by_default(given: dict[str, str], added: dict[str, str]) -> None:
    environment = dict(given)
    apply_thread_settings(environment)
    assert environment == given | added


@pytest.mark.parametrize("threads", ["0", "-1", "two", "", "1.5", "²"])
def test_invalid_threads_are_a_usage_error(threads: str) -> None:
    with pytest.raises(UsageError, match="must be a whole number of at least 1"):
        apply_thread_settings({"PSCTL_THREADS": threads})


def test_invalid_threads_exit_with_2(spawn_psctl: RunPsctl) -> None:
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
def test_doctor_prints_equal_values_without_json(run_psctl: RunPsctl) -> None:
    done = run_psctl("doctor", "--quiet")
    for word in ("libraries", "devices", "extras", "models", "workspace", "psctl[gpu]", "emoji-xl"):
        assert word in done.stdout


@pytest.mark.slow
def test_doctor_estimates_the_memory_of_a_model(run_psctl: RunPsctl) -> None:
    command = ("doctor", "--quiet", "--model", "emoji-xl", "--resolutions", "128", "--batch-sizes", "1,2")
    done = run_psctl(*command)
    assert "memory of emoji-xl, float16" in done.stdout
    assert "2 of 128x128" in done.stdout
    found = json.loads(run_psctl(*command, "--json").stdout)["memory"]
    one, two = (batch["step_bytes"] for batch in found["batches"])
    assert 1.9 * one < two <= 2 * one


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-sizes", "inf"], "--batch-sizes is 'inf', but it must be whole numbers"),
        (["--batch-sizes", "0"], "--batch-sizes is '0', but it must be whole numbers from 1 on with commas between"),
        (["--model", "nothing"], "unknown model 'nothing'"),
        (["--model", "emoji-xl", "--resolutions", "7"], "7"),
    ],
)
def test_doctor_refuses_wrong_values(arguments: list[str], message: str, run_psctl: RunPsctl) -> None:
    done = run_psctl("doctor", *arguments, "--quiet")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert message in done.stderr
