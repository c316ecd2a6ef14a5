"""Every file of a workspace is damaged in every way; a command that reads it continues with a warning or reports it.

Damaged files of a server are tested in `tests/psctl/test_damaged_workspace.py`.
"""

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchedserve.psctl.app import main

from ..support.disk_runs import plots_drawn_once
from ..support.http_server import small_model

pytestmark = pytest.mark.slow


def _flipped(content: bytes) -> bytes:
    found = bytearray(content)
    for place in range(len(found) // 7, len(found), max(1, len(found) // 9)):
        found[place] ^= 0x5A
    return bytes(found)


def _as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "content").write_text("of a folder")


def _content(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": _content(lambda content: b""),
    "the first byte": _content(lambda content: content[:1]),
    "half of it": _content(lambda content: content[: len(content) // 2]),
    "without its end": _content(lambda content: content[:-5]),
    "bits flipped": _content(_flipped),
    "zeros": _content(lambda content: bytes(len(content))),
    "other JSON": _content(lambda content: b'{"a": [1, null, "b"]}'),
    "a list": _content(lambda content: b"[]"),
    "a folder": _as_folder,
    "gone": Path.unlink,
}


W = "WHERE"
"""Placeholder for the folder in arguments."""
READS = {
    "templates add": ("work/*/cpu/templates/*/*",),
    "templates list": ("work/*/cpu/templates/*/*",),
    "templates check": ("work/*/cpu/templates/*/*",),
    "edit": ("work/*/cpu/templates/*/*", "a.png", "mask.png"),
    "serve": ("work/*/cpu/tables/*.*", "work/*/cpu/predictors/*"),
    "train-predictor latency": ("work/*/cpu/tables/latency-*.parquet",),
    "simulate": ("work/*/cpu/tables/latency-*.parquet", "work/*/cpu/predictors/*", "trace.jsonl"),
    "gate": ("gates.toml", "run.json"),
    "batch run": ("lines.jsonl", "drawn/*.json*"),
}
"""Files that each command reads."""
SHORT = {
    ("train-predictor latency", "zeros"),
    ("gate", "other JSON"),
    ("batch run", "a folder"),
}
"""Cases that `make test` runs."""


def commands(model: str) -> dict[str, list[str]]:
    """Return the commands by name, in an order in which each finds the files that it reads."""
    small, workspace = ["--model", model], ["--workspace", f"{W}/work"]
    drawing, few = [*small, "--num-inference-steps", "2", *workspace], ["--num-prompts", "3", "--request-rate", "5"]
    profile = ["--combinations", "14", "--repeats", "1", "--max-batch-size", "4"]
    return {
        "templates add": ["templates", "add", f"{W}/a.png", *drawing],
        "templates list": ["templates", "list", *small, *workspace],
        "templates check": ["templates", "check", *small, *workspace],
        "edit": [
            "edit",
            f"{W}/a.png",
            "a hat",
            "--mask",
            f"{W}/mask.png",
            "--reuse",
            "-o",
            f"{W}/edited.png",
            *drawing,
        ],
        "profile latency": ["profile", "latency", *small, *profile, *workspace],
        "train-predictor latency": ["train-predictor", "latency", "--force", *small, *workspace],
        "simulate": ["simulate", *small, "--trace", f"{W}/trace.jsonl", "--output-file", f"{W}/run.json", *workspace],
        "gate": ["gate", f"{W}/gates.toml", "--results", f"{W}/run.json"],
        "batch run": ["batch", "run", f"{W}/lines.jsonl", "-o", f"{W}/drawn", *small, *workspace],
        "serve": ["serve", *drawing, *few],
    }


@pytest.fixture(scope="module", autouse=True)
def _plots() -> Iterator[None]:
    with plots_drawn_once():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(small_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def whole(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which all commands except `serve` have run."""
    folder, rng = tmp_path_factory.mktemp("whole"), np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (32, 64, 3), np.uint8)).save(folder / "a.png")
    mask = np.zeros((32, 64), np.uint8)
    mask[:8, :8] = 255
    Image.fromarray(mask).save(folder / "mask.png")
    (folder / "gates.toml").write_text('[[gates]]\nname = "a"\nfile = "run"\nmetric = "throughput"\nmin = 0.0\n')
    lines = [{"custom_id": str(seed), "body": {"prompt": "a", "seed": seed, "size": "32x32"}} for seed in range(2)]
    (folder / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    asked = [{"arrival_s": 0.1 * number, "prompt": "a", "resolution": "32x32"} for number in range(4)]
    (folder / "trace.jsonl").write_text("\n".join(map(json.dumps, asked)))
    for command, arguments in commands(model).items():
        if command != "serve":
            code, err = run(arguments, folder)
            assert code == 0 or command == "gate", (command, err)
    return folder


@pytest.fixture(scope="module")
def served(model: str, whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of that folder in which `serve` has run as well."""
    folder = tmp_path_factory.mktemp("served") / "folder"
    shutil.copytree(whole, folder)
    code, err = run(commands(model)["serve"], folder)
    assert code == 0, err
    return folder


def run(arguments: Sequence[str], folder: Path) -> tuple[int, str]:
    """Run a command; return its exit code and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([each.replace(W, str(folder)) for each in arguments])
    return code, err.getvalue()


CASES = [
    pytest.param(command, damage, marks=() if (command, damage) in SHORT else pytest.mark.faults)
    for command in READS
    for damage in DAMAGE
]


@pytest.mark.parametrize(("command", "damage"), CASES)
def test_damage_is_reported_or_the_file_is_recreated(
    command: str, damage: str, model: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    whole: Path = request.getfixturevalue("served" if command == "serve" else "whole")
    files = sorted({path for pattern in READS[command] for path in whole.glob(pattern) if path.is_file()})
    assert files
    for number, file in enumerate(files):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        for drawn in folder.glob("edited*"):
            drawn.unlink()
        damaged = folder / file.relative_to(whole)
        DAMAGE[damage](damaged)
        code, err = run(commands(model)[command], folder)
        told = f"{damaged.name}: {code} {err}"
        assert "Traceback" not in err, told
        assert "bug" not in err, told
        errors = [line for line in err.splitlines() if line.startswith("Error: ")]
        # A gate that fails or lacks evidence reports this in its table.
        assert len(errors) == (code != 0 and (command != "gate" or code not in (1, 3))), told
        if command == "templates check" and file.suffix == ".safetensors":
            assert code != 0, told
        if command == "edit" and code == 0 and file.suffix != ".png":
            own, expected = (np.asarray(Image.open(each / "edited.png")) for each in (folder, whole))
            assert np.array_equal(own, expected), told
