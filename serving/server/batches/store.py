"""OpenAI's Files and Batches: kept in the workspace, run while nobody waits, resumed after a restart. No torch."""

import asyncio
import contextlib
import json
import secrets
import shutil
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

from ....data.checks import is_text
from ....data.errors import RunError, UsageError
from ....data.files import atomic_write, private_folder, put_aside, write_json
from ....data.records import json_type
from ..errors import ApiError, invalid
from ..front_end import FrontEnd
from ..protocol import GENERATIONS, shown
from .file import ERROR_FILE, OUTPUT_FILE, BatchOutput, FolderInUseError, num_lines, read_lines
from .run import BatchRun, Result, when_there_is_room

BatchStatus = Literal["validating", "in_progress", "completed", "failed", "cancelling", "cancelled"]
MAX_FILE_BYTES = 200_000_000
_ENDED = frozenset({"completed", "failed", "cancelled"})
_MOST_METADATA, _MOST_KEY, _MOST_VALUE = 16, 64, 512
_OWNER = "owner"
"""In the JSON of files and batches: whose they are. It is not told."""
_POLL_S = 0.02
_WINDOW_S = 24 * 3600
_NAME_LENGTH = 200


@dataclass(eq=False)
class Batches:
    """Files and batches of a folder, which only its owner can read. Who has another key than theirs finds none of them.

    Methods raise ApiError where there is no such file or batch.

    Attributes:
        folder: of `files/` and `batches/`.
        front_end: draws the lines.
        at_once: lines that are drawn together.
    """

    folder: Path
    front_end: FrontEnd
    at_once: int = 16
    _runs: dict[str, BatchRun] = field(default_factory=dict)
    _tasks: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)
    _full: dict[str, str] = field(default_factory=dict)
    _writing: threading.Lock = field(default_factory=threading.Lock)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        for folder in (self.folder, self.folder / "files", self.folder / "batches"):
            private_folder(folder)

    def start(self) -> None:
        """Go on with what an earlier process has left."""
        for batch in sorted(self._all(), key=_age):
            if batch["status"] not in _ENDED:
                self._begin(batch)

    async def stop(self) -> None:
        """Stop where it is; a later process goes on from there."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def add_file(self, name: str, content: IO[bytes], purpose: str, key: str) -> dict[str, Any]:
        """Keep a file; waits for the disk. Raises ApiError: its purpose is not `batch`."""
        if purpose != "batch":
            raise invalid(f"purpose is {shown(purpose)}, but it must be batch", "purpose")
        file_id = f"file-{secrets.token_hex(12)}"
        path = self._file(file_id)
        told = name[:_NAME_LENGTH].encode("utf-8", "backslashreplace").decode()
        about = {"filename": told, "created_at": int(time.time()), "purpose": purpose, _OWNER: key}
        # Before the file, which nobody owns without it.
        write_json(path.with_suffix(".json"), about, is_private=True)
        try:
            with atomic_write(path, is_private=True) as temporary, temporary.open("wb") as kept:
                shutil.copyfileobj(content, kept)
        except BaseException:
            path.with_suffix(".json").unlink()
            raise
        return self.file(file_id, key)

    def file(self, file_id: str, key: str) -> dict[str, Any]:
        """What a client is told of a file."""
        path = self.content(file_id, key)
        known = {"filename": path.name, "purpose": "batch_output"} | _about(path)
        return {
            "id": file_id,
            "object": "file",
            "bytes": path.stat().st_size,
            "created_at": known.get("created_at", int(path.stat().st_mtime)),
            "filename": known["filename"],
            "purpose": known["purpose"],
            "status": "processed",
        }

    def files(self, key: str) -> list[dict[str, Any]]:
        """All files that a client has sent, the newest first."""
        found = []
        for path in (self.folder / "files").glob("file-*.jsonl"):
            with contextlib.suppress(ApiError):
                found.append(self.file(path.stem, key))
        return sorted(found, key=_age, reverse=True)

    def delete_file(self, file_id: str, key: str) -> dict[str, Any]:
        """Forget a file that a client has sent."""
        path = self.content(file_id, key)
        if path != self._file(file_id):
            raise invalid("this file is the output of a batch and stays with it", "file_id")
        path.unlink()
        path.with_suffix(".json").unlink(missing_ok=True)
        return {"id": file_id, "object": "file", "deleted": True}

    def create(self, body: Mapping[str, Any], key: str) -> dict[str, Any]:
        """Begin a batch. Raises ApiError: a field is not allowed, or there is no such file."""
        known = {"input_file_id", "endpoint", "completion_window", "metadata"}
        for name in body.keys() - known:
            raise invalid(f"the field {shown(name)} is unknown", name[:60], code="unknown_parameter")
        if body.get("endpoint") != GENERATIONS:
            raise invalid(f"endpoint must be {GENERATIONS}", "endpoint")
        if body.get("completion_window", "24h") != "24h":
            raise invalid("completion_window must be 24h", "completion_window")
        metadata = body.get("metadata")
        if metadata is not None and not _is_metadata(metadata):
            raise invalid(
                f"metadata must be an object of at most {_MOST_METADATA} names of at most {_MOST_KEY} characters, with "
                f"text of at most {_MOST_VALUE}",
                "metadata",
            )
        file_id = body.get("input_file_id")
        if not isinstance(file_id, str):
            raise invalid("input_file_id is missing", "input_file_id", code="missing_required_parameter")
        self.content(file_id, key)
        now = int(time.time())
        batch = {
            "id": f"batch_{secrets.token_hex(12)}",
            "object": "batch",
            "endpoint": GENERATIONS,
            "errors": None,
            "input_file_id": file_id,
            "completion_window": "24h",
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "expires_at": now + _WINDOW_S,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": metadata,
            _OWNER: key,
        }
        private_folder(self._folder_of(batch["id"]))
        self._write(batch)
        self._begin(batch)
        return self._told(batch)

    def batch(self, batch_id: str, key: str) -> dict[str, Any]:
        """What a client is told of a batch."""
        return self._told(self._of(batch_id, key))

    def batches(self, key: str) -> list[dict[str, Any]]:
        """All of a client, the newest first."""
        return [
            self._told(batch) for batch in sorted(self._all(), key=_age, reverse=True) if batch.get(_OWNER, "") == key
        ]

    def _all(self) -> list[dict[str, Any]]:
        found = [_batch_in(path.parent) for path in self.folder.glob("batches/*/batch.json")]
        return [batch for batch in found if batch is not None]

    def cancel(self, batch_id: str, key: str) -> dict[str, Any]:
        """End a batch: what it has drawn stays."""
        with self._writing:
            batch, run, now = self._of(batch_id, key), self._runs.get(batch_id), int(time.time())
            if batch["status"] not in _ENDED:
                batch |= {"status": "cancelling", "cancelling_at": now}
                if run is not None:
                    run.cancel()
                elif (waiting := self._tasks.get(batch_id)) is not None:
                    # Its turn has not come.
                    waiting.cancel()
                    batch |= {"status": "cancelled", "cancelled_at": now}
                self._write(batch)
        return self._told(batch)

    def _of(self, batch_id: str, key: str) -> dict[str, Any]:
        batch = _batch_in(self._folder_of(batch_id))
        if batch is None or batch.get(_OWNER, "") != key:
            raise _no_batch()
        return batch

    def _told(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        told = {name: value for name, value in batch.items() if name != _OWNER}
        if (run := self._runs.get(batch["id"])) is not None:
            told["request_counts"] = run.counts
        if (reason := self._full.get(batch["id"])) is not None:
            told["errors"] = _errors("disk_full", reason)
        return told

    def _begin(self, batch: dict[str, Any]) -> None:
        task = asyncio.get_running_loop().create_task(self._work(batch))
        self._tasks[batch["id"]] = task

        def forget(done: "asyncio.Task[None]") -> None:
            for known in (self._tasks, self._full):
                known.pop(batch["id"], None)

        task.add_done_callback(forget)

    async def _work(self, batch: dict[str, Any]) -> None:
        # One batch at a time, in the order in which they came.
        async with self._turn:
            try:
                output = await self._written(batch, partial(BatchOutput, self._folder_of(batch["id"]), is_private=True))
            except FolderInUseError:
                return  # another server of this workspace draws it
            except (RunError, OSError) as error:
                await self._fail(batch, error)
                return
            try:
                await self._draw(batch, output)
            except Exception as error:  # noqa: BLE001  such as a disk that is broken; the others have their turn
                traceback.print_exc()
                await self._fail(batch, error)
            finally:
                self._runs.pop(batch["id"], None)
                output.close()

    async def _draw(self, batch: dict[str, Any], output: BatchOutput) -> None:
        try:
            path = self.content(batch["input_file_id"], batch.get(_OWNER, ""))
            lines = await asyncio.get_running_loop().run_in_executor(None, read_lines, path)
        except (UsageError, ApiError) as error:
            await self._fail(batch, error)
            return
        run = self._runs[batch["id"]] = BatchRun(
            self.front_end,
            lines,
            output,
            self.at_once,
            self._nobody_waits,
            writes_b64=True,
            on_full=partial(self._on_full, batch["id"]),
        )
        batch |= {"in_progress_at": int(time.time()), "request_counts": run.counts}
        if batch["status"] == "cancelling":
            run.cancel()
        else:
            await self._written(batch, partial(self._write, batch | {"status": "in_progress"}))
        await run.run()
        ended = "cancelled" if run.is_cancelled else "completed"
        await self._end(batch | {"status": ended, f"{ended}_at": int(time.time())})

    async def _fail(self, batch: Mapping[str, Any], error: Exception) -> None:
        failed = {"status": "failed", "failed_at": int(time.time()), "errors": _errors("invalid_batch", str(error))}
        with contextlib.suppress(OSError):
            await self._end({**batch, **failed})

    async def _end(self, batch: Mapping[str, Any]) -> None:
        """Write how a batch has ended, with what there is of it, however that was."""
        await self._written(batch, partial(self._write_end, batch, self._runs.get(batch["id"])))

    def _write_end(self, batch: Mapping[str, Any], run: BatchRun | None) -> None:
        files = self._files_of(batch["id"])
        if run is None:
            counts = {"completed": num_lines(files["output"]), "failed": num_lines(files["errors"])}
        else:
            counts = run.counts
        found = {"request_counts": batch["request_counts"] | counts}
        for name, field_name in (("output", "output_file_id"), ("errors", "error_file_id")):
            if files[name].exists() and files[name].stat().st_size:
                found[field_name] = f"{batch['id'].replace('batch_', 'file-')}-{name}"
        with self._writing:
            self._write({**batch, **found})

    async def _written(self, batch: Mapping[str, Any], write: Callable[[], Result]) -> Result:
        return await when_there_is_room(write, partial(self._on_full, batch["id"]))

    def _on_full(self, batch_id: str, error: OSError | None) -> bool:
        if error is None:
            self._full.pop(batch_id, None)
        elif batch_id not in self._full:
            self._full[batch_id] = f"the disk is full ({error}): the batch goes on when there is room"
            warnings.warn(f"{batch_id}: {self._full[batch_id]}", stacklevel=2)
        return True

    async def _nobody_waits(self) -> None:
        """Wait until no interactive request does."""
        while not self.front_end.is_ready or self.front_end.backend.load.num_waiting:
            await asyncio.sleep(_POLL_S)

    def _write(self, batch: Mapping[str, Any]) -> None:
        write_json(self._folder_of(batch["id"]) / "batch.json", dict(batch), is_private=True)

    def _folder_of(self, batch_id: str) -> Path:
        return self.folder / "batches" / _safe(batch_id, "batch_")

    def _files_of(self, batch_id: str) -> dict[str, Path]:
        """The files of what has become of its lines, by the name that their ids end in."""
        folder = self._folder_of(batch_id)
        return {"output": folder / OUTPUT_FILE, "errors": folder / ERROR_FILE}

    def _file(self, file_id: str) -> Path:
        return self.folder / "files" / f"{_safe(file_id, 'file-')}.jsonl"

    def content(self, file_id: str, key: str) -> Path:
        """The file of a client, or the output of a batch of its own."""
        batch, _, name = file_id.removeprefix("file-").partition("-")
        if name in ("output", "errors"):
            self._of(f"batch_{batch}", key)
            path = self._files_of(f"batch_{batch}")[name]
            owner = key
        else:
            path = self._file(file_id)
            owner = _about(path).get(_OWNER, "")
        if not path.is_file() or owner != key:
            raise ApiError(404, "there is no such file", code="not_found", param="file_id")
        return path


def _about(path: Path) -> dict[str, Any]:
    """What is kept of a client's file; nothing of an output."""
    return _read(path.with_suffix(".json"), {"filename": str, "created_at": int, "purpose": str}) or {}


