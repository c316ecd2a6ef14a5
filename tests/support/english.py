"""Phrases that a native technical writer would not use, found in docstrings, comments and pages.

`make lint` runs it: `python -m patchedserve.tests.support.english [FILE ...]`. CONTRIBUTING.md has pairs of before and
after.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("psctl", "eval", "profiling", "serving", "training", "data", "kernels", "tests")
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs/**/*.md")
IN_DOCSTRINGS = {
    r"\AOf\b": "begin with the noun: 'Buffers of a record', not 'Of a record'",
    r"\ASee `[^`]+`\.?\Z": "say in a sentence what it does",
}
EVERYWHERE = {
    r"\bnobody\b": "no client, no request, nothing",
    r"\bwhoever\b": "the one that",
    r"\bfor ever\b": "without limit, permanently",
    r"\blets? go\b": "release",
    r"\b(take|takes|taken|took) back\b": "withdraw",
    r"\bat the most\b": "at most",
    r"(?<!cannot )(?<!can )\b(is|are|was|were|be|been|being) told\b": "receive, be reported, be notified",
    r"\btells? (of|which|that|how|what|whether)\b": "report, state, return",
    r"\b(hears|heard)\b": "receive",
    r"\bas of `": "as in",
}
"""Patterns, each with what to write in its place."""


_EXAMPLES = "## English"
"""Heading of the part of a page that quotes what one should not write; it ends at the next heading."""


def texts_of(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield line number and text of all docstrings, comments and lines of pages, and whether it is a docstring."""
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        is_code = is_example = False
        for number, line in enumerate(content.splitlines(), 1):
            if line.startswith("## "):
                is_example = line == _EXAMPLES
            if line.lstrip().startswith("```"):
                is_code = not is_code
            elif not is_code and not is_example:
                yield number, line, False
        return
    for node in ast.walk(ast.parse(content)):
        match node:
            case ast.Expr(value=ast.Constant(value=str() as text)):
                yield node.lineno, text, True
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, False


def problems_of(path: Path) -> Iterator[str]:
    """Yield a line for each phrase of a file that is on the list."""
    for number, text, is_docstring in texts_of(path):
        for pattern, better in (EVERYWHERE | IN_DOCSTRINGS if is_docstring else EVERYWHERE).items():
            for match in re.finditer(pattern, text.strip()):
                line = number + text.strip()[: match.start()].count("\n")
                yield f"{path}:{line}: {match[0]!r}: {better}"


def main(names: Sequence[str]) -> int:
    """Print the problems of these files, by default of all; the exit code says whether there are any."""
    everything = [
        *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))),
        *(path for pattern in PAGES for path in sorted(ROOT.glob(pattern))),
    ]
    found = [problem for path in map(Path, names or everything) for problem in problems_of(path)]
    for problem in found:
        print(problem)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
