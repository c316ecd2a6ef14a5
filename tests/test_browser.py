"""Tests of pages where there is no browser: skipped with what to install, or failed where one must be there."""

from pathlib import Path

import pytest

from .support.browser import opened_browser


@pytest.mark.parametrize(
    ("must_be_there", "outcome"), [("", pytest.skip.Exception), ("1", pytest.fail.Exception)], ids=["may", "must"]
)
def test_tests_of_pages_name_the_browser_that_they_miss(
    must_be_there: str, outcome: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PSCTL_TESTS_NEED_BROWSER", must_be_there)
    with pytest.raises(outcome, match="install Debian's chromium and chromium-driver"), opened_browser():
        pass