def _batch_in(folder: Path) -> dict[str, Any] | None:
    kinds = {"status": str, "created_at": int, "input_file_id": str, "request_counts": dict}
    return _read(folder / "batch.json", {"id": str, **kinds})


def _read(path: Path, kinds: Mapping[str, type]) -> dict[str, Any] | None:
    """An object with these fields. None: there is none, or it is damaged, which is warned of. Raises OSError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds {json_type(content)}")
        for name, kind in kinds.items():
            if not isinstance(content.get(name), kind):
                raise ValueError(f"{name} is {shown(content.get(name))}")
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        put_aside(path, str(path), error)
        return None
    return content


def _errors(code: str, message: str) -> dict[str, Any]:
    return {"object": "list", "data": [{"code": code, "message": message, "param": None}]}


def _no_batch() -> ApiError:
    return ApiError(404, "there is no such batch", code="not_found", param="batch_id")


def _age(found: Mapping[str, Any]) -> tuple[int, str]:
    return found["created_at"], found["id"]


def _is_metadata(given: object) -> bool:
    """As OpenAI has it: a few names, each with some text."""
    if not isinstance(given, dict) or len(given) > _MOST_METADATA:
        return False
    lengths = {_MOST_KEY: given.keys(), _MOST_VALUE: given.values()}
    texts = [(text, most) for most, found in lengths.items() for text in found]
    return all(isinstance(text, str) and len(text) <= most and is_text(text) for text, most in texts)


def _safe(name: str, prefix: str) -> str:
    """An id as the name of a file. Raises ApiError: it is not one of ours."""
    digits = name.removeprefix(prefix)
    if not name.startswith(prefix) or not 0 < len(digits) <= 64 or not digits.isascii() or not digits.isalnum():
        raise ApiError(404, "there is no such id", code="not_found")
    return name
