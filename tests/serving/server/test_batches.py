"""Batch files: errors in their lines, and results that survive the end of the process."""

import asyncio
import errno
import io
import json
import os
import random
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Coroutine
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI

from patchedserve.data.errors import RunError, UsageError
from patchedserve.serving.models.defaults import ModelDefaults
from patchedserve.serving.server.batches import store
from patchedserve.serving.server.batches.api import batch_routes
from patchedserve.serving.server.batches.file import MAX_LINES, BatchOutput, FolderInUseError, read_lines
from patchedserve.serving.server.batches.folder import BatchFolder
from patchedserve.serving.server.batches.store import Batches
from patchedserve.serving.server.errors import ApiError, invalid
from patchedserve.serving.server.guards import Guards
from patchedserve.serving.server.keys import Keys
from patchedserve.serving.server.limits import KeyLimits, Limits
from patchedserve.serving.server.protocol import ModelFacts

from ...support.random_engine import MachineState
from ...support.server_process import SIZES, Process


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


def test_byte_order_mark_is_ignored(tmp_path: Path) -> None:
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
def test_invalid_lines_are_reported_with_line_number(tmp_path: Path, lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=r"batch\.jsonl") as caught:
        read_lines(written(tmp_path, *lines))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_lines_have_no_priority(tmp_path: Path) -> None:
    bodies = ({"prompt": "a cat", "priority": priority} for priority in (0, -1))
    first, second = read_lines(written(tmp_path, *(line(f"{number}", body=body) for number, body in enumerate(bodies))))
    facts = ModelFacts("tiny", ModelDefaults(4, 3.0, SIZES[0], SIZES))
    assert first.generation(facts, Limits()).priority == 0
    with pytest.raises(ApiError, match="priority is -1, but lines of a batch are drawn in order"):
        second.generation(facts, Limits())


def test_too_many_lines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="more than 50,000 lines"):
        read_lines(written(tmp_path, *(line(str(number)) for number in range(MAX_LINES + 1))))
    with pytest.raises(UsageError, match="cannot be read"):
        read_lines(tmp_path / "missing.jsonl")


def test_completed_lines_stay_completed(tmp_path: Path) -> None:
    lines = read_lines(written(tmp_path, line("a"), line("b"), line("c")))
    output = BatchOutput(tmp_path / "out")
    output.write_completed(lines[0], {"data": []}, "one")
    output.write_failed(lines[1], invalid("no", "prompt"), "two")
    # The process is killed while it writes a line.
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
    again.write_completed(lines[2], {"data": []}, "three")
    progress_of = [json.loads(each) for each in (tmp_path / "out" / "output.jsonl").read_text().splitlines()]
    assert [each["custom_id"] for each in progress_of] == ["a", "c"]
    errors = json.loads((tmp_path / "out" / "errors.jsonl").read_text())
    assert (errors["response"]["status_code"], errors["error"]["code"]) == (400, "invalid_value")
    again.close()
    # Damage elsewhere in the file is an error.
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
output.write_completed(lines[0], {}, "one")
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
for write in (output.write_completed, lambda line, body, name: output.write_failed(line, invalid(body["text"]), name)):
    try:
        write(lines[1], {"text": "x" * 100_000}, "two")
    except OSError as error:
        print(error.strerror, output.done)
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
output.write_completed(lines[1], {"text": "x" * 100_000}, "two")
output.write_failed(lines[2], invalid("no"), "three")
"""


def test_line_without_disk_space_is_not_written_partially(tmp_path: Path) -> None:
    """The process has a file size limit of 5,000 bytes for a while, so the system writes only part of a line."""
    batch = written(tmp_path, line("a"), line("b"), line("c"))
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(batch), str(tmp_path / "out")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "File too large {'a': True}\n" * 2
    for name, ids in (("output.jsonl", ["a", "b"]), ("errors.jsonl", ["c"])):
        lines = (tmp_path / "out" / name).read_text().splitlines()
        assert [json.loads(each)["custom_id"] for each in lines] == ids


def test_partial_line_of_any_length_is_truncated(tmp_path: Path) -> None:
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


def test_long_lines_are_read_in_bounded_memory(tmp_path: Path) -> None:
    """Lines may be whole, torn and followed by another, or have a head or an end that spans two chunks."""
    start, end = b'{"id": "batch_req_1", "custom_id": "', b'"}\n'
    head = start + b'a", "response": "'
    path = tmp_path / "output.jsonl"
    for length in (30_000_000, *range(65_536 - 60, 65_536 + 4)):
        filled = head + b"x" * (length - len(head))
        path.write_bytes(filled + end + start + b'\\u00e4", "response": {}}\n')
        tracemalloc.start()
        with closing(BatchOutput(tmp_path)) as output:
            peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert (output.done, output.counts) == ({"a": True, "ä": True}, (2, 0))
        assert peak < 5_000_000
        for damaged in (filled + head + end, filled + b"\n"):
            path.write_bytes(damaged)
            with pytest.raises(RunError, match="line 1: is damaged"):
                BatchOutput(tmp_path)


def opened_below(folder: Path, work: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Return the result of `work`, and the names of the files that it opened and the folders that it listed."""
    seen: list[str] = []
    is_over = False

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        # A hook cannot be removed.
        if not is_over and event in ("open", "os.scandir", "os.listdir") and str(arguments[0]).startswith(str(folder)):
            seen.append(Path(str(arguments[0])).name)

    sys.addaudithook(watch)
    try:
        return work(), seen
    finally:
        is_over = True


