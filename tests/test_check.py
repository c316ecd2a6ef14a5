"""Selection of the tests of a change by `make check`, and of the cases of a product by `make test`."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from .conftest import changed_files, covering, places_of_tests


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
def test_tests_mirror_the_path_of_a_file(repository: Path, changed: str, tests: str | None) -> None:
    expected = [] if tests is None else [repository / tests]
    assert places_of_tests(repository, [Path(changed)]) == expected
    assert all(path.exists() for path in expected)


def test_untracked_files_count_as_changed(tmp_path: Path) -> None:
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


def test_chosen_cases_cover_every_value_of_each_parameter() -> None:
    cases = [{("family", family), ("ranks", ranks)} for family in "abc" for ranks in range(5)]
    chosen = [cases[place] for place in covering(cases)]
    assert set().union(*chosen) == set().union(*cases)
    assert len(chosen) == 5
    assert covering([]) == []


_TESTS = """
import pytest

@pytest.mark.product
@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("family", ["sd", "flux"])
def test_product(family, ranks): pass

@pytest.mark.product(most=1)
@pytest.mark.parametrize("page", "abc")
def test_long(page): pass

@pytest.mark.exhaustive
def test_at_length(): pass

def test_plain(): pass
"""


@pytest.mark.slow
def test_every_test_is_in_exactly_one_run(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(_TESTS)

    class Collected:
        names: Sequence[str] = ()

        def pytest_collection_finish(self, session: pytest.Session) -> None:
            self.names = [item.name for item in session.items]

    def chosen(*options: str) -> Sequence[str]:
        collected = Collected()
        shared = ["-q", "--collect-only", "-p", "patchedserve.tests.conftest", f"--rootdir={repository}", str(tmp_path)]
        assert pytest.main([*shared, *options], [collected]) == 0
        return collected.names

    usual, exhaustive = chosen("-m", "not exhaustive"), chosen("-m", "exhaustive")
    ranks = {name[-2] for name in usual if name.startswith("test_product")}
    assert ranks == set("12345678")
    assert {name for name in usual if not name.startswith("test_product")} == {"test_long[a]", "test_plain"}
    assert len(usual) == 8 + 2
    assert len({*usual, *exhaustive}) == len(usual) + len(exhaustive) == 16 + 3 + 2
