"""Links of README and docs have a target, and the site builds with the settings of `make docs`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..support.docs_pages import PAGES, blocks_of, name_of_page

_LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(?P<text>.+)$", re.M)


def anchors_of(text: str) -> set[str]:
    """Return the anchors of a page's headings, by the rule that GitHub and mkdocs share."""
    for block in blocks_of(text):
        text = text.replace(block.body, "")
    plain = (re.sub(r"[^\w\- ]", "", match["text"]).strip().lower() for match in _HEADING.finditer(text))
    return {re.sub(r"[ ]+", "-", heading) for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=name_of_page)
def test_every_link_has_a_target(page: Path) -> None:
    text = page.read_text()
    for target in (match["target"] for match in _LINK.finditer(text)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        place = page.parent / name if name else page
        assert place.exists(), f"{page.name} links to {target}, which does not exist"
        assert not anchor or anchor in anchors_of(place.read_text()), f"{page.name}: {target} has no such heading"


def test_every_page_is_in_the_navigation(repository: Path) -> None:
    navigation = (repository / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    docs = repository / "docs"
    pages = {page.relative_to(docs).as_posix() for page in PAGES if page.is_relative_to(docs)}
    assert set(re.findall(r"[\w/-]+\.md", navigation)) == pages


@pytest.mark.exhaustive
@pytest.mark.slow
def test_site_builds_without_warnings(repository: Path, tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        build,
        cwd=repository,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "index.html").is_file()
