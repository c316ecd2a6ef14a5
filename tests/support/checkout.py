"""Files of the checkout that is tested."""

import subprocess
from pathlib import Path

import pytest


def tree_files(repository: Path) -> list[Path]:
    """Return the files that git tracks or does not ignore, relative to the root. Skips the test without a checkout."""
    asked = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(asked, cwd=repository, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("the tree is not a git checkout")
    return [Path(line) for line in listed.stdout.splitlines() if (repository / line).is_file()]
