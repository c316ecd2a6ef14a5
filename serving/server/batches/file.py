"""A batch: a file of requests, one JSON object a line, and what has become of each of them. No torch.

An image is renamed into its place before the output line that tells of it is written, and that line is on the disk
before the next one begins: whatever kills the process, a line that is there is true, and a later run goes on after it.
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
from ..errors import ApiError, invalid
from ..fields import shown
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
"""The head of an output line: its images need not be read to know what it is about."""
_FIELDS = {"custom_id", "method", "url", "body"}


class FolderInUseError(RunError):
    """Another process has the folder of a batch open."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch.

    Attributes:
        number: of the line, from 1.
        custom_id: the client's name for it.
        body: as `parse_generation` takes it.
    """

    number: int
    custom_id: str
    body: Mapping[str, Any]

    def generation(self, model: ModelFacts, limits: Limits) -> Generation:
        """What it asks for. Raises ApiError."""
        wanted = parse_generation(self.body, model, limits)
        if wanted.stream:
            raise invalid("stream is true, but lines of a batch are not streamed", "stream")
        return wanted

    def image_name(self, index: int, suffix: str) -> str:
        """The name of the file of an image; no two lines share one."""
        return f"{self.number:05}-{_UNSAFE.sub('_', self.custom_id)[:_MAX_ID]}-{index}.{suffix}"


def read_lines(path: Path) -> list[BatchLine]:
    """Read a batch.

    Raises:
        UsageError: it cannot be read, is empty, has too many lines, or a line is no request or has the id of another
            one; the line is named.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error
    found: list[BatchLine] = []
    known: dict[str, int] = {}
    for number, raw in enumerate(content.split(b"\n"), 1):
        raw = raw.removeprefix(BOM_UTF8)  # files that were joined have one in the middle
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
    """What has become of the lines of a batch, in a folder: `output.jsonl`, and `errors.jsonl` for those that failed.

    Only one process has it open; it is free again when that one closes it, or ends in whatever way.

    Args:
        folder: see below.
        is_private: whether what is written is its owner's alone.

    Attributes:
        folder: of both, and of `images/`.
        done: ids of the lines that have an answer, by whether it is an image.
        counts: how many of these have an image, and how many an error.

    Raises:
        FolderInUseError: another process has it open.
        RunError: a file is damaged in its middle; a last line that is only half there is cut off.
    """

    def __init__(self, folder: Path, *, is_private: bool = False) -> None:
        self.folder, self.done, self.counts = folder, dict[str, bool](), (0, 0)
        self._is_private, self._mode = is_private, 0o600 if is_private else 0o666
        (folder / "images").mkdir(parents=True, exist_ok=True)
        if is_private:
            private_folder(folder / "images")
        # Of whichever thread closes it.
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
            # Of an image that was being written when the process was killed.
            left.unlink(missing_ok=True)
        for name, is_good in ((OUTPUT_FILE, True), (ERROR_FILE, False)):
            path = folder / name
            _cut_half_line(path)
            for number, custom_id in enumerate(_ids_of(path), 1):
                if custom_id is None:
                    raise RunError(f"{path}, line {number}: is damaged")
                self._note(custom_id, is_good)

    def _note(self, custom_id: str, is_good: bool) -> None:
        before = self.done.get(custom_id)
        completed, failed = self.counts
        # In one piece, as any thread may read it.
        self.counts = completed + is_good - (before is True), failed + (not is_good) - (before is False)
        self.done[custom_id] = is_good

    def keep_to(self, about: Mapping[str, str]) -> None:
        """Remember what is drawn here, by name: its file, its model. Raises UsageError: it was another before."""
        path = self.folder / _ABOUT_FILE
        kept = read_json(path, "a batch") if path.exists() else {**about}
        for name, value in about.items():
            if kept.get(name) != value:
                raise UsageError(
                    f"{self.folder} holds what was drawn of another {name}; choose another folder, or empty this one"
                )
        write_json(path, kept)

    def close(self) -> None:
        """Let others have it. Again does nothing."""
        self._lock.release()

    def write_image(self, name: str, content: bytes) -> None:
        """Put the file of an image into its place. Raises OSError."""
        with atomic_write(self.folder / "images" / name, is_private=self._is_private) as temporary:
            temporary.write_bytes(content)

    def completed(self, line: BatchLine, body: Mapping[str, Any], request_id: str) -> None:
        """A line has its images, which are in their places already."""
        response = {"status_code": 200, "request_id": request_id, "body": body}
        self._append(OUTPUT_FILE, line, response, None)
        self._note(line.custom_id, True)

    def failed(self, line: BatchLine, error: ApiError, request_id: str) -> None:
        """A line has no images."""
        response = {"status_code": error.status, "request_id": request_id, "body": error.to_json()}
        self._append(ERROR_FILE, line, response, {"code": error.code, "message": error.message})
        self._note(line.custom_id, False)

    def _append(self, name: str, line: BatchLine, response: Mapping[str, Any], error: Mapping[str, str] | None) -> None:
        content = {"id": f"batch_req_{line.number}", "custom_id": line.custom_id, "response": response, "error": error}
        left = memoryview(json.dumps(content).encode() + b"\n")
        _cut_half_line(self.folder / name)
        # Without a buffer, which would be written at the end all the same, behind what was cut off.
        with open(self.folder / name, "ab", buffering=0, opener=partial(os.open, mode=self._mode)) as file:
            whole = file.tell()
            try:
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except BaseException:
                with contextlib.suppress(OSError):  # the next one cuts it off
                    file.truncate(whole)
                raise


def _cut_half_line(path: Path) -> None:
    """Cut off what was being written when the process was killed or the disk was full."""
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
    """Lines of a file that are whole; 0 if it is not there. Raises OSError: it cannot be read."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_CHUNK), b""))


def _ids_of(path: Path) -> Iterator[str | None]:
    """The custom id of each line of an output; None: the line is damaged. Lines may hold images of any size, and are
    read in pieces.
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
