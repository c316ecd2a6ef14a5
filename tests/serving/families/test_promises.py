"""Every family keeps the promises of the kit; the support matrix says what it lacks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from patchedserve.serving.conflicts import conflict_in
from patchedserve.serving.families.table import FAMILIES

from ...support.family_kit import BUILDS, OPTIONS, PROMISES, Build


@pytest.mark.product
@pytest.mark.slow
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
@pytest.mark.parametrize("family", BUILDS)
def test_family_check(family: str, promise: Callable[[Build], None]) -> None:
    promise(BUILDS[family])


def test_all_families_are_covered() -> None:
    assert {type(build()).__name__ for build in BUILDS.values()} == set(FAMILIES)


def test_support_matrix_equals_the_documented_table(repository: Path) -> None:
    section = (repository / "docs" / "families.md").read_text().partition("## What is served")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and "`" in line][1:]
    assert rows == [
        f"| {entry.title} | `{name}` | patched, plain | "
        + " | ".join("no" if conflict_in({option: "", name: ""}) else "yes" for option in OPTIONS)
        + " |"
        for name, entry in FAMILIES.items()
    ]