def test_page_cost_depends_only_on_its_size(tmp_path: Path) -> None:
    """A page reads only the entries that it shows, and shows what other servers of the workspace add and remove."""
    ours, theirs, third = (Batches(tmp_path, cast(Any, None)) for _ in range(3))

    def add(batches: Batches, key: str = "") -> str:
        return batches.files.add("batch.jsonl", io.BytesIO(b"x"), "batch", key)["id"]

    def listed(key: str = "", limit: int = 1000, after: str | None = None) -> tuple[list[str], bool]:
        found = ours.files.page(key, after, limit)
        assert found is not None
        return found

    ids = {add(each) for each in (theirs, third) * 10}
    others = add(theirs, "another")
    os.utime(tmp_path / "files", (1e9, 1e9))  # unchanged for a long time
    page, seen = opened_below(tmp_path, lambda: listed(limit=5))
    assert (len(page[0]), page[1], len(seen)) == (5, True, 22), "all of it is read once"
    found, after = list[str](), None
    while True:
        (page, has_more), seen = opened_below(tmp_path, partial(listed, limit=3, after=after))
        assert seen == []
        found += page
        if not has_more:
            break
        after = page[-1]
    assert found == listed()[0]
    assert set(found) == ids
    assert listed("another") == ([others], False)
    assert ours.files.page("", others, 1) is None, "it is not of this key"
    removed = found.pop(7)
    theirs.files.delete(removed, "")
    assert listed()[0] == found
    assert ours.files.page("", removed, 1) is None
    new = add(theirs)
    assert set(listed()[0]) == {new, *found}
    assert ours.files.page("nobody", None, 1) == ([], False)


def test_incomplete_batch_is_listed_later(tmp_path: Path) -> None:
    ours, folder = Batches(tmp_path, cast(Any, None)), BatchFolder(tmp_path)
    folder.batch("batch_1").mkdir()
    os.utime(tmp_path / "batches", (1e9, 1e9))
    assert ours.batch_page("", None, 10) == ([], False)
    batch = {"id": "batch_1", "status": "completed", "created_at": 1, "input_file_id": "file-1", "request_counts": {}}
    folder.write_batch(batch)
    os.utime(tmp_path / "batches", (1e9, 1e9))
    assert ours.batch_page("", None, 10) == (["batch_1"], False)


def test_event_loop_reads_only_files_of_bounded_size(tmp_path: Path) -> None:
    """This holds for resuming a batch and for listing; a repeated listing reads only the entries of its page."""
    files, num_files = Batches(tmp_path, cast(Any, None)), 30
    content = written(tmp_path, line("a"), line("b")).read_bytes()
    ids = [files.files.add("batch.jsonl", io.BytesIO(content), "batch", "")["id"] for _ in range(num_files)]
    counts = {"total": 2, "completed": 0, "failed": 0}
    batch = {"id": "batch_1", "status": "in_progress", "created_at": 1, "input_file_id": ids[0]}
    BatchFolder(tmp_path).write_batch(batch | {"request_counts": counts})
    with closing(BatchOutput(tmp_path / "batches" / "batch_1")) as output:
        for each in read_lines(tmp_path / "batch.jsonl"):
            output.write_completed(each, {"data": []}, "one")
    opened: list[tuple[str, bool]] = []
    is_over = False

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        # A hook cannot be removed.
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


def process_over(folder: Path, work: Callable[[Process], Coroutine[Any, Any, None]], *, has_turns: bool = True) -> None:
    """Run `work` on a server with batches in a folder, then stop it; without `has_turns` no batch gets its turn."""

    async def whole() -> None:
        process = Process(MachineState(random.Random(0)), folder, "fcfs")
        if not has_turns:
            await process.batches._turns[""].acquire()
        await process.backend.start()
        await process.batches.start()
        await work(process)
        await process.front_end.drain(0)
        await process.batches.stop()

    asyncio.run(asyncio.wait_for(whole(), 60))


def create_batch(process: Process, *lines: str, key: str = "") -> str:
    """Create a batch of these lines and return its id."""
    file = process.batches.files.add("batch.jsonl", io.BytesIO("\n".join(lines).encode()), "batch", key)
    body = {"input_file_id": file["id"], "endpoint": "/v1/images/generations", "completion_window": "24h"}
    return process.batches.create(body, key)["id"]


def progress_of(process: Process, batch_id: str) -> tuple[str, int]:
    """Return the status of a batch and its number of completed lines."""
    batch = process.batches.batch(batch_id, "")
    return batch["status"], batch["request_counts"]["completed"]


