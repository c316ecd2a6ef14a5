"""OpenAI's Files and Batches: kept in the workspace, run while nobody waits, resumed after a restart. No torch."""

import asyncio
import math
import os
import secrets
import shutil
import threading
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

from fastapi.concurrency import run_in_threadpool

from ....data.checks import is_text
from ....data.errors import RunError, UsageError
from ....data.files import atomic_write
from ..errors import ApiError, invalid, overloaded
from ..fields import shown
from ..front_end import FrontEnd
from ..keys import Keys
from ..openapi import MOST_FILE_S
from ..protocol import GENERATIONS
from .file import BatchOutput, FolderInUseError, num_lines, read_lines
from .folder import OWNER, BatchFolder
from .places import FairPlaces
from .quota import DiskUse, too_much
from .run import BatchRun, Result, when_there_is_room

BatchStatus = Literal["validating", "in_progress", "completed", "failed", "cancelling", "cancelled", "expired"]
MAX_FILE_BYTES = 200_000_000
_ENDED = frozenset({"completed", "failed", "cancelled", "expired"})
_MOST_METADATA, _MOST_KEY, _MOST_VALUE = 16, 64, 512
_EXPIRES, _SWEEP_S = "expires_at", 600.0
_OUTPUT = "batch_output"
"""The purpose of a file that a client has not sent."""
_POLL_S, _LOOK_AGAIN_S, _END_RETRY_S = 0.02, 2.0, 10.0
_LATER_S = 60.0
"""After which a key that has too many batches may ask again."""
_WINDOW_S = 24 * 3600
_NAME_LENGTH = 200


