"""Contents of log lines, and a server that never waits for the log's reader."""

import asyncio
import hashlib
import io
import json
import os
import subprocess
import sys
from typing import Any, cast

import pytest

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.core.request_state import RequestRecord, Status
from patchedserve.serving.models.defaults import ModelDefaults
from patchedserve.serving.server.limits import Limits
from patchedserve.serving.server.protocol import ModelFacts, parse_generation
from patchedserve.serving.server.request_log import RequestLog
from patchedserve.serving.server.tickets import FinishedImage, Ticket, metrics_of

SIZE = Resolution(64, 64)
_LINES = """
import sys
from patchedserve.serving.server.log_stream import lossy_stderr

lost = []
with lossy_stderr(lambda: lost.append(1)):
    for number in range(int(sys.argv[1])):
        sys.stderr.write(f"{'x' * 9000} {number}\\n")
print(len(lost))
"""
_DIRECT = """
import contextlib, os, sys
from patchedserve.serving.core.processes import start_process
from patchedserve.serving.server.log_stream import lossy_stderr

with lossy_stderr(lambda: None):
    entry = "patchedserve.tests.serving.server.test_request_log:write_errors"
    process = start_process(entry, device="none", name="one")
    process.join()
    for _ in range(100):
        with contextlib.suppress(OSError):
            os.write(2, b"x" * 9000)
print(process.exitcode, flush=True)
with contextlib.suppress(OSError):
    sys.stderr.write("the end\\n")
"""


def write_errors() -> int:
    for _ in range(100):
        sys.stderr.write("x" * 9000 + "\n")
    return 7


def test_unreached_stages_have_no_time() -> None:
    def metrics_at(**times: float) -> dict[str, float | None]:
        record = RequestRecord.of(Request(1, "a cat", Resolution(64, 64), arrival_s=10.0))
        for name, at_s in times.items():
            setattr(record, name, at_s)
        record.close("cancelled", 20.0, "its client has left")
        found = metrics_of([record])
        return {name: found[name] for name in ("queue_s", "prepare_s", "denoise_s", "decode_s", "latency_s")}

    nothing = dict.fromkeys(("queue_s", "prepare_s", "denoise_s", "decode_s", "latency_s"))
    assert metrics_at() == nothing
    assert metrics_at(prepare_start_s=11.0) == nothing
    prepared = {"prepare_start_s": 11.0, "prepare_end_s": 12.5}
    assert metrics_at(**prepared) == nothing | {"prepare_s": 1.5}
    assert metrics_at(**prepared, admitted_s=14.0) == nothing | {"prepare_s": 1.5, "queue_s": 2.5}
    assert metrics_at(**prepared, admitted_s=14.0, denoise_end_s=19.0) == {
        "queue_s": 2.5,
        "prepare_s": 1.5,
        "denoise_s": 5.0,
        "decode_s": 1.0,
        "latency_s": None,
    }


def test_log_lines_do_not_disclose_image_paths(capsys: pytest.CaptureFixture[str]) -> None:
    """The id of a ticket is enough to fetch its images without a key, so the log holds a hash of it."""

    async def end(record_status: Status) -> Ticket:
        facts = ModelFacts("tiny", ModelDefaults(6, 3.0, SIZE, (SIZE,)))
        wanted = parse_generation({"prompt": "a cat", "n": 2}, facts, Limits())
        ticket = Ticket(wanted, None, lambda *_: None, cast(Any, None), RequestLog().on_over, request_id="mine")
        ticket.numbers = [1, 2]
        record = RequestRecord.of(Request(1, "a cat", SIZE))
        record.close(record_status, 1.0, "for a reason")
        ticket.drawn[1] = FinishedImage(b"an image", record)
        ticket.on_end(record, None)
        ticket.fail(None, 1)
        await ticket.over.wait()
        return ticket

    for status in ("failed", "cancelled", "discarded"):
        ticket = asyncio.run(end(status))
        line = json.loads(capsys.readouterr().err)
        assert (line["request_id"], line["event"]) == ("mine", "failed")
        assert line["id"] == hashlib.sha256(ticket.id.encode()).hexdigest()[:12]
        assert ticket.id not in json.dumps(line)


def test_log_lines_are_complete_and_in_order() -> None:
    done = subprocess.run([sys.executable, "-c", _LINES, "100"], capture_output=True, text=True, timeout=60)
    assert done.stdout == "0\n", "lines were lost"
    assert done.stderr.splitlines() == [f"{'x' * 9000} {number}" for number in range(100)]


@pytest.mark.parametrize("reader", ["gone", "asleep", "none"])
def test_slow_log_reader_blocks_no_request(reader: str) -> None:
    ours, theirs = os.pipe()
    if reader == "gone":
        os.close(ours)
    command = [sys.executable, "-c", _LINES, "3000"]
    if reader == "none":
        command = ["sh", "-c", '"$@" 2>&-', "sh", *command]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=60)
    finally:
        os.close(theirs)
        if reader != "gone":
            os.close(ours)
    assert done.returncode == 0
    # Of 3000 lines, a pipe takes 7 and 1000 are queued.
    least, most = {"gone": (3000, 3000), "asleep": (1900, 2000), "none": (0, 2000)}[reader]
    assert least <= int(done.stdout) <= most


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("reader", ["gone", "asleep", "there"])
def test_slow_log_reader_blocks_no_direct_write(reader: str) -> None:
    """Libraries and child processes write to the file descriptor itself."""
    ours, theirs = os.pipe()
    if reader == "gone":
        os.close(ours)
    with subprocess.Popen([sys.executable, "-c", _DIRECT], stdout=subprocess.PIPE, stderr=theirs, text=True) as process:
        os.close(theirs)
        try:
            if reader == "there":
                with os.fdopen(ours) as lines:
                    assert lines.read().endswith("the end\n")
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
            if reader == "asleep":
                os.close(ours)
    assert (process.returncode, out) == (0, "7\n")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_log_lines_are_json_in_every_encoding(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = io.BytesIO()
    stderr = io.TextIOWrapper(content, encoding, errors="backslashreplace", line_buffering=True)
    monkeypatch.setattr(sys, "stderr", stderr)
    RequestLog().on_answer("/café/猫", 404, "req-1")
    line = json.loads(content.getvalue().decode(encoding))
    assert (line["route"], line["status"]) == ("/café/猫", 404)
