"""Programs that some tests need beside Python. Without them, those are skipped; `TESTS_NEED_TOOLS=1` fails them."""

import os
import shutil

import pytest

NEED_TOOLS = "TESTS_NEED_TOOLS"
_PACKAGES = {"chromium": "chromium", "chromedriver": "chromium-driver", "g++": "g++"}


def find_tools(*names: str) -> list[str] | None:
    """Paths of programs; None where one is missing. Fails the test there if `TESTS_NEED_TOOLS` is set."""
    found = {name: shutil.which(name) for name in names}
    if all(found.values()):
        return [path for path in found.values() if path is not None]
    if os.environ.get(NEED_TOOLS):
        pytest.fail(_missing(found))
    return None


def need_tools(*names: str) -> list[str]:
    """Paths of programs. Skips the test where one is missing, see `find_tools`."""
    paths = find_tools(*names)
    if paths is None:
        pytest.skip(_missing({name: shutil.which(name) for name in names}))
    return paths


def _missing(found: dict[str, str | None]) -> str:
    packages = [_PACKAGES[name] for name, path in found.items() if path is None]
    return f"install {' and '.join(packages)} (Debian's names) for this test"
