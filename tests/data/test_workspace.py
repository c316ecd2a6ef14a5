"""The workspace, in which commands find the files of other commands."""

from itertools import pairwise
from pathlib import Path

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.workspace import Workspace


def test_layout(tmp_path: Path) -> None:
    part = Workspace(tmp_path / "ws").for_model("emoji-xl", "cuda:0")
    assert not (tmp_path / "ws").exists()
    assert part.tables == tmp_path / "ws" / "emoji-xl" / "cuda-0" / "tables"
    assert part.tables.is_dir()
    assert part.predictors.is_dir()
    assert part.runs.is_dir()
    assert {path.name for path in part.root.iterdir()} == {"tables", "predictors", "runs"}


def test_every_model_has_its_own_folder_inside_the_root(tmp_path: Path) -> None:
    models = ["a/b", "a--b", "/a/b", "./a/b", "../a", "a", "a ", "..", "é", "x" * 300, "x" * 301]
    roots = [Workspace(tmp_path).for_model(model, "cpu").root for model in models]
    assert len(set(roots)) == len(models)
    assert roots[0] == tmp_path / "a--b" / "cpu"
    for root in roots:
        assert root.parent.parent == tmp_path
        assert not root.parent.name.startswith(".")
        assert len(root.parent.name) < 200


def test_empty_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="model name is empty"):
        Workspace(tmp_path).for_model(" ", "cpu")
    with pytest.raises(UsageError, match="device is empty"):
        Workspace(tmp_path).for_model("a", "")
    with pytest.raises(UsageError, match="workspace path is empty"):
        Workspace("")


def test_runs_are_unique_and_the_latest_is_found(tmp_path: Path) -> None:
    part = Workspace(tmp_path).for_model("emoji-xl", "cpu")
    assert part.latest_run("serve") is None
    assert not part.root.exists()
    # More than ten runs within a second, because "-10" sorts before "-9" as text.
    runs = [part.new_run("serve") for _ in range(12)]
    part.new_run("serve-sim")
    (part.runs / "serve-notes.txt").touch()
    assert len(set(runs)) == 12
    assert all(run.is_dir() and run.parent == part.runs for run in runs)
    assert part.latest_run("serve") == runs[-1]
    for earlier, later in pairwise(runs[-3:]):
        (earlier / "summary.json").touch()
        assert part.latest_run("serve", containing="summary.json") == earlier
        assert later.exists()


@pytest.mark.parametrize("kind", ["", "a/b", "..", "Serve", "a b", "-a"])
def test_bad_kind_is_refused(tmp_path: Path, kind: str) -> None:
    part = Workspace(tmp_path).for_model("emoji-xl", "cpu")
    with pytest.raises(UsageError, match="run kind"):
        part.new_run(kind)
    with pytest.raises(UsageError, match="run kind"):
        part.latest_run(kind)
