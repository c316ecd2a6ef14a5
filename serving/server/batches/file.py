"""Files of a batch: its requests, one JSON object a line, and an output line for each of them. No torch.

An image is renamed into place before its output line is written, and that line is on the disk before the next one
begins. Whatever kills the process, every complete line is true, and a later run continues after it.
"""

import contextlib
import json
import os
import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ....data.errors import RunError, UsageError
from ....data.files import atomic_write, private_folder, write_json
from ....data.records import read_json
from ..body import shown
from ..errors import ApiError, invalid
from ..json_body import parse_object
from ..limits import Limits
from ..protocol import GENERATIONS, Generation, ModelFacts, parse_generation

MAX_LINES = 50_000
OUTPUT_FILE, ERROR_FILE = "output.jsonl", "errors.jsonl"
_LOCK_FILE, _ABOUT_FILE = ".lock", "about.json"
_MAX_ID = 64
_CHUNK = 65536
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_START = b'{"id": "batch_req_'
_HEAD = re.compile(re.escape(_START) + rb'\d+", "custom_id": ("(?:[^"\\]|\\.)*"), ')
"""Head of an output line, which identifies its request without reading the images."""
_FIELDS = {"custom_id", "method", "url", "body"}


class FolderInUseError(RunError):
    """Another process has the folder of a batch open."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch.

    Attributes:
        number: number of the line, from 1.
        custom_id: the client's id for it.
        body: body of the request, for `parse_generation`.
    """

    number: int
    custom_id: str
    body: Mapping[str, Any]

    def generation(self, model: ModelFacts, limits: Limits) -> Generation:
        """Return the checked request. Raises ApiError."""
        generation = parse_generation(self.body, model, limits)
        if generation.stream:
            raise invalid("stream is true, but lines of a batch are not streamed", "stream")
        if generation.priority:
            raise invalid(f"priority is {generation.priority}, but lines of a batch are drawn in order", "priority")
        return generation

    def image_name(self, index: int, suffix: str) -> str:
        """Return the file name of an image; no two lines share one."""
        return f"{self.number:05}-{_UNSAFE.sub('_', self.custom_id)[:_MAX_ID]}-{index}.{suffix}"