@dataclass(eq=False)
class Batches:
    """Files and batches of a folder, which only its owner can read. Who has another key than theirs finds none of them.

    Methods raise ApiError where there is no such file or batch.

    Attributes:
        folder: of `files/` and `batches/`.
        front_end: draws the lines.
        at_once: lines that are drawn together, of all batches.
        keys: whose owners have them, and what each of these may have.
    """

    folder: Path
    front_end: FrontEnd
    at_once: int = 16
    keys: Keys = field(default_factory=Keys)
    _runs: dict[str, BatchRun] = field(default_factory=dict)
    _tasks: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)
    _owners: dict[str, str] = field(default_factory=dict)
    _full: dict[str, tuple[str, str]] = field(default_factory=dict)
    _writing: threading.Lock = field(default_factory=threading.Lock)
    _expires: dict[str, float] = field(default_factory=dict)
    _sweeping: "asyncio.Task[None] | None" = None
    _turns: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))

    def __post_init__(self) -> None:
        self._disk = BatchFolder(self.folder, self.keys.renamed)
        self._use = DiskUse(self._disk)
        self._places = FairPlaces(self.at_once)

    async def start(self) -> None:
        """Go on with what an earlier process has left."""
        for batch in await run_in_threadpool(self._look_around):
            if batch["id"] not in self._tasks:
                self._begin(batch)
        self._sweeping = asyncio.get_running_loop().create_task(self._sweep())

    def _look_around(self) -> list[dict[str, Any]]:
        """Learn when files expire, and which batches have not ended. Each that it reads has the name of its owner."""
        for file_id in self._disk.files_of():
            if (about := self._disk.read_file(file_id)) is not None:
                self._expires[file_id] = _expires_at(about)
        self._remove_expired()
        return self._unfinished()

    def _unfinished(self) -> list[dict[str, Any]]:
        found = [self._disk.read_batch(each) for each in self._disk.batches_of()]
        return [batch for batch in found if batch is not None and batch["status"] not in _ENDED]

    async def stop(self) -> None:
        """Stop where it is; a later process goes on from there."""
        tasks = [*self._tasks.values(), *([] if self._sweeping is None else [self._sweeping])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            await run_in_threadpool(self._remove_expired)

    def _remove_expired(self) -> None:
        """Delete files that have expired, but for those that a batch is drawn from."""
        now_s = time.time()
        if expired := [file_id for file_id, at_s in list(self._expires.items()) if at_s <= now_s]:
            in_use = {batch["input_file_id"] for batch in self._unfinished()}
            for file_id in expired:
                if file_id not in in_use:
                    self._disk.remove_file(file_id)
                    self._expires.pop(file_id, None)

    def add_file(
        self, name: str, content: IO[bytes], purpose: str, key: str, lasts_s: int = MOST_FILE_S
    ) -> dict[str, Any]:
        """Keep a file for so many seconds; waits for the disk.

        Raises ApiError: its purpose is not `batch`, or there is no room for it.
        """
        if purpose != "batch":
            raise invalid(f"purpose is {shown(purpose)}, but it must be batch", "purpose")
        file_id, disk = f"file-{secrets.token_hex(12)}", self._disk
        told = name[:_NAME_LENGTH].encode("utf-8", "backslashreplace").decode()
        self._use.expect(key, file_id, content.seek(0, os.SEEK_END), self._most_bytes(key))
        content.seek(0)
        try:
            # Before the file, which nobody owns without it.
            now, about = int(time.time()), {"filename": told, "purpose": purpose, OWNER: key}
            disk.write_file(file_id, about | {"created_at": now, _EXPIRES: now + lasts_s})
            self._expires[file_id] = now + lasts_s
            with atomic_write(disk.file(file_id), is_private=True) as temporary, temporary.open("wb") as kept:
                shutil.copyfileobj(content, kept)
        except BaseException:
            disk.remove_file(file_id)
            raise
        finally:
            self._use.settle(file_id)
        return self.file(file_id, key)

    def _most_bytes(self, key: str) -> float:
        most_mb = self.keys.limits_of(key).max_disk_mb
        return math.inf if most_mb is None else most_mb * 1e6

    def file(self, file_id: str, key: str) -> dict[str, Any]:
        """What a client is told of a file."""
        path, about = self._valid(file_id, key)
        lasts = {_EXPIRES: at_s} if (at_s := _expires_at(about)) < math.inf else {}
        return {
            "id": file_id,
            "object": "file",
            "bytes": path.stat().st_size,
            "created_at": about["created_at"],
            **lasts,
            "filename": about["filename"],
            "purpose": about["purpose"],
            "status": "processed",
        }

    def content(self, file_id: str, key: str) -> Path:
        """The file of a client, or the output of a batch of its own."""
        return self._valid(file_id, key)[0]

    def file_page(self, key: str, after: str | None, limit: int) -> tuple[list[str], bool] | None:
        """Files that a client has sent: see `BatchFolder.file_page`."""
        return self._disk.file_page(key, after, limit)

    def delete_file(self, file_id: str, key: str) -> dict[str, Any]:
        """Forget a file that a client has sent, or an output of a batch that has ended, with its images."""
        path, about = self._valid(file_id, key)
        if about["purpose"] != _OUTPUT:
            self._disk.remove_file(file_id)
            self._expires.pop(file_id, None)
        elif self._of(self._disk.of_output(file_id)[0], key)["status"] not in _ENDED:
            raise invalid("this file is an output of a batch that has not ended", "file_id")
        else:
            self._disk.remove_output(path)
        return {"id": file_id, "object": "file", "deleted": True}

    def _valid(self, file_id: str, key: str) -> tuple[Path, dict[str, Any]]:
        """As `_found`, without files that have expired."""
        path, about = self._found(file_id, key)
        if _expires_at(about) <= time.time():
            raise _no_file()
        return path, about

    def _found(self, file_id: str, key: str) -> tuple[Path, dict[str, Any]]:
        """A file of a client, or of a batch of its own, and what is kept of it."""
        batch_id, name = self._disk.of_output(file_id)
        if name in ("output", "errors"):
            self._of(batch_id, key)
            path = self._disk.outputs(batch_id)[name]
            if path.is_file():
                about = {"filename": path.name, "purpose": _OUTPUT, "created_at": int(path.stat().st_mtime)}
                return path, about
        elif (about := self._disk.read_file(file_id)) is not None and about.get(OWNER, "") == key:
            return self._disk.file(file_id), about
        raise _no_file()

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
        self._check_room(key)
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
            _EXPIRES: now + _WINDOW_S,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": metadata,
            OWNER: key,
        }
        try:
            self._disk.write_batch(batch)
        except BaseException:
            # It may be in its place already; who asked for it is told that it is not there.
            self._disk.remove_batch(batch["id"])
            raise
        self._begin(batch)
        return self._told(batch)

    def _check_room(self, key: str) -> None:
        """Raise ApiError unless a key may begin one more batch."""
        most = self.keys.limits_of(key).max_batches
        num_open = sum(owner == key for owner in self._owners.values())
        if most is not None and num_open >= most:
            message = f"{num_open} batches of this key have not ended, and it may have {most}"
            raise overloaded(message, "too_many_batches", _LATER_S)

    def batch(self, batch_id: str, key: str) -> dict[str, Any]:
        """What a client is told of a batch."""
        return self._told(self._of(batch_id, key))

    def batch_page(self, key: str, after: str | None, limit: int) -> tuple[list[str], bool] | None:
        """Batches of a client, likewise."""
        return self._disk.batch_page(key, after, limit)

    def cancel(self, batch_id: str, key: str) -> dict[str, Any]:
        """End a batch: what it has drawn stays."""
        with self._writing:
            batch, run, now = self._of(batch_id, key), self._runs.get(batch_id), int(time.time())
            if batch["status"] not in _ENDED:
                batch |= {"status": "cancelling", "cancelling_at": now}
                self._disk.write_batch(batch)
                if run is not None:
                    run.cancel()
                elif (waiting := self._tasks.get(batch_id)) is not None:
                    # Its turn has not come; what an earlier process has drawn of it is counted off the event loop.
                    waiting.cancel()
                    self._begin(batch, self._end(batch | _ended("cancelled")))
        return self._told(batch)

    def _of(self, batch_id: str, key: str) -> dict[str, Any]:
        batch = self._disk.read_batch(batch_id)
        if batch is None or batch.get(OWNER, "") != key:
            raise _no_batch()
        return batch

    def _told(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        told = {name: value for name, value in batch.items() if name != OWNER}
        if (run := self._runs.get(batch["id"])) is not None:
            told["request_counts"] = run.counts
        if (why := self._full.get(batch["id"])) is not None:
            told["errors"] = _errors(*why)
        return told

    def _begin(self, batch: dict[str, Any], work: Coroutine[Any, Any, None] | None = None) -> None:
        """Draw a batch, or do something else with it, in its task."""
        task = asyncio.get_running_loop().create_task(work or self._work(batch))
        self._tasks[batch["id"]], self._owners[batch["id"]] = task, batch.get(OWNER, "")

        def forget(done: "asyncio.Task[None]") -> None:
            if self._tasks.get(batch["id"]) is done:
                for known in (self._tasks, self._owners, self._full):
                    known.pop(batch["id"], None)

        task.add_done_callback(forget)

    async def _work(self, batch: dict[str, Any]) -> None:
        # Of every owner one batch at a time, in the order in which they came.
        turn = self._turns[batch.get(OWNER, "")]
        try:
            async with asyncio.timeout(_seconds_left(batch)):
                await turn.acquire()
        except TimeoutError:
            await self._end(batch | _ended("expired"))
            return
        try:
            failed = await self._drawn(batch)
        finally:
            turn.release()
        if failed is not None:
            await self._end(batch | failed)

    async def _drawn(self, batch: dict[str, Any]) -> dict[str, Any] | None:
        """Draw a batch; returns what is to be said of it if it has failed."""
        try:
            output = await self._written(batch, partial(BatchOutput, self._disk.batch(batch["id"]), is_private=True))
        except FolderInUseError:
            return None  # another server of this workspace draws it
        except (RunError, OSError) as error:
            return _failed(error)
        try:
            await self._draw(batch, output)
        except (UsageError, ApiError) as error:  # of its file
            return _failed(error)
        except Exception as error:  # noqa: BLE001  such as a disk that is broken
            traceback.print_exc()
            return _failed(error)
        finally:
            self._runs.pop(batch["id"], None)
            output.close()
        return None

    async def _draw(self, batch: dict[str, Any], output: BatchOutput) -> None:
        path, _ = self._found(batch["input_file_id"], batch.get(OWNER, ""))
        lines = await asyncio.get_running_loop().run_in_executor(None, read_lines, path)
        await run_in_threadpool(self._use.count, batch.get(OWNER, ""))
        run = self._runs[batch["id"]] = BatchRun(
            self.front_end,
            lines,
            output,
            self._places,
            batch.get(OWNER, ""),
            partial(self._has_room, batch["id"]),
            partial(self._nobody_waits, batch["id"]),
            writes_b64=True,
            on_full=partial(self._on_full, batch["id"]),
        )
        batch |= {"in_progress_at": int(time.time()), "request_counts": run.counts}
        if batch["status"] == "cancelling":
            run.cancel()
        else:
            await self._written(batch, partial(self._disk.write_batch, batch | {"status": "in_progress"}))
        left_s = _seconds_left(batch)
        expiring = None if left_s is None else asyncio.get_running_loop().call_later(left_s, run.expire)
        try:
            await run.run()
        finally:
            if expiring is not None:
                expiring.cancel()
        ended: BatchStatus = "completed"
        if not run.is_done:
            if not run.is_cancelled:
                return  # the server ends, or its engine is gone: a later process goes on
            ended = "expired" if run.is_expired else "cancelled"
        await self._write_end(batch | _ended(ended))

    async def _end(self, batch: Mapping[str, Any]) -> None:
        """Write how a batch has ended, again and again: else its client would wait for it."""
        while True:
            try:
                await self._write_end(batch)
                return
            except OSError:
                await asyncio.sleep(_END_RETRY_S)

    async def _write_end(self, batch: Mapping[str, Any]) -> None:
        """Write how a batch has ended, with what there is of it, however that was."""
        await self._written(batch, partial(self._write_with_files, batch, self._runs.get(batch["id"])))

    def _write_with_files(self, batch: Mapping[str, Any], run: BatchRun | None) -> None:
        files = self._disk.outputs(batch["id"])
        if run is None:
            counts = {"completed": num_lines(files["output"]), "failed": num_lines(files["errors"])}
        else:
            counts = run.counts
        found = {"request_counts": batch["request_counts"] | counts}
        for name, field_name in (("output", "output_file_id"), ("errors", "error_file_id")):
            if files[name].exists() and files[name].stat().st_size:
                found[field_name] = f"{batch['id'].replace('batch_', 'file-')}-{name}"
        with self._writing:
            self._disk.write_batch({**batch, **found})

    async def _written(self, batch: Mapping[str, Any], write: Callable[[], Result]) -> Result:
        return await when_there_is_room(write, partial(self._on_full, batch["id"]))

    def _on_full(self, batch_id: str, error: OSError | None) -> bool:
        if error is None:
            self._full.pop(batch_id, None)
        elif batch_id not in self._full:
            why = f"the disk is full ({error}): the batch goes on when there is room"
            self._full[batch_id] = "disk_full", why
            warnings.warn(f"{batch_id}: {why}", stacklevel=2)
        return True

    async def _has_room(self, batch_id: str) -> None:
        """Wait until the owner of a batch may have more on the disk, or it ends."""
        owner = self._owners[batch_id]
        most_bytes = self._most_bytes(owner)
        if most_bytes == math.inf or self._use.note(owner, batch_id) < most_bytes:
            return
        while (used := await run_in_threadpool(self._use.count, owner)) >= most_bytes:
            if self._runs[batch_id].is_cancelled:
                return
            self._full[batch_id] = "quota_exceeded", f"{too_much(used, most_bytes)}; the batch goes on then"
            await asyncio.sleep(_LOOK_AGAIN_S)
        self._full.pop(batch_id, None)

    async def _nobody_waits(self, batch_id: str) -> None:
        """Wait until no interactive request does, or the batch ends."""
        front_end, run = self.front_end, self._runs[batch_id]
        while (not front_end.is_ready or front_end.backend.load.num_waiting) and not run.is_cancelled:
            await asyncio.sleep(_POLL_S)


def _ended(status: BatchStatus) -> dict[str, Any]:
    return {"status": status, f"{status}_at": int(time.time())}


def _failed(error: Exception) -> dict[str, Any]:
    return _ended("failed") | {"errors": _errors("invalid_batch", str(error))}


def _seconds_left(batch: Mapping[str, Any]) -> float | None:
    """Until a batch expires; None: it does not."""
    at_s = _expires_at(batch)
    return None if at_s == math.inf else max(0.0, at_s - time.time())


def _errors(code: str, message: str) -> dict[str, Any]:
    return {"object": "list", "data": [{"code": code, "message": message, "param": None}]}


def _expires_at(about: Mapping[str, Any]) -> float:
    """When a file or a batch expires; infinity: never, as those of earlier versions."""
    at_s = about.get(_EXPIRES)
    return at_s if isinstance(at_s, int) else math.inf


def _no_file() -> ApiError:
    return ApiError(404, "there is no such file", code="not_found", param="file_id")


def _no_batch() -> ApiError:
    return ApiError(404, "there is no such batch", code="not_found", param="batch_id")


def _is_metadata(given: object) -> bool:
    """As OpenAI has it: a few names, each with some text."""
    if not isinstance(given, dict) or len(given) > _MOST_METADATA:
        return False
    lengths = {_MOST_KEY: given.keys(), _MOST_VALUE: given.values()}
    texts = [(text, most) for most, found in lengths.items() for text in found]
    return all(isinstance(text, str) and len(text) <= most and is_text(text) for text, most in texts)
