"""A hook of mkdocs: links that leave docs/ (`../tests/...`) become links to copies in the site.

So the same Markdown works on a Git server and in the rendered pages, where strict mode checks these links, too.
"""

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\]\(\.\./(?P<path>[^)#\s]+)\)")
_FOLDER = "repository"


def on_files(files: Any, config: Any) -> Any:
    """Add every file of the repository that a page links to, under `repository/`."""
    from mkdocs.structure.files import File

    root = Path(config["docs_dir"]).parent
    for page in list(files.documentation_pages()):
        for link in _LINK.finditer(page.content_string):
            source, place = root / link["path"], f"{_FOLDER}/{link['path']}"
            if source.is_file() and files.get_file_from_path(place) is None:
                files.append(File.generated(config, place, abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links that leave docs/ at the copies."""
    return _LINK.sub(rf"]({_FOLDER}/\g<path>)", markdown)
