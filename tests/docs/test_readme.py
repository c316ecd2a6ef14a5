"""README is short and its map equals the tree; the tables of systems and policies equal the code."""

import re
from pathlib import Path

import pytest

from patchedserve.serving.scheduling.policies import POLICY_NAMES
from patchedserve.serving.scheduling.systems import SYSTEMS

from ..support.checkout import tree_files

MAX_LINES = 150
_ROW = re.compile(r"^\| `(?P<folder>\w+)/` \| (?P<about>[^|]+) \| (?P<rooms>[^|]*)\|$", re.M)


@pytest.fixture(scope="module")
def readme(repository: Path) -> str:
    return (repository / "README.md").read_text()


@pytest.fixture(scope="module")
def tree(repository: Path) -> dict[str, set[str]]:
    """Top-level folders of the checkout, each with the packages directly below it."""
    files = tree_files(repository)
    folders: dict[str, set[str]] = {}
    for file in files:
        if len(file.parts) > 1 and not file.parts[0].startswith("."):
            rooms = folders.setdefault(file.parts[0], set())
            if len(file.parts) > 2 and Path(*file.parts[:2], "__init__.py") in files:
                rooms.add(file.parts[1])
    return folders


def test_readme_length_is_bounded(readme: str) -> None:
    assert len(readme.splitlines()) <= MAX_LINES


def test_the_map_equals_the_tree(readme: str, tree: dict[str, set[str]]) -> None:
    section = readme.partition("## Map of the house")[2].partition("\n## ")[0]
    rows = {row["folder"]: set(re.findall(r"`(\w+)`", row["rooms"])) for row in _ROW.finditer(section)}
    assert rows == tree


def test_status_is_stated_near_the_top(readme: str) -> None:
    first = readme.partition("## Install")[0]
    for words in ("**Status.**", "CPU and CUDA", "measured on a GPU"):
        assert words in first


def test_documented_systems_and_policies_match_the_code(repository: Path) -> None:
    page = (repository / "docs" / "scheduling.md").read_text()
    section = page.partition("## Systems")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w-]+)` \| (\w+) \| `([\w-]+)` \| (\w+) \|", section, re.M)
    assert rows == [(each.name, each.engine, each.policy, each.cache) for each in SYSTEMS.values()]
    policies = page.partition("## Policies")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([\w-]+)` \|", policies, re.M)) == set(POLICY_NAMES)