async def wait_for_status(process: Process, batch_id: str, *wanted: str) -> dict[str, Any]:
    while (batch := process.batches.batch(batch_id, ""))["status"] not in wanted:
        await asyncio.sleep(0.01)
    return batch


def test_batch_interrupted_by_a_drain_resumes(tmp_path: Path) -> None:
    """The batch resumes in the next process, even if all of its lines had started."""
    known: list[str] = []

    async def begin(process: Process) -> None:
        process.batches.at_once = 2
        known.append(create_batch(process, line("a"), line("b")))
        while not process.front_end.open:
            await asyncio.sleep(0.01)

    async def go_on(process: Process) -> None:
        await wait_for_status(process, known[0], "completed", "failed")
        assert progress_of(process, known[0]) == ("completed", 2)

    process_over(tmp_path, begin)
    assert BatchFolder(tmp_path).read_batch(known[0])["status"] == "in_progress"  # type: ignore[index]
    process_over(tmp_path, go_on)


def test_batch_cancelled_before_its_turn_reports_completed_lines(tmp_path: Path) -> None:
    known: list[str] = []

    async def begin(process: Process) -> None:
        process.batches.at_once = 1
        known.append(create_batch(process, *(line(str(number)) for number in range(20))))
        while progress_of(process, known[0])[1] == 0:
            await asyncio.sleep(0.01)

    async def cancel(process: Process) -> None:
        assert process.batches.cancel(known[0], "")["status"] == "cancelling"
        batch = await wait_for_status(process, known[0], "cancelled")
        assert batch["output_file_id"] is not None
        content = process.batches.files.content(batch["output_file_id"], "").read_bytes()
        assert batch["request_counts"]["completed"] == content.count(b"\n") > 0

    process_over(tmp_path, begin)
    process_over(tmp_path, cancel, has_turns=False)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_lines_of_several_keys_share_places_by_weight(tmp_path: Path) -> None:
    weights = {"a": KeyLimits(weight=3.0), "b": KeyLimits()}

    async def use(process: Process) -> None:
        process.front_end.limits = replace(process.front_end.limits, keys=weights)
        drawn: list[str] = []
        process.ends.on_accepted = lambda ticket: drawn.append(ticket.key)  # type: ignore[method-assign]
        lines = [line(str(number)) for number in range(24)]
        for key in weights:
            create_batch(process, *lines, key=key)
        while len(drawn) < 20:
            await asyncio.sleep(0.01)
        assert abs(drawn[:20].count("a") - 15) <= 3

    process_over(tmp_path, use)


def test_unreadable_batch_hides_no_other(tmp_path: Path) -> None:
    known: list[str] = []

    async def begin(process: Process) -> None:
        for name in "ab":
            known.append(create_batch(process, line(name)))
            await wait_for_status(process, known[-1], "completed")

    async def go_on(process: Process) -> None:
        assert process.batches.batch_page("", None, 10) == ([known[1]], False)
        known.append(create_batch(process, line("c")))
        await wait_for_status(process, known[-1], "completed")

    process_over(tmp_path, begin)
    about = tmp_path / "batches" / known[0] / "batch.json"
    about.unlink()
    about.mkdir()
    with pytest.warns(UserWarning, match=f"{known[0]} cannot be read: "):
        process_over(tmp_path, go_on)


def test_expired_files_are_deleted_despite_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_SWEEP_S", 0.05)
    unlink, num_failed = os.unlink, 0

    def fails(path: Any, **options: Any) -> None:
        nonlocal num_failed
        if Path(path).name.startswith("file-") and num_failed < 3:
            num_failed += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(path, **options)

    async def use(process: Process) -> None:
        for name in "ab":
            process.batches.files.add(f"{name}.jsonl", io.BytesIO(b"{}"), "batch", "", lifetime_s=1)
        monkeypatch.setattr(os, "unlink", fails)
        while any((tmp_path / "files").iterdir()):
            await asyncio.sleep(0.01)
        assert num_failed == 3

    with pytest.warns(UserWarning, match="cannot be deleted: "):
        process_over(tmp_path, use)


def test_unsavable_batch_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = os.fsync

    def fsync(file: int) -> None:
        if Path(f"/proc/self/fd/{file}").resolve().name.startswith("batch_"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(file)

    async def create(process: Process) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(OSError, match="Input/output error"):
            create_batch(process, line())
        assert process.batches.batch_page("", None, 10) == ([], False)

    process_over(tmp_path, create)


def test_batch_end_is_written_once_the_disk_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_END_RETRY_S", 0.1)
    replace, num_failed = os.replace, 0

    async def create(process: Process) -> None:
        nonlocal num_failed
        batch_id = create_batch(process, line("a"))

        def fails(source: Any, target: Any) -> None:
            nonlocal num_failed
            if Path(target).name == "batch.json" and num_failed < 4:
                num_failed += 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            replace(source, target)

        monkeypatch.setattr(os, "replace", fails)
        batch = await wait_for_status(process, batch_id, "completed", "failed")
        assert (batch["status"], num_failed) == ("failed", 4)
        assert "Input/output error" in batch["errors"]["data"][0]["message"]

    process_over(tmp_path, create)
