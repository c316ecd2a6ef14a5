"""The matrix of the compatibility page is that of the table of conflicts."""

from pathlib import Path

from patchedserve.serving.conflicts import CONFLICTS

IMPLIED = {"a cache of blocks": {"a cache of blocks", "--cache"}}
"""Features that are also another one, whose conflicts they share."""

MODES = {"--cache schedule", "--cache", "a cache of blocks"}
"""Modes of one option, which cannot be given together."""


def excludes(one: str, other: str) -> bool:
    """Return whether the table refuses two features together."""
    ones, others = IMPLIED.get(one, {one}), IMPLIED.get(other, {other})
    return any((c.one in ones and c.other in others) or (c.one in others and c.other in ones) for c in CONFLICTS)


def cell_of(one: str, other: str) -> str:
    """Return the cell of two features; empty where they are the same one, or modes of one option."""
    if one == other or {one, other} <= MODES:
        return ""
    return "no" if excludes(one, other) else "yes"


def test_matrix_equals_the_table_of_conflicts(repository: Path) -> None:
    page = (repository / "docs" / "compatibility.md").read_text()
    section = page.partition("## Options\n")[2].partition("\n## ")[0]
    rows = [[cell.strip().strip("`") for cell in line.split("|")[1:-1]] for line in section.splitlines() if "|" in line]
    (_, *columns), _, *body = rows
    assert [row[0] for row in body] == columns
    known = {feature for conflict in CONFLICTS for feature in (conflict.one, conflict.other)}
    assert set(columns) - known == {"--cache schedule", "--quantize"}, "these two exclude nothing"
    for name, *cells in body:
        assert cells == [cell_of(name, other) for other in columns], name
