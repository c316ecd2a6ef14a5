"""Files of requests: what is wrong in them, and what is kept of them whatever ends the process."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from patchedserve.data.errors import RunError, UsageError
from patchedserve.serving.server.batches.file import MAX_LINES, BatchOutput, FolderInUseError, read_lines
from patchedserve.serving.server.errors import invalid


def line(custom_id: Any = "a", **more: Any) -> str:
    return json.dumps({"custom_id": custom_id, "body": {"prompt": "a cat"}, **more})


def written(folder: Path, *lines: str) -> Path:
    path = folder / "batch.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_lines_are_read_in_order(tmp_path: Path) -> None:
    full = line("b/../ä", method="POST", url="/v1/images/generations")
    found = read_lines(written(tmp_path, line("a"), "", full, ""))
    assert [(each.number, each.custom_id) for each in found] == [(1, "a"), (3, "b/../ä")]
    assert found[1].image_name(0, "png") == "00003-b_..__-0.png"


def test_a_byte_order_mark_is_no_part_of_a_line(tmp_path: Path) -> None:
    found = read_lines(written(tmp_path, "\ufeff" + line("a"), "\ufeff" + line("b"), "\ufeff"))
    assert [(each.number, each.custom_id) for each in found] == [(1, "a"), (2, "b")]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((), "holds no request"),
        (("", " "), "holds no request"),
        ((line(), line()), "line 2: custom_id 'a' is that of line 1"),
        ((line(), "{"), "line 2: the body is not valid JSON"),
        ((line(), "[]"), "line 2: the body is a list"),
        ((line(url="/v1/chat/completions"),), "line 1: url is '/v1/chat/completions'"),
        ((line(method="GET"),), "line 1: method is 'GET'"),
        ((line(custom_id=3),), "line 1: custom_id is 3"),
        ((line(custom_id=""),), "line 1: custom_id is ''"),
        ((line(custom_id="a\nb"),), "line 1: custom_id is"),
        ((line(body="a cat"),), "line 1: body is 'a cat'"),
        ((line(colour="red"),), "line 1: the field 'colour' is unknown"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=r"batch\.jsonl") as caught:
        read_lines(written(tmp_path, *lines))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_too_many_lines(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="more than 50,000 lines"):
        read_lines(written(tmp_path, *(line(str(number)) for number in range(MAX_LINES + 1))))
    with pytest.raises(UsageError, match="cannot be read"):
        read_lines(tmp_path / "missing.jsonl")


def test_what_is_done_stays_done(tmp_path: Path) -> None:
    lines = read_lines(written(tmp_path, line("a"), line("b"), line("c")))
    output = BatchOutput(tmp_path / "out")
    output.completed(lines[0], {"data": []}, "one")
    output.failed(lines[1], invalid("no", "prompt"), "two")
    # The process is killed in the middle of a line.
    with (tmp_path / "out" / "output.jsonl").open("ab") as file:
        file.write(b'{"custom_id": "c", "resp')
    left = tmp_path / "out" / "images" / ".00003-c-0.12345678.tmp.png"
    left.write_bytes(b"half")
    with pytest.raises(FolderInUseError, match="another process draws into it"):
        BatchOutput(tmp_path / "out")
    output.close()
    again = BatchOutput(tmp_path / "out")
    assert not left.exists()
    assert again.done == {"a": True, "b": False}
    again.completed(lines[2], {"data": []}, "three")
    told = [json.loads(each) for each in (tmp_path / "out" / "output.jsonl").read_text().splitlines()]
    assert [each["custom_id"] for each in told] == ["a", "c"]
    errors = json.loads((tmp_path / "out" / "errors.jsonl").read_text())
    assert (errors["response"]["status_code"], errors["error"]["code"]) == (400, "invalid_value")
    again.close()
    # Damage elsewhere is not passed over.
    path = tmp_path / "out" / "output.jsonl"
    path.write_bytes(b"{}\n" + path.read_bytes())
    for _ in range(2):
        with pytest.raises(RunError, match=r"output.jsonl, line 1: is damaged"):
            BatchOutput(tmp_path / "out")


FULL = """
import resource, sys
from pathlib import Path
from patchedserve.serving.server.batches.file import BatchOutput, read_lines
from patchedserve.serving.server.errors import invalid

lines = read_lines(Path(sys.argv[1]))
output = BatchOutput(Path(sys.argv[2]))
output.completed(lines[0], {}, "one")
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
for write in (output.completed, lambda line, body, name: output.failed(line, invalid(body["text"]), name)):
    try:
        write(lines[1], {"text": "x" * 100_000}, "two")
    except OSError as error:
        print(error.strerror, output.done)
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
output.completed(lines[1], {"text": "x" * 100_000}, "two")
output.failed(lines[2], invalid("no"), "three")
"""


def test_a_line_that_finds_no_room_is_not_there_at_all(tmp_path: Path) -> None:
    """In a process whose files may have 5,000 bytes for a while: the system writes the first part of a line."""
    batch = written(tmp_path, line("a"), line("b"), line("c"))
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(batch), str(tmp_path / "out")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "File too large {'a': True}\n" * 2
    for name, ids in (("output.jsonl", ["a", "b"]), ("errors.jsonl", ["c"])):
        lines = (tmp_path / "out" / name).read_text().splitlines()
        assert [json.loads(each)["custom_id"] for each in lines] == ids


def test_a_half_line_is_cut_off_however_long_it_is(tmp_path: Path) -> None:
    whole = b'{"custom_id": "a"}\n'
    for content, wanted in (
        (b"", b""),
        (whole, whole),
        (whole + b"x" * 200_000, whole),
        (b"x" * 200_000, b""),
        (whole * 9000 + b"x", whole * 9000),
    ):
        (tmp_path / "output.jsonl").write_bytes(content)
        BatchOutput(tmp_path).close()
        assert (tmp_path / "output.jsonl").read_bytes() == wanted
