"""Parts of README and docs: fenced blocks, the commands in them, and links."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md")))
SHELL_LANGUAGES = ("sh", "bash", "shell", "console")
NOT_RUN = ("json", "toml", "csv", "text")
"""Languages of blocks that are files or examples of data. Any other language is executed."""


def name_of_page(page: Path) -> str:
    """Return a page's path in docs/ without its ending, or README."""
    return page.relative_to(REPOSITORY).with_suffix("").as_posix().removeprefix("docs/")


_FENCE = re.compile(
    r"^```(?P<language>\w*)(?:[ \t]+title=\"(?P<title>[^\"]+)\")?[ \t]*\n(?P<body>.*?)^```$", re.M | re.S
)
_SPAN = re.compile(r"`(psctl(?: [^`]*)?)`")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language, the file that its title names (or None), its text, and its first line's number."""

    language: str
    title: str | None
    body: str
    line: int


def blocks_of(text: str) -> list[Block]:
    """Return the fenced blocks of a page, in order. Raises ValueError if a fence has no language or is not closed."""
    found = [
        Block(match["language"], match["title"], match["body"], text.count("\n", 0, match.start()) + 2)
        for match in _FENCE.finditer(text)
    ]
    if 2 * len(found) != len(re.findall(r"^```", text, re.M)):
        raise ValueError("a fence is not closed, or its head is not understood")
    for block in found:
        if not block.language:
            raise ValueError(f"line {block.line}: the block has no language, so nobody can tell whether to run it")
    return found


def commands_of(block: Block) -> list[list[str]]:
    """Return a shell block's commands as lists of words, without comments and prompts, lines joined, `&&` split."""
    commands = []
    for line in block.body.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            commands.append(words[:end])
            words = words[end + 1 :]
    return commands


def spans_of(text: str) -> list[list[str]]:
    """Return the words of every inline `psctl ...` outside of blocks."""
    return [shlex.split(match[1]) for match in _SPAN.finditer(_FENCE.sub("", text))]
