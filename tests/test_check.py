"""`make check`: which tests belong to a change."""

import subprocess
from pathlib import Path

import pytest

from .conftest import changed_files, places_of_tests


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("serving/cache/patch_cache.py", "tests/serving/cache/test_patch_cache.py"),
        ("serving/cache/cells.py", "tests/serving/cache"),
        ("psctl/commands/serve.py", "tests/psctl/test_serve.py"),
        ("psctl/output.py", "tests/psctl/test_output.py"),
        ("psctl/progress.py", "tests/psctl"),
        ("data/models/emoji-xl/unet/config.json", "tests/data/models"),
        ("tests/psctl/test_serve.py", "tests/psctl/test_serve.py"),
        ("tests/gates/gates.toml", "tests/gates"),
        ("README.md", None),
        ("serving/__init__.py", "tests/serving"),
    ],
)
def test_the_tests_of_a_file_are_at_the_same_place(repository: Path, changed: str, tests: str | None) -> None:
    expected = [] if tests is None else [repository / tests]
    assert places_of_tests(repository, [Path(changed)]) == expected
    assert all(path.exists() for path in expected)


def test_what_git_does_not_know_yet_has_changed(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tmp_path, check=True)

    git("init", "--quiet")
    for name in ("same.py", "other.py", "gone.py"):
        (tmp_path / name).write_text("first")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    (tmp_path / "other.py").write_text("second")
    (tmp_path / "gone.py").unlink()
    (tmp_path / "new.py").write_text("first")
    assert sorted(map(str, changed_files(tmp_path, "HEAD"))) == ["gone.py", "new.py", "other.py"]
