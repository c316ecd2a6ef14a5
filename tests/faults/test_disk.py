"""The k-th call of the disk fails: files are whole, old or new, and the command reports the error in one line."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image
from safetensors import safe_open

from ..conftest import RunPsctl
from ..support.disk_runs import OUT, DiskRun, DiskRuns
from ..support.http_server import small_model

pytestmark = pytest.mark.slow
LINES = 3
_OWN_NAME = re.compile(r"-?[0-9]{8}T[0-9]{6}Z(-[0-9]+)?|-[0-9a-f]{8}")
_HIDDEN = {".lock"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(small_model(tmp_path_factory.mktemp("model") / "tiny"))


def files_of(folder: str | Path) -> set[str]:
    """Return the names of all files in a folder, without the parts of names that differ from run to run."""
    found = [path.relative_to(folder) for path in Path(folder).rglob("*") if path.is_file()]
    return {_OWN_NAME.sub("", str(path)) for path in found}


def check_whole(folder: str | Path) -> None:
    """Check that every file can be read from beginning to end and that no temporary file is left."""
    for path in Path(folder).rglob("*"):
        if not path.is_file() or path.name in _HIDDEN:
            continue
        assert not path.name.startswith("."), f"{path} was left"
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".jsonl":
            [json.loads(line) for line in path.read_text().splitlines()]
        elif path.suffix == ".parquet":
            pd.read_parquet(path)
        elif path.suffix == ".png":
            with Image.open(path) as image:
                image.load()
        elif path.suffix == ".safetensors":
            with safe_open(path, "np") as tensors:
                [tensors.get_tensor(name) for name in tensors.keys()]  # noqa: SIM118
        elif path.suffix == ".html":
            assert path.read_text().rstrip().endswith("</html>")


def check(whole: str, runs: Sequence[DiskRun]) -> None:
    assert len(runs) >= 5
    assert any(run.code for run in runs)
    for run in runs:
        told = f"{run}"
        assert "Traceback" not in run.err, told
        assert "bug" not in run.err, told
        if run.code == 0:
            assert files_of(run.folder) == files_of(whole), told
        else:
            lines = [line for line in run.err.splitlines() if line.startswith("Error: ")]
            assert len(lines) == 1, told
            assert re.search(r"disk full|input/output error|no space", lines[0], re.IGNORECASE), told
        check_whole(run.folder)


def commands(model: str, lines: Path) -> dict[str, list[str]]:
    workspace = ["--workspace", f"{OUT}/workspace"]
    small = ["--model", model, "--dtype", "float32", "--num-inference-steps", "2"]
    return {
        "simulate": ["simulate", "--model", "emoji-xl", "--num-prompts", "20", *workspace],
        "generate": ["generate", "a cat", *small, "--output", f"{OUT}/drawn/a.png"],
        "batch": ["batch", "run", str(lines), "-o", f"{OUT}/drawn", "--model", model, *workspace],
        "serve": ["serve", *small, "--num-prompts", "3", "--request-rate", "5", *workspace],
    }


@pytest.mark.parametrize(
    ("command", "one_in"),
    [
        pytest.param("batch", 7, marks=pytest.mark.exhaustive),
        ("simulate", 14),
        *(pytest.param(each, 1, marks=pytest.mark.faults) for each in ("batch", "simulate", "generate")),
        pytest.param("serve", 2, marks=pytest.mark.faults),
    ],
)
def test_files_are_complete_after_any_disk_fault(
    command: str, one_in: int, model: str, run_psctl: RunPsctl, tmp_path: Path
) -> None:
    lines, start, runs_in = tmp_path / "lines.jsonl", tmp_path / "start", tmp_path / "runs"
    bodies = [{"prompt": "a cat", "seed": seed, "size": "32x32", "num_inference_steps": 1} for seed in range(LINES)]
    lines.write_text("\n".join(json.dumps({"custom_id": f"{body['seed']}", "body": body}) for body in bodies))
    arguments = commands(model, lines)[command]
    for folder in (start, runs_in):
        folder.mkdir()
    if command in ("batch", "serve"):
        # The measurements then exist already; everything else is new.
        first = run_psctl(*(each.replace(OUT, str(start)) for each in arguments))
        assert first.returncode == 0, first.stderr
        shutil.rmtree(start / "drawn", ignore_errors=True)
    whole, runs = DiskRuns(arguments, str(start), str(runs_in), one_in).run()
    check_whole(whole)
    check(whole, runs)
    if command == "batch":
        for run in runs[::5]:
            # The batch continues where it stopped.
            again = run_psctl(*(each.replace(OUT, run.folder) for each in arguments))
            assert again.returncode == 0, (run, again.stderr)
            assert files_of(run.folder) == files_of(whole)
            drawn = (Path(run.folder) / "drawn" / "output.jsonl").read_text().splitlines()
            assert sorted(json.loads(line)["custom_id"] for line in drawn) == [str(seed) for seed in range(LINES)]
