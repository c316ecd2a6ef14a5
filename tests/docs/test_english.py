"""The list of phrases that documentation does not use."""

from pathlib import Path

import pytest

from ..support import english


@pytest.mark.parametrize(
    ("name", "content", "lines"),
    [
        ("a.py", '"""Of records."""\n', [1]),
        ("a.py", 'def f() -> int:\n    """See `g`."""\n    return 1  # as usual\n\n\nx = "nobody"\n', [2]),
        ("a.py", '"""Records of a batch.\n\nThey stay for ever.\n"""\n# nobody reads it\n', [3, 5]),
        ("a.md", "It is told.\n```\nnobody\n```\n## English\nnobody\n## Next\nat the most 3; cannot be told\n", [1, 8]),
    ],
)
def test_phrases_are_found_in_all_documentation(name: str, content: str, lines: list[int], tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    assert sorted({int(each.split(":")[1]) for each in english.problems_of(path)}) == lines


def test_exit_code_reports_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.md", tmp_path / "bad.md"
    good.write_text("Records of a batch.\n")
    bad.write_text("Nothing.\nIt lets go of it.\n")
    assert english.main([str(good)]) == 0
    assert english.main([str(good), str(bad)]) == 1
    assert capsys.readouterr().out == f"{bad}:2: 'lets go': release\n"
