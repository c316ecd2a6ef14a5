"""What some tests need beside Python. Without it, those are skipped; `TESTS_NEED_TOOLS=1` fails them."""

import os
import shutil

import pytest

NEED_TOOLS = "TESTS_NEED_TOOLS"
"""Not one of psctl's variables, which the tests do not see."""
_PACKAGES = {"chromium": "chromium", "chromedriver": "chromium-driver", "g++": "g++", "mount": "mount"}


def lacking(told: str) -> str:
    """Why a test is skipped. Fails it if `TESTS_NEED_TOOLS` is set."""
    if os.environ.get(NEED_TOOLS):
        pytest.fail(told)
    return told


def missing_tools(*names: str) -> str | None:
    """What to install for these programs; None where all are there. Fails as `lacking`."""
    packages = [_PACKAGES[name] for name in names if shutil.which(name) is None]
    if not packages:
        return None
    return lacking(f"install {' and '.join(packages)} (Debian's names) for this test")


def need_tools(*names: str) -> None:
    """Skip the test where one of these programs is missing, see `missing_tools`."""
    if (told := missing_tools(*names)) is not None:
        pytest.skip(told)
