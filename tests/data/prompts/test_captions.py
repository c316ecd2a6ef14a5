"""Prompt files."""

from pathlib import Path

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.prompts.captions import load_prompts


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.txt", 'a taco\n\n  \n  a cat, "big"  \nein Bär'),
        ("p.TXT", '\ufeffa taco\r\na cat, "big"\r\nein Bär\r\n'),
        ("p.csv", 'case,Prompt,seed\n1,a taco,7\n2,"a cat, ""big""",8\n3,,9\n4,ein Bär,9\n'),
        ("p.csv", '\ufeffcaption\r\na taco\r\n"a cat, ""big"""\r\n\r\nein Bär'),
        ("p.tsv", 'id\tPROMPT\n1\ta taco\n2\t"a cat, ""big"""\n3\tein Bär\n'),
        ("p.jsonl", '"a taco"\n\n{"prompt": "a cat, \\"big\\"", "seed": 1}\n{"caption": "ein Bär"}\n'),
    ],
)
def test_forms(tmp_path: Path, name: str, content: str) -> None:
    assert load_prompts(write(tmp_path, name, content)) == ["a taco", 'a cat, "big"', "ein Bär"]


def test_prompt_precedes_caption(tmp_path: Path) -> None:
    assert load_prompts(write(tmp_path, "p.csv", "caption,prompt\nno,yes\n")) == ["yes"]


def test_quoted_prompt_may_span_lines(tmp_path: Path) -> None:
    assert load_prompts(write(tmp_path, "p.csv", 'prompt\n"a\ncat"\n')) == ["a\ncat"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", "", "p.txt: holds no prompt"),
        ("p.txt", " \n\n", "p.txt: holds no prompt"),
        ("p.csv", "", "p.csv: holds no prompt"),
        ("p.csv", "prompt\n", "p.csv: holds no prompt"),
        ("p.csv", "id,text\n1,a\n", r"p.csv:1: columns are id, text, but one must be called prompt or caption"),
        ("p.csv", "id,prompt\n1,a\n2\n", r"p.csv:3: has 1 columns, but the prompt is column 2"),
        ("p.csv", 'prompt\n"a" b\n', r"p.csv:2: malformed table"),
        ("p.jsonl", '"a"\n{"prompt": \n', r"p.jsonl:2: not valid JSON"),
        ("p.jsonl", '"a"\n\n7\n', r"p.jsonl:3: must be a text"),
        ("p.jsonl", '{"prompt": 7}\n', r"p.jsonl:1: must be a text"),
        ("p.jsonl", '{"text": "a"}\n', r"p.jsonl:1: must be a text"),
        ("p.jsonl", "[" * 100_000, r"p.jsonl:1: not valid JSON"),
        ("p.txt", b"a\xff\xfe", r"p.txt: not UTF-8 text"),
        ("p.txt", "a\n\nb\0\n", r"p.txt:3: the prompt holds a character that is not text"),
        ("p.csv", 'prompt\n"a\nb"\nc\0\n', r"p.csv:4: the prompt holds a character that is not text"),
        ("p.jsonl", '"a"\n"b\\u0000"\n', r"p.jsonl:2: the prompt holds a character that is not text"),
        ("p.jsonl", '{"prompt": "a \\ud83d cat"}\n', r"p.jsonl:1: the prompt holds a character that is not text"),
        ("p.docx", "a", r"p.docx: prompts must come from"),
        ("prompts", "a", r"prompts: prompts must come from"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_bad_files_give_a_one_line_error(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        load_prompts(write(tmp_path, name, content))
    assert "\n" not in str(caught.value)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none.txt: cannot read prompts: No such file"):
        load_prompts(tmp_path / "none.txt")
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(UsageError, match=r"folder.txt: cannot read prompts: Is a directory"):
        load_prompts(str(tmp_path / "folder.txt"))


def test_the_bundled_prompts() -> None:
    prompts = load_prompts()
    assert len(prompts) >= 32
    assert len(set(prompts)) == len(prompts)
