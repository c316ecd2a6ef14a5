"""OpenAI's Files and Batches: kept in the workspace, run while nobody waits, resumed after a restart. No torch."""

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ....data.errors import RunError, UsageError
from ....data.files import atomic_write, write_json
from ..errors import ApiError, invalid
from ..front_end import FrontEnd
from .file import ERROR_FILE, OUTPUT_FILE, URL, BatchOutput, read_lines
from .run import BatchRun

BatchStatus = Literal["validating", "in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled"]
MAX_FILE_BYTES = 200_000_000
_ENDED = frozenset({"completed", "failed", "cancelled"})
_POLL_S = 0.02
_WINDOW_S = 24 * 3600
_NAME_LENGTH = 200


@dataclass(eq=False)
class Batches:
    """Files and batches of a folder.

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
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def start(self) -> None:
        """Go on with what an earlier process has left."""
        for path in sorted(self.folder.glob("batches/*/batch.json")):
            batch = _read(path)
            if batch["status"] not in _ENDED:
                self._begin(batch)

    async def stop(self) -> None:
        """Stop where it is; a later process goes on from there."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def add_file(self, name: str, content: bytes, purpose: str) -> dict[str, Any]:
        """Keep a file. Raises ApiError: its purpose is not `batch`."""
        if purpose != "batch":
            raise invalid(f"purpose is {purpose[:60]!r}, but it must be batch", "purpose")
        file_id = f"file-{secrets.token_hex(12)}"
        with atomic_write(self._file(file_id)) as temporary:
            temporary.write_bytes(content)
        about = {"filename": name[:_NAME_LENGTH], "created_at": int(time.time()), "purpose": purpose}
        write_json(self._file(file_id).with_suffix(".json"), about)
        return self.file(file_id)

    def file(self, file_id: str) -> dict[str, Any]:
        """What a client is told of a file. Raises ApiError: there is none."""
        path = self._content_of(file_id)
        about = path.with_suffix(".json")
        known = json.loads(about.read_text()) if about.is_file() else {"filename": path.name, "purpose": "batch_output"}
        return {
            "id": file_id,
            "object": "file",
            "bytes": path.stat().st_size,
            "created_at": known.get("created_at", int(path.stat().st_mtime)),
            "filename": known["filename"],
            "purpose": known["purpose"],
            "status": "processed",
        }

    def files(self) -> list[dict[str, Any]]:
        """All files that clients have sent, the newest first."""
        found = [self.file(path.stem) for path in (self.folder / "files").glob("file-*.jsonl")]
        return sorted(found, key=lambda each: each["created_at"], reverse=True)

    def content(self, file_id: str) -> bytes:
        """The content of a file. Raises ApiError: there is none."""
        return self._content_of(file_id).read_bytes()

    def delete_file(self, file_id: str) -> dict[str, Any]:
        """Forget a file that a client has sent. Raises ApiError: there is none."""
        path = self._content_of(file_id)
        if path != self._file(file_id):
            raise invalid("this file is the output of a batch and stays with it", "file_id")
        path.unlink()
        path.with_suffix(".json").unlink(missing_ok=True)
        return {"id": file_id, "object": "file", "deleted": True}

    def create(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a batch. Raises ApiError: a field is not allowed, or there is no such file."""
        known = {"input_file_id", "endpoint", "completion_window", "metadata"}
        for name in body.keys() - known:
            raise invalid(f"the field {name[:60]!r} is unknown", name[:60], code="unknown_parameter")
        if body.get("endpoint") != URL:
            raise invalid(f"endpoint must be {URL}", "endpoint")
        if body.get("completion_window", "24h") != "24h":
            raise invalid("completion_window must be 24h", "completion_window")
        metadata = body.get("metadata")
        if metadata is not None and (not isinstance(metadata, dict) or len(json.dumps(metadata)) > 10_000):
            raise invalid("metadata must be a small object", "metadata")
        file_id = body.get("input_file_id")
        if not isinstance(file_id, str):
            raise invalid("input_file_id is missing", "input_file_id", code="missing_required_parameter")
        self._content_of(file_id)
        now = int(time.time())
        batch = {
            "id": f"batch_{secrets.token_hex(12)}",
            "object": "batch",
            "endpoint": URL,
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
        }
        self._write(batch)
        self._begin(batch)
        return batch

    def batch(self, batch_id: str) -> dict[str, Any]:
        """What a client is told of a batch. Raises ApiError: there is none."""
        return _read(self._folder_of(batch_id) / "batch.json")

    def batches(self) -> list[dict[str, Any]]:
        """All of them, the newest first."""
        found = [_read(path) for path in self.folder.glob("batches/*/batch.json")]
        return sorted(found, key=lambda each: each["created_at"], reverse=True)

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """End a batch: what it has drawn stays. Raises ApiError: there is none."""
        batch = self.batch(batch_id)
        run = self._runs.get(batch_id)
        if batch["status"] not in _ENDED:
            batch |= {"status": "cancelling", "cancelling_at": int(time.time())}
            self._write(batch)
            if run is not None:
                run.cancel()
        return batch

    def _begin(self, batch: dict[str, Any]) -> None:
        task = asyncio.get_running_loop().create_task(self._work(batch))
        self._tasks[batch["id"]] = task
        task.add_done_callback(lambda done: self._tasks.pop(batch["id"], None))

    async def _work(self, batch: dict[str, Any]) -> None:
        # One batch at a time, in the order in which they came.
        async with self._turn:
            folder = self._folder_of(batch["id"])
            try:
                lines = read_lines(self._content_of(batch["input_file_id"]))
                output = BatchOutput(folder)
            except (UsageError, RunError, ApiError) as error:
                errors = {"object": "list", "data": [{"code": "invalid_batch", "message": str(error), "param": None}]}
                self._write(batch | {"status": "failed", "failed_at": int(time.time()), "errors": errors})
                return
            counts = {"total": len(lines), "completed": 0, "failed": 0}
            for is_good in output.done.values():
                counts["completed" if is_good else "failed"] += 1
            was = self.batch(batch["id"])["status"]
            batch |= {"request_counts": counts, "in_progress_at": int(time.time())}
            batch["status"] = "cancelling" if was == "cancelling" else "in_progress"

            def on_line(is_good: bool) -> None:
                counts["completed" if is_good else "failed"] += 1
                self._write(batch | {"status": self.batch(batch["id"])["status"]})

            run = self._runs[batch["id"]] = BatchRun(
                self.front_end, lines, output, self.at_once, self._nobody_waits, writes_b64=True, on_line=on_line
            )
            self._write(batch)
            if was == "cancelling":
                run.cancel()
            try:
                await run.run()
            finally:
                self._runs.pop(batch["id"], None)
            ended = "cancelled" if run.is_cancelled else "completed"
            batch |= {"status": ended, f"{ended}_at": int(time.time())}
            for name, file, key in (
                ("output", OUTPUT_FILE, "output_file_id"),
                ("errors", ERROR_FILE, "error_file_id"),
            ):
                if (folder / file).exists():
                    batch[key] = f"{batch['id'].replace('batch_', 'file-')}-{name}"
            self._write(batch)

    async def _nobody_waits(self) -> None:
        """Wait until no interactive request does."""
        while not self.front_end.is_ready or self.front_end.backend.load.num_waiting:
            await asyncio.sleep(_POLL_S)

    def _write(self, batch: Mapping[str, Any]) -> None:
        write_json(self._folder_of(batch["id"]) / "batch.json", dict(batch))

    def _folder_of(self, batch_id: str) -> Path:
        return self.folder / "batches" / _safe(batch_id, "batch_")

    def _file(self, file_id: str) -> Path:
        return self.folder / "files" / f"{_safe(file_id, 'file-')}.jsonl"

    def _content_of(self, file_id: str) -> Path:
        """The file of a client, or the output of a batch."""
        with contextlib.suppress(ValueError):
            batch, _, name = file_id.removeprefix("file-").partition("-")
            if name in ("output", "errors"):
                path = self._folder_of(f"batch_{batch}") / {"output": OUTPUT_FILE, "errors": ERROR_FILE}[name]
                if path.is_file():
                    return path
        path = self._file(file_id)
        if not path.is_file():
            raise ApiError(404, "there is no such file", code="not_found", param="file_id")
        return path


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ApiError(404, "there is no such batch", code="not_found", param="batch_id") from None


def _safe(name: str, prefix: str) -> str:
    """An id as the name of a file. Raises ApiError: it is not one of ours."""
    digits = name.removeprefix(prefix)
    if not name.startswith(prefix) or not 0 < len(digits) <= 64 or not digits.isascii() or not digits.isalnum():
        raise ApiError(404, "there is no such id", code="not_found")
    return name
