"""The modules that the architecture page names exist."""

import re
from pathlib import Path

import pytest

_MODULE = re.compile(r"`([\w/]+\.py)`")


def modules_in(line: str, root: Path) -> list[Path]:
    """Return the modules in a row of a table: a name without a folder is in the folder of the one before it."""
    found: list[Path] = []
    for name in _MODULE.findall(line):
        found.append(root / name if "/" in name else found[-1].with_name(name))
    return found


def test_every_module_exists(repository: Path) -> None:
    rows = [line for line in (repository / "docs" / "architecture.md").read_text().splitlines() if line.startswith("|")]
    named = [module for row in rows for module in modules_in(row, repository)]
    assert len(named) > 60
    assert not [str(module.relative_to(repository)) for module in named if not module.is_file()]


def test_a_name_without_a_folder_follows_another(tmp_path: Path) -> None:
    row = "| it is loaded | `a/b.py`, `c.py`, a part; `d/e.py` |"
    assert modules_in(row, tmp_path) == [tmp_path / name for name in ("a/b.py", "a/c.py", "d/e.py")]
    with pytest.raises(IndexError):
        modules_in("| `c.py` |", tmp_path)