def read_lines(path: Path) -> list[BatchLine]:
    """Read the requests of a batch.

    Raises:
        UsageError: the file cannot be read, is empty or has too many lines, or a line is no request or repeats the id
            of another one; the message names the line.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error
    found: list[BatchLine] = []
    known: dict[str, int] = {}
    for number, raw in enumerate(content.split(b"\n"), 1):
        raw = raw.removeprefix(BOM_UTF8)  # joined files have one in the middle
        if not raw.strip():
            continue
        if len(found) == MAX_LINES:
            raise UsageError(f"{path.name} has more than {MAX_LINES:,} lines")
        try:
            line = _line(number, parse_object(raw))
        except ApiError as error:
            raise UsageError(f"{path.name}, line {number}: {error.message}") from None
        if line.custom_id in known:
            raise UsageError(
                f"{path.name}, line {number}: custom_id {shown(line.custom_id)} is that of line {known[line.custom_id]}"
            )
        known[line.custom_id] = number
        found.append(line)
    if not found:
        raise UsageError(f"{path.name} holds no request")
    return found


def _line(number: int, content: Mapping[str, Any]) -> BatchLine:
    for name in content.keys() - _FIELDS:
        raise invalid(f"the field {shown(name)} is unknown", name)
    custom_id, body = content.get("custom_id"), content.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= 512 or not custom_id.isprintable():
        raise invalid(f"custom_id is {shown(custom_id)}, but it must be text of 1 to 512 characters", "custom_id")
    if content.get("method", "POST") != "POST":
        raise invalid(f"method is {shown(content['method'])}, but it must be POST", "method")
    if content.get("url", GENERATIONS) != GENERATIONS:
        raise invalid(f"url is {shown(content['url'])}, but it must be {GENERATIONS}", "url")
    if not isinstance(body, dict):
        raise invalid(f"body is {shown(body)}, but it must be an object", "body")
    return BatchLine(number, custom_id, body)


class BatchOutput:
    """Outputs of a batch in a folder: `output.jsonl`, and `errors.jsonl` for lines that failed.

    Only one process can have the folder open. It is free again when that process closes it, or ends in any way.

    Args:
        folder: the folder, which is created.
        is_private: whether only the user of this process can read what is written.

    Attributes:
        folder: folder of both files and of `images/`.
        done: whether a line was completed (True) or has failed, by id; only lines that have an answer.
        counts: number of completed lines, and of failed ones.

    Raises:
        FolderInUseError: another process has it open.
        RunError: a file is damaged before its last line; an incomplete last line is cut off.
    """

    def __init__(self, folder: Path, *, is_private: bool = False) -> None:
        self.folder, self.done, self.counts = folder, dict[str, bool](), (0, 0)
        self._is_private, self._mode = is_private, 0o600 if is_private else 0o666
        (folder / "images").mkdir(parents=True, exist_ok=True)
        if is_private:
            private_folder(folder / "images")
        # Any thread may close it.
        self._lock = FileLock(folder / _LOCK_FILE, mode=0o600, thread_local=False)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise FolderInUseError(f"{folder}: another process draws into it") from None
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        folder = self.folder
        for left in folder.glob("images/.*.tmp.*"):
            # Temporary file of an image that was being written when the process was killed.
            left.unlink(missing_ok=True)
        for name, is_good in ((OUTPUT_FILE, True), (ERROR_FILE, False)):
            path = folder / name
            _truncate_incomplete_line(path)
            for number, custom_id in enumerate(_ids_of(path), 1):
                if custom_id is None:
                    raise RunError(f"{path}, line {number}: is damaged")
                self._count(custom_id, is_good)

    def _count(self, custom_id: str, is_good: bool) -> None:
        before = self.done.get(custom_id)
        completed, failed = self.counts
        # In one assignment, as any thread may read it.
        self.counts = completed + is_good - (before is True), failed + (not is_good) - (before is False)
        self.done[custom_id] = is_good

    def keep_to(self, about: Mapping[str, str]) -> None:
        """Store properties of the batch, such as its file and model. Raises UsageError if the stored ones differ."""
        path = self.folder / _ABOUT_FILE
        kept = read_json(path, "a batch") if path.exists() else {**about}
        for name, value in about.items():
            if kept.get(name) != value:
                raise UsageError(
                    f"{self.folder} holds what was drawn of another {name}; choose another folder, or empty this one"
                )
        write_json(path, kept)

    def close(self) -> None:
        """Release the folder. A second call has no effect."""
        self._lock.release()

    def write_image(self, name: str, content: bytes) -> None:
        """Write the file of an image atomically. Raises OSError."""
        with atomic_write(self.folder / "images" / name, is_private=self._is_private) as temporary:
            temporary.write_bytes(content)

    def write_completed(self, line: BatchLine, body: Mapping[str, Any], request_id: str) -> None:
        """Write the output of a line whose images were written before."""
        response = {"status_code": 200, "request_id": request_id, "body": body}
        self._append(OUTPUT_FILE, line, response, None)
        self._count(line.custom_id, True)

    def write_failed(self, line: BatchLine, error: ApiError, request_id: str) -> None:
        """Write the error of a line that has no images."""
        response = {"status_code": error.status, "request_id": request_id, "body": error.to_json()}
        self._append(ERROR_FILE, line, response, {"code": error.code, "message": error.message})
        self._count(line.custom_id, False)

    def _append(self, name: str, line: BatchLine, response: Mapping[str, Any], error: Mapping[str, str] | None) -> None:
        content = {"id": f"batch_req_{line.number}", "custom_id": line.custom_id, "response": response, "error": error}
        left = memoryview(json.dumps(content).encode() + b"\n")
        _truncate_incomplete_line(self.folder / name)
        # Unbuffered: after a failure, a buffer would still be written on close, after the truncation.
        with open(self.folder / name, "ab", buffering=0, opener=partial(os.open, mode=self._mode)) as file:
            whole = file.tell()
            try:
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except BaseException:
                with contextlib.suppress(OSError):  # the next call cuts it off
                    file.truncate(whole)
                raise


def _truncate_incomplete_line(path: Path) -> None:
    """Cut off an incomplete last line, written when the process was killed or the disk was full."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _CHUNK)
            file.seek(start)
            last = file.read(end - start).rfind(b"\n")
            if last >= 0:
                end = start + last + 1
                break
            end = start
        if end < size:
            file.truncate(end)


def num_lines(path: Path) -> int:
    """Return the number of complete lines of a file; 0 if there is no file. Raises OSError if it cannot be read."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_CHUNK), b""))


def _ids_of(path: Path) -> Iterator[str | None]:
    """Yield the custom id of each line of an output; None for a damaged line. Lines may hold images of any size, so
    they are read in pieces.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        while piece := file.readline(_CHUNK):
            head = _HEAD.match(piece)
            is_whole = head is not None and piece.find(_START, head.end()) < 0
            while not piece.endswith(b"\n") and (more := file.readline(_CHUNK)):
                # Another head may lie across two pieces.
                piece = piece[-len(_START) :] + more
                is_whole = is_whole and _START not in piece
            yield json.loads(head[1]) if head is not None and is_whole and piece.endswith(b"}\n") else None
