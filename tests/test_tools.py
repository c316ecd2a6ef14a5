"""Tests whose programs besides Python are missing are skipped with an install hint, or fail in CI."""

from collections.abc import Callable
from pathlib import Path

import pytest

from .support.browser import opened_browser
from .support.tools import NEED_TOOLS, need_tools


def browse() -> None:
    with opened_browser():
        pass


@pytest.mark.parametrize(
    ("must_be_there", "outcome"), [("", pytest.skip.Exception), ("1", pytest.fail.Exception)], ids=["may", "must"]
)
@pytest.mark.parametrize(
    ("use", "told"),
    [
        (browse, r"install chromium and chromium-driver \(Debian's names\)"),
        (lambda: need_tools("g++"), r"install g\+\+ "),
    ],
    ids=["browser", "compiler"],
)
def test_tests_name_missing_programs(
    use: Callable[[], object],
    told: str,
    must_be_there: str,
    outcome: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(NEED_TOOLS, must_be_there)
    with pytest.raises(outcome, match=told):
        use()
