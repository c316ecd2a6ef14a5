"""Programs that some tests need. Without them, the tests are skipped; `TESTS_NEED_TOOLS=1` fails them instead."""

import os
import shutil

import pytest

NEED_TOOLS = "TESTS_NEED_TOOLS"
"""Not one of psctl's own variables, which tests do not see."""
SHARED_FOLDER = "TESTS_SHARED_FOLDER"
"""Environment variable with the folder that all workers of one run of the tests share."""
_PACKAGES = {
    "chromium": "chromium",
    "chromedriver": "chromium-driver",
    "curl": "curl",
    "g++": "g++",
    "gcc": "gcc",
    "mount": "mount",
    "nginx": "nginx",
    "openssl": "openssl",
}


def skip_reason(reason: str) -> str:
    """Return the reason for skipping a test. Fails the test if `TESTS_NEED_TOOLS` is set."""
    if os.environ.get(NEED_TOOLS):
        pytest.fail(reason)
    return reason


def missing_tools(*names: str) -> str | None:
    """Return which of these programs to install; None if all are installed. Fails the test as `skip_reason` does."""
    packages = [_PACKAGES[name] for name in names if shutil.which(name) is None]
    if not packages:
        return None
    return skip_reason(f"install {' and '.join(packages)} (Debian's names) for this test")


def need_tools(*names: str) -> None:
    """Skip the test, or fail it as `skip_reason` does, if one of these programs is missing."""
    if (reason := missing_tools(*names)) is not None:
        pytest.skip(reason)
