"""Prompts: the bundled captions, or a file of the user's."""

from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from ..checks import require_text
from ..errors import UsageError
from ..records import column_name, csv_rows, open_text, parse_json, parsed_lines

BUNDLED_PROMPTS = Path(__file__).with_name("emoji-captions.txt")
"""Captions in the words that the bundled models were trained on, one per line."""

PROMPT_COLUMNS = ("prompt", "caption")
_FORMS = "a .txt file with one prompt per line, a .csv or .tsv file with a prompt column, or a .jsonl file"


def load_prompts(path: str | Path | None = None) -> list[str]:
    """Read prompts in the order of the file, without blank ones.

    Args:
        path: `.txt` (one per line), `.csv` or `.tsv` (column "prompt" or "caption", in any case), `.jsonl` (texts, or
            objects with such a key). None: the bundled captions.

    Raises:
        UsageError: the file cannot be read, has another form, holds no prompt, or holds one that is not text
            (`is_text`).
    """
    path = BUNDLED_PROMPTS if path is None else Path(path)
    readers = {".txt": _read_txt, ".csv": _read_csv, ".tsv": _read_csv, ".jsonl": _read_jsonl}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UsageError(f"{path}: prompts must come from {_FORMS}")
    prompts: list[str] = []
    with open_text(path, "prompts") as file:
        for number, text in reader(path, file):
            require_text(f"{path}:{number}: the prompt", text)
            if prompt := text.strip():
                prompts.append(prompt)
    if not prompts:
        raise UsageError(f"{path}: holds no prompt, but at least one is needed")
    return prompts


def _read_txt(path: Path, file: TextIO) -> Iterator[tuple[int, str]]:
    return enumerate(file, start=1)


def _read_csv(path: Path, file: TextIO) -> Iterator[tuple[int, str]]:
    column: int | None = None
    for number, row in csv_rows(path, file):
        if column is None:
            names = [column_name(name) for name in row]
            wanted = [name for name in PROMPT_COLUMNS if name in names]
            if not wanted:
                allowed = " or ".join(PROMPT_COLUMNS)
                raise UsageError(f"{path}:{number}: columns are {', '.join(row)}, but one must be called {allowed}")
            column = names.index(wanted[0])
        elif len(row) > column:
            yield number, row[column]
        else:
            raise UsageError(f"{path}:{number}: has {len(row)} columns, but the prompt is column {column + 1}")


def _read_jsonl(path: Path, file: TextIO) -> Iterator[tuple[int, str]]:
    for number, value in parsed_lines(path, file, parse_json):
        if isinstance(value, dict):
            value = next((value[name] for name in PROMPT_COLUMNS if name in value), None)
        if not isinstance(value, str):
            allowed = " or ".join(PROMPT_COLUMNS)
            raise UsageError(f"{path}:{number}: must be a text, or an object with a text under {allowed}")
        yield number, value
