"""Options from a file: what overrides them, what they override, and the errors that name their lines."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from patchedserve.psctl.app import main
from patchedserve.psctl.command import Command
from patchedserve.psctl.config_file import Config
from patchedserve.psctl.flags import expanded, flag, given_flags, preset_flag
from patchedserve.psctl.options.http import HttpFlags
from patchedserve.psctl.options.target import Target

from ..conftest import RunPsctl

FILE = """
device = "cpu"
workspace = "~/shared"

[box]
depth = 5                    # comment
model = "emoji-3"

[box.try]
depth = 6
port = 7
allowed-host = ["a", "b"]
names = [1, "x", 2.5]
is_on = true
"""


def seen_by(tmp_path: Path, text: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """Run `box try` with a file; returns what it receives."""
    seen: list[dict[str, Any]] = []

    def command(
        *,
        context: typer.Context,
        quick: Annotated[bool, preset_flag("--quick", "Less.", depth=1, width=2)] = False,
        depth: Annotated[int, flag("--depth", "Deep.", is_shared=True, min=1)] = 10,
        width: Annotated[int, flag("--width", "Wide.")] = 20,
        names: Annotated[str, flag("--names", "Some.")] = "",
        is_on: Annotated[bool, flag("--is-on/--is-off", "On.")] = False,
        web: HttpFlags,
        target: Target,
    ) -> None:
        numbers = {"depth": depth, "width": width, "names": names, "is_on": is_on}
        seen.append({**numbers, "web": web, "target": target, "given": given_flags(context)})

    (tmp_path / "psctl.toml").write_text(text)
    app, box = typer.Typer(context_settings={"auto_envvar_prefix": "PSCTL"}), typer.Typer()
    app.callback()(lambda: None)
    box.callback()(lambda: None)
    app.add_typer(box, name="box")
    box.command("try", cls=Command)(expanded(command, config=Config))
    box.command("other", cls=Command)(expanded(lambda: None, config=Config))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        for name, value in environment.items():
            patch.setenv(name, value)
        typer.main.get_command(app).main(["box", "try", *arguments], standalone_mode=False)
    return seen[0]


def test_nearest_table_wins_and_values_have_the_types_of_the_options(tmp_path: Path) -> None:
    found = seen_by(tmp_path, FILE, "--config", "psctl.toml")
    assert found["web"] == HttpFlags(port=7, allowed_host=["a", "b"])
    assert found["target"] == Target("emoji-3", device="cpu", workspace=Path.home() / "shared")
    assert (found["depth"], found["width"], found["names"], found["is_on"]) == (6, 20, "1,x,2.5", True)
    # Only the command's own table counts as given to it, as shared settings are for many commands.
    assert found["given"].keys() == {"--config", "--depth", "--port", "--allowed-host", "--names", "--is-on"}


def test_flags_override_variables_and_these_the_file(tmp_path: Path) -> None:
    variables = {"PSCTL_DEPTH": "8", "PSCTL_BOX_TRY_PORT": "9", "PSCTL_CONFIG": "psctl.toml"}
    found = seen_by(tmp_path, FILE, "--depth", "9", "--is-off", **variables)
    assert (found["depth"], found["is_on"], found["web"].port, found["names"]) == (9, False, 9, "1,x,2.5")
    assert seen_by(tmp_path, FILE, **variables)["depth"] == 8


@pytest.mark.parametrize("arguments", [["--quick", "--config", "psctl.toml"], ["--config", "psctl.toml", "--quick"]])
def test_file_overrides_presets(tmp_path: Path, arguments: list[str]) -> None:
    found = seen_by(tmp_path, FILE, *arguments)
    assert (found["depth"], found["width"]) == (6, 2)
    preset_in_file = seen_by(tmp_path, "[box.try]\nquick = true\nwidth = 3", "--config", "psctl.toml")
    assert (preset_in_file["depth"], preset_in_file["width"]) == (1, 3)


CASES = [
    ("[serve]\nport = 'many'", 2, "Invalid value for '--port': 'many', but it must be a valid integer"),
    ("\n\n[serve]\nhttp = true\nport = 70000", 5, "'70000', but it must be less than or equal to 65535"),
    ("[serve]\nengine = 'foo'", 2, "'foo' is not one of 'patched', 'plain', 'parallel'"),
    ("[serve]\nengine = 'plain'\norder = 'patch'", 3, "--order does not work with --engine plain"),
    ("[serve]\nsystem = 'x'", 2, "system is 'x', but it must be one of diffusers, "),
    ("[serve]\nprot = 1", 2, "prot is no option of psctl serve; did you mean port"),
    ("[serve]\nconfig = 'a'", 2, "config is no option of psctl serve"),
    ("[serve]\nport = 1979-05-27", 2, "port must be text, a number, true, false, or a list of these"),
    ("[serve]\nserved-model-name = [[1]]", 2, "served-model-name must be text, a number"),
    ("widht = 1\n[serve]\nport = 1", 1, "widht is no option of any command"),
    ("[serve]\nport = 1\n[bench.sol]\nseed = 1", 4, "[bench.sol] is no command; did you mean slo?"),
    ("serve.template-memory-mb = -1", 1, "--template-memory-mb is -1, but it must be 0 or more"),
]


@pytest.mark.parametrize(("text", "line", "message"), CASES, ids=[message[:30] for _, _, message in CASES])
def test_errors_name_line_key_and_allowed_values(
    run_psctl: RunPsctl, tmp_path: Path, text: str, line: int, message: str
) -> None:
    (tmp_path / "a.toml").write_text(text)
    checked = run_psctl("config", "check", "a.toml", "--json")
    assert checked.returncode == 1
    [problem] = json.loads(checked.stdout)["problems"]
    assert problem.startswith(f"a.toml line {line}: ")
    assert message in problem
    assert checked.stderr == f"Warning: {problem}\n"
    served = run_psctl("serve", "--config", "a.toml")
    assert (served.returncode, served.stdout, served.stderr.count("\n")) == (2, "", 1)
    assert f"a.toml line {line}: " in served.stderr
    assert message.removeprefix("Invalid value for '--port': ") in served.stderr


def test_check_lists_what_commands_get_and_all_errors(run_psctl: RunPsctl, tmp_path: Path) -> None:
    text = "model = 'emoji-3'\n[serve]\nport = 1\n[eval]\nseed = 4\nnum-prompts = 0\n[eval.fid]\nmax-bad = -1\n"
    (tmp_path / "a.toml").write_text(text)
    checked = run_psctl("config", "check", "a.toml", "--json", PSCTL_SEED="x", PSCTL_SERVE_PORT="y")
    found = json.loads(checked.stdout)
    assert found["commands"]["serve"] == ["model", "port"]
    assert found["commands"]["eval fid"] == ["model", "seed", "num-prompts", "max-bad"]
    assert [problem.partition(":")[0] for problem in found["problems"]] == ["a.toml line 6", "a.toml line 8"]


def test_check_leaves_the_environment_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.toml").write_text("[serve]\nport = 1\n")
    monkeypatch.setenv("PSCTL_SEED", "x")
    assert main(["config", "check", str(tmp_path / "a.toml")]) == 0
    assert os.environ["PSCTL_SEED"] == "x"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[serve\n", "Error: --config a.toml is not valid TOML: "),
        (b"a = 1\na = 2\n", "(at line 2, "),
        (b"a = '\xff'\n", "Error: --config a.toml cannot be read: "),
        (None, "Error: --config a.toml cannot be read: [Errno 2] No such file or directory"),
    ],
)
def test_unreadable_files_are_usage_errors(
    run_psctl: RunPsctl, tmp_path: Path, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "a.toml").write_bytes(content)
    for command in (("serve", "--config"), ("config", "check")):
        done = run_psctl(*command, "a.toml")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert message in done.stderr


def test_file_may_choose_a_cascade(run_psctl: RunPsctl, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[serve]\nhttp = true\ncascade = 'emoji-xl:4,emoji-xl:50'\nslo-scale = 4\n")
    assert "no profile of the cascade" in run_psctl("serve", "--config", "a.toml").stderr
    refused = run_psctl("serve", "--config", "a.toml", "--max-batch-size", "4").stderr
    assert "a.toml line 3: --max-batch-size is for a single model, but --cascade is given" in refused


def test_group_that_runs_passes_the_file_to_its_commands(run_psctl: RunPsctl, tmp_path: Path) -> None:
    # The group's own options are those of the commands that it runs, so their lines are checked there.
    (tmp_path / "a.toml").write_text("[profile.latency]\nmodel = 'nowhere'\n")
    for arguments, environment in ((("--config", "a.toml"), {}), ((), {"PSCTL_CONFIG": "a.toml"})):
        done = run_psctl("profile", *arguments, **environment)
        assert done.returncode == 2
        assert "unknown model 'nowhere'" in done.stderr
