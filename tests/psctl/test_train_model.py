"""`psctl models train`: results, resuming, wrong usage, damaged checkpoints, and Ctrl-C in a process of its own."""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import CLIPTextModelWithProjection, CLIPTokenizer

from ..conftest import RunPsctl
from ..support.psctl_process import start_psctl
from ..support.waits import interrupted_when

pytest.importorskip("resvg_py", reason="training draws its pictures with psctl[train]")

BASE_STEPS = 30
TIMEOUT_S = 600


@dataclass(frozen=True)
class Trained:
    """A workspace in which `models train text --steps 30` has run, and what it printed."""

    workspace: Path
    done: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    command = ["models", "train", "text", "--steps", str(BASE_STEPS), "--workspace", "ws", "--json"]
    process = start_psctl(*command, cwd=folder)
    out, err = process.communicate(timeout=TIMEOUT_S)
    return Trained(folder / "ws", subprocess.CompletedProcess(command, process.wait(), out, err))


@pytest.fixture
def workspace(trained: Trained, tmp_path: Path) -> Path:
    """A copy of the trained workspace that a test may change."""
    return Path(shutil.copytree(trained.workspace, tmp_path / "ws"))


def step_of(checkpoint: Path) -> int:
    """Check that all tensors of a checkpoint can be read; return its step."""
    with safe_open(checkpoint, "pt") as file:
        for name in file.keys():  # noqa: SIM118 (the file is no dict)
            file.get_tensor(name)
        return int(file.metadata()["step"])


def logged_steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "log.jsonl").read_text().splitlines()]


def assert_one_error_line(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_train_text_prints_json_and_writes_folders(trained: Trained) -> None:
    assert trained.done.returncode == 0, trained.done.stderr
    result = json.loads(trained.done.stdout)
    assert list(result) == ["text"]
    assert Path(result["text"]["folder"]) == Path("ws/training/text")
    assert set(result["text"]["last_figures"]) == {"loss", "accuracy", "grad_norm"}
    # Each of the two encoders reports its start and its end.
    assert [line.partition(":")[0] for line in trained.done.stderr.splitlines()] == [
        *("text encoder small", "text encoder small", "text encoder large", "text encoder large"),
        "text",
    ]
    assert trained.done.stderr.endswith("text: finished, in ws/training/text\n")

    folder = trained.workspace / "training" / "text"
    tokenizer = CLIPTokenizer.from_pretrained(folder / "tokenizer")
    for name, width in (("small", 64), ("large", 96)):
        encoder = CLIPTextModelWithProjection.from_pretrained(folder / f"{name}-model")
        assert (encoder.config.hidden_size, encoder.config.vocab_size) == (width, len(tokenizer))
        assert step_of(folder / name / "last.safetensors") == BASE_STEPS
        assert step_of(folder / name / "stable.safetensors") == 20  # the decay covers the last 35 %
        assert logged_steps(folder / name) == [20]
    assert not list(folder.rglob(".*")), "temporary files are left"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_finished_training_is_not_repeated(run_psctl: RunPsctl, workspace: Path) -> None:
    run = workspace / "training" / "text" / "large"
    weights = workspace / "training" / "text" / "large-model" / "model.safetensors"
    before = weights.read_bytes()
    done = run_psctl("models", "train", "text", "--steps", BASE_STEPS, "-w", workspace, "--json", "-q")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["text"]["last_figures"] == {}
    assert logged_steps(run) == [20]
    assert weights.read_bytes() == before


@pytest.mark.exhaustive
@pytest.mark.slow
def test_more_steps_resume_from_before_the_decay(run_psctl: RunPsctl, workspace: Path) -> None:
    done = run_psctl("models", "train", "text", "--steps", 45, "-w", workspace)
    assert done.returncode == 0, done.stderr
    for name in ("small", "large"):
        run = workspace / "training" / "text" / name
        assert step_of(run / "last.safetensors") == 45
        # A run from the start would have logged step 20 once more.
        assert logged_steps(run) == [20, 40]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--steps", "10"], ["small/stable.safetensors is at step 20 already, but 10 steps are asked for"]),
        (["--steps", str(BASE_STEPS), "--seed", "3"], ["small/last.safetensors", "seed 1 -> 4"]),
    ],
)
def test_invalid_options_keep_a_finished_training(
    run_psctl: RunPsctl, workspace: Path, options: list[str], words: list[str]
) -> None:
    before = {path: path.read_bytes() for path in workspace.rglob("*") if path.is_file()}
    done = run_psctl("models", "train", "text", *options, "-w", workspace)
    assert_one_error_line(done, 2, *words)
    assert {path: path.read_bytes() for path in workspace.rglob("*") if path.is_file()} == before


@pytest.mark.exhaustive
@pytest.mark.slow
def test_missing_part_of_a_generator_is_named(run_psctl: RunPsctl, workspace: Path) -> None:
    done = run_psctl("models", "train", "emoji-xl", "-w", "empty")
    assert_one_error_line(done, 2, "psctl models train text")
    done = run_psctl("models", "train", "emoji-3", "-w", workspace)
    assert_one_error_line(done, 2, "psctl models train autoencoder")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["emoji-4"], ["'emoji-4'", "'emoji-3'"]),
        (["text", "--steps", "0"], ["--steps"]),
        (["text", "--steps", "many"], ["--steps"]),
        ([], ["Missing argument 'part'", "emoji-xl"]),
    ],
)
def test_wrong_usage_exits_with_2(run_psctl: RunPsctl, tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    assert_one_error_line(run_psctl("models", "train", *arguments), 2, *words)
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("num_bytes", [0, 5000])
def test_a_truncated_checkpoint_is_named(run_psctl: RunPsctl, workspace: Path, num_bytes: int) -> None:
    checkpoint = workspace / "training" / "text" / "small" / "last.safetensors"
    os.truncate(checkpoint, num_bytes)
    done = run_psctl("models", "train", "text", "--steps", BASE_STEPS, "-w", workspace)
    assert_one_error_line(done, 1, f"{checkpoint} is not a whole checkpoint", "delete it to start again")
    assert checkpoint.stat().st_size == num_bytes


@pytest.mark.exhaustive
@pytest.mark.slow
def test_ctrl_c_leaves_a_checkpoint_that_training_resumes_from(tmp_path: Path) -> None:
    run = tmp_path / "training" / "text" / "small"
    first = interrupt_when_logged(tmp_path, num_lines=1)
    assert first >= 20
    second = interrupt_when_logged(tmp_path, num_lines=len(logged_steps(run)) + 1)
    assert second > first
    steps = logged_steps(run)
    # Every 20th step is logged once: the second process did not start again.
    assert steps == list(range(20, steps[-1] + 1, 20))
    assert not list(run.glob(".*")), "temporary files are left"


def interrupt_when_logged(workspace: Path, num_lines: int) -> int:
    """Train the text encoders until their log has `num_lines`, press Ctrl-C, return the step of the checkpoint."""
    run = workspace / "training" / "text" / "small"
    log = run / "log.jsonl"
    process = start_psctl("models", "train", "text", "--steps", "100000", "--workspace", workspace)
    stdout, stderr = interrupted_when(
        process, lambda: log.exists() and len(log.read_text().splitlines()) >= num_lines, TIMEOUT_S
    )
    *told, last = stderr.splitlines()
    assert (process.returncode, stdout, last) == (130, "", "Error: interrupted")
    assert all(line.startswith("text encoder small: ") for line in told), told
    return step_of(run / "last.safetensors")
