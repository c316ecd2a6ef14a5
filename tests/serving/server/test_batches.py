"""Files of requests: what is wrong in them, and what is kept of them whatever ends the process."""

import asyncio
import io
import json
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI

from patchedserve.data.errors import RunError, UsageError
from patchedserve.serving.server.batches.api import batch_routes
from patchedserve.serving.server.batches.file import MAX_LINES, BatchOutput, FolderInUseError, read_lines
from patchedserve.serving.server.batches.folder import BatchFolder
from patchedserve.serving.server.batches.store import Batches
from patchedserve.serving.server.errors import invalid
from patchedserve.serving.server.guards import Guards
from patchedserve.serving.server.keys import Keys


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
    whole = b'{"id": "batch_req_1", "custom_id": "a", "response": {}, "error": null}\n'
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


def test_the_event_loop_reads_nothing_that_grows(tmp_path: Path) -> None:
    """Neither as it resumes a batch nor as it lists; and of what was listed before only the page is read."""
    files, num_files = Batches(tmp_path, cast(Any, None)), 30
    content = written(tmp_path, line("a"), line("b")).read_bytes()
    ids = [files.add_file("batch.jsonl", io.BytesIO(content), "batch", "")["id"] for _ in range(num_files)]
    counts = {"total": 2, "completed": 0, "failed": 0}
    batch = {"id": "batch_1", "status": "in_progress", "created_at": 1, "input_file_id": ids[0]}
    BatchFolder(tmp_path).write_batch(batch | {"request_counts": counts})
    with closing(BatchOutput(tmp_path / "batches" / "batch_1")) as output:
        for each in read_lines(tmp_path / "batch.jsonl"):
            output.completed(each, {"data": []}, "one")
    opened: list[tuple[str, bool]] = []
    is_over = False

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        # A hook stays as long as the process.
        if event == "open" and not is_over and str(arguments[0]).startswith(str(tmp_path)):
            opened.append((Path(str(arguments[0])).name, threading.current_thread() is threading.main_thread()))

    async def use() -> None:
        batches, app = Batches(tmp_path, cast(Any, None)), FastAPI()
        app.include_router(batch_routes(batches))
        guards = Guards(app, keys=Keys(()), hosts=None, max_body=1000)
        sys.addaudithook(watch)
        await batches.start()
        assert ("output.jsonl", True) not in opened
        transport = httpx.ASGITransport(cast(Any, guards))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            while batches.batch("batch_1", "")["status"] == "in_progress":
                await asyncio.sleep(0.01)
            ended = batches.batch("batch_1", "")
            assert (ended["status"], ended["request_counts"]) == ("completed", counts | {"completed": 2})
            assert {name for name, is_loop in opened if is_loop} <= {"batch.json", f"{ids[0]}.json"}
            num_opened = list[int]()
            for path, limit in (("/v1/files", num_files), ("/v1/files", 1), ("/v1/batches", 1)):
                opened.clear()
                page = (await client.get(path, params={"limit": limit})).raise_for_status().json()
                assert len(page["data"]) == limit
                assert page["has_more"] == (limit < num_files and path == "/v1/files")
                assert not any(is_loop for _, is_loop in opened)
                num_opened.append(len(opened))
            assert num_opened[1:] == [1, 1]

    try:
        asyncio.run(use())
    finally:
        is_over = True
