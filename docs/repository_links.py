"""A hook of mkdocs: links that leave docs/ (`../tests/...`) become links to copies in the site.

So the same Markdown works on a Git server and in the rendered pages, where strict mode checks these links, too.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\]\((?P<target>(?:\.\./)+[^)#\s]+)\)")
_FOLDER = "repository"


def _copy_of(target: str, page: str) -> str | None:
    """Return the address in the site of a file outside of docs/ that a page links to; None for files inside."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    return f"{_FOLDER}/{path.removeprefix('../')}" if path.startswith("../") else None


def on_files(files: Any, config: Any) -> Any:
    """Add every file of the repository that a page links to, under `repository/`."""
    from mkdocs.structure.files import File

    root = Path(config["docs_dir"]).parent
    for page in list(files.documentation_pages()):
        for link in _LINK.finditer(page.content_string):
            place = _copy_of(link["target"], page.src_uri)
            if place is not None and files.get_file_from_path(place) is None:
                source = root / place.removeprefix(f"{_FOLDER}/")
                if source.is_file():
                    files.append(File.generated(config, place, abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links that leave docs/ at the copies."""

    def mended(link: re.Match[str]) -> str:
        place = _copy_of(link["target"], page.file.src_uri)
        if place is None:
            return link[0]
        return f"]({posixpath.relpath(place, posixpath.dirname(page.file.src_uri) or '.')})"

    return _LINK.sub(mended, markdown)
