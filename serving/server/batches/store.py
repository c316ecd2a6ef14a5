"""OpenAI's batches: kept in the workspace, run while no other request waits, resumed after a restart. No torch."""

import asyncio
import math
import secrets
import threading
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fastapi.concurrency import run_in_threadpool

from ....data.errors import RunError, UsageError
from ..errors import ApiError, overloaded
from ..front_end import FrontEnd
from ..keys import Keys
from .client_files import ClientFiles, expires_at
from .fields import BATCH
from .file import BatchOutput, FolderInUseError, num_lines, read_lines
from .folder import ENDED, EXPIRES, OWNER, BatchFolder
from .places import FairPlaces
from .quota import DiskUse, too_much
from .run import BatchRun, Result, when_there_is_room

BatchStatus = Literal["validating", "in_progress", "completed", "failed", "cancelling", "cancelled", "expired"]
MAX_FILE_BYTES = 200_000_000
_SWEEP_S = 600.0
_POLL_S, _QUOTA_POLL_S, _END_RETRY_S = 0.02, 2.0, 10.0
_RETRY_AFTER_S = 60.0
"""Seconds after which an owner with too many batches should retry."""
_WINDOW_S = 24 * 3600


@dataclass(eq=False)
class Batches:
    """Batches of a folder that only the server's user can read. A client finds those of its own key only.

    Methods raise ApiError if there is no such batch.

    Attributes:
        folder: folder that holds `files/` and `batches/`.
        front_end: front end that draws the lines.
        at_once: number of lines of all batches that are drawn together.
        keys: owners of files and batches, and their limits.
        files: inputs and outputs of the batches.
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
    _sweeping: "asyncio.Task[None] | None" = None
    _turns: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))

    def __post_init__(self) -> None:
        self._disk = BatchFolder(self.folder, self.keys.renamed)
        self._use = DiskUse(self._disk, self.keys)
        self.files = ClientFiles(self._disk, self._use)
        self._places = FairPlaces(self.at_once)

    async def start(self) -> None:
        """Resume the batches that an earlier process has left unfinished."""
        await run_in_threadpool(self.files.load)
        for batch in await run_in_threadpool(self._disk.unfinished):
            if batch["id"] not in self._tasks:
                self._start_task(batch)
        self._sweeping = asyncio.get_running_loop().create_task(self._sweep())

    async def stop(self) -> None:
        """Stop all batches; a later process resumes them."""
        tasks = [*self._tasks.values(), *([] if self._sweeping is None else [self._sweeping])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            try:
                await run_in_threadpool(self.files.remove_expired)
            except OSError as error:
                warnings.warn(f"expired files are deleted later: {error}", stacklevel=2)

    def create(self, body: Mapping[str, Any], key: str) -> dict[str, Any]:
        """Create and start a batch.

        Raises ApiError if a field is not allowed, there is no such file, or the key has too many batches.
        """
        fields = BATCH.read(body)
        self.files.content(fields.input_file_id, key)
        self._check_room(key)
        now = int(time.time())
        batch = {
            "id": f"batch_{secrets.token_hex(12)}",
            "object": "batch",
            "endpoint": fields.endpoint,
            "errors": None,
            "input_file_id": fields.input_file_id,
            "completion_window": fields.completion_window,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            EXPIRES: now + _WINDOW_S,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": fields.metadata,
            OWNER: key,
        }
        try:
            self._disk.write_batch(batch)
        except BaseException:
            # It may have been written, but its client receives an error.
            self._disk.remove_batch(batch["id"])
            raise
        self._start_task(batch)
        return self._describe(batch)

    def _check_room(self, key: str) -> None:
        """Raise ApiError unless a key may have one more batch."""
        most = self.keys.limits_of(key).max_batches
        num_open = sum(owner == key for owner in self._owners.values())
        if most is not None and num_open >= most:
            message = f"{num_open} batches of this key have not ended, and it may have {most}"
            raise overloaded(message, "too_many_batches", _RETRY_AFTER_S)

    def batch(self, batch_id: str, key: str) -> dict[str, Any]:
        """Return the description of a batch that clients see."""
        return self._describe(self._disk.owned_batch(batch_id, key))

    def batch_page(self, key: str, after: str | None, limit: int) -> tuple[list[str], bool] | None:
        """Return a page of the batches of a client, as `BatchFolder.batch_page` does."""
        return self._disk.batch_page(key, after, limit)

    def cancel(self, batch_id: str, key: str) -> dict[str, Any]:
        """Cancel a batch; the images that it has drawn are kept."""
        with self._writing:
            batch, run, now = self._disk.owned_batch(batch_id, key), self._runs.get(batch_id), int(time.time())
            if batch["status"] not in ENDED:
                batch |= {"status": "cancelling", "cancelling_at": now}
                self._disk.write_batch(batch)
                if run is not None:
                    run.cancel()
                elif (waiting := self._tasks.get(batch_id)) is not None:
                    # It has not started. Lines that an earlier process has drawn are counted outside the event loop.
                    waiting.cancel()
                    self._start_task(batch, self._end(batch | _end_fields("cancelled")))
        return self._describe(batch)

    def _describe(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        description = {name: value for name, value in batch.items() if name != OWNER}
        if (run := self._runs.get(batch["id"])) is not None:
            description["request_counts"] = run.counts
        if (why := self._full.get(batch["id"])) is not None:
            description["errors"] = _errors(*why)
        return description

    def _start_task(self, batch: dict[str, Any], work: Coroutine[Any, Any, None] | None = None) -> None:
        """Start the task of a batch: `work` if it is given, else drawing the batch."""
        task = asyncio.get_running_loop().create_task(work or self._process(batch))
        self._tasks[batch["id"]], self._owners[batch["id"]] = task, batch.get(OWNER, "")

        def forget(done: "asyncio.Task[None]") -> None:
            if self._tasks.get(batch["id"]) is done:
                for known in (self._tasks, self._owners, self._full):
                    known.pop(batch["id"], None)

        task.add_done_callback(forget)

    async def _process(self, batch: dict[str, Any]) -> None:
        # One batch of each owner at a time, in the order of their creation.
        turn = self._turns[batch.get(OWNER, "")]
        try:
            async with asyncio.timeout(_seconds_left(batch)):
                await turn.acquire()
        except TimeoutError:
            await self._end(batch | _end_fields("expired"))
            return
        try:
            failed = await self._draw(batch)
        finally:
            turn.release()
        if failed is not None:
            await self._end(batch | failed)

    async def _draw(self, batch: dict[str, Any]) -> dict[str, Any] | None:
        """Draw a batch; return the fields that describe its failure, or None if it has not failed."""
        try:
            output = await self._write_when_room(
                batch, partial(BatchOutput, self._disk.batch(batch["id"]), is_private=True)
            )
        except FolderInUseError:
            return None  # another server of this workspace draws it
        except (RunError, OSError) as error:
            return _failure_fields(error)
        try:
            await self._draw_lines(batch, output)
        except (UsageError, ApiError) as error:  # an error of its file
            return _failure_fields(error)
        except Exception as error:  # noqa: BLE001  such as a disk that is broken
            traceback.print_exc()
            return _failure_fields(error)
        finally:
            self._runs.pop(batch["id"], None)
            output.close()
        return None

    async def _draw_lines(self, batch: dict[str, Any], output: BatchOutput) -> None:
        path, _ = self.files.find(batch["input_file_id"], batch.get(OWNER, ""))
        lines = await asyncio.get_running_loop().run_in_executor(None, read_lines, path)
        await run_in_threadpool(self._use.count, batch.get(OWNER, ""))
        run = self._runs[batch["id"]] = BatchRun(
            self.front_end,
            lines,
            output,
            self._places,
            batch.get(OWNER, ""),
            partial(self._wait_for_room, batch["id"]),
            partial(self._wait_until_idle, batch["id"]),
            writes_b64=True,
            on_full=partial(self._on_full, batch["id"]),
        )
        batch |= {"in_progress_at": int(time.time()), "request_counts": run.counts}
        if batch["status"] == "cancelling":
            run.cancel()
        else:
            await self._write_when_room(batch, partial(self._disk.write_batch, batch | {"status": "in_progress"}))
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
                return  # the server ends, or its engine has stopped: a later process resumes it
            ended = "expired" if run.is_expired else "cancelled"
        await self._write_end(batch | _end_fields(ended))

    async def _end(self, batch: Mapping[str, Any]) -> None:
        """Write how a batch has ended, retrying until this succeeds: otherwise its client would wait indefinitely."""
        while True:
            try:
                await self._write_end(batch)
                return
            except OSError:
                await asyncio.sleep(_END_RETRY_S)

    async def _write_end(self, batch: Mapping[str, Any]) -> None:
        """Write how a batch has ended, with the outputs that it has."""
        await self._write_when_room(batch, partial(self._write_with_files, batch, self._runs.get(batch["id"])))

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

    async def _write_when_room(self, batch: Mapping[str, Any], write: Callable[[], Result]) -> Result:
        return await when_there_is_room(write, partial(self._on_full, batch["id"]))

    def _on_full(self, batch_id: str, error: OSError | None) -> bool:
        if error is None:
            self._full.pop(batch_id, None)
        elif batch_id not in self._full:
            why = f"the disk is full ({error}): the batch goes on when there is room"
            self._full[batch_id] = "disk_full", why
            warnings.warn(f"{batch_id}: {why}", stacklevel=2)
        return True

    async def _wait_for_room(self, batch_id: str) -> None:
        """Wait until the owner of a batch is below its disk limit, or the batch is cancelled."""
        owner = self._owners[batch_id]
        most_bytes = self._use.most_bytes(owner)
        if most_bytes == math.inf or self._use.measure(owner, batch_id) < most_bytes:
            return
        while (used := await run_in_threadpool(self._use.count, owner)) >= most_bytes:
            if self._runs[batch_id].is_cancelled:
                return
            self._full[batch_id] = "quota_exceeded", f"{too_much(used, most_bytes)}; the batch goes on then"
            await asyncio.sleep(_QUOTA_POLL_S)
        self._full.pop(batch_id, None)

    async def _wait_until_idle(self, batch_id: str) -> None:
        """Wait until no interactive request waits, or the batch is cancelled."""
        front_end, run = self.front_end, self._runs[batch_id]
        while (not front_end.is_ready or front_end.backend.load.num_waiting) and not run.is_cancelled:
            await asyncio.sleep(_POLL_S)


def _end_fields(status: BatchStatus) -> dict[str, Any]:
    return {"status": status, f"{status}_at": int(time.time())}


def _failure_fields(error: Exception) -> dict[str, Any]:
    return _end_fields("failed") | {"errors": _errors("invalid_batch", str(error))}


def _seconds_left(batch: Mapping[str, Any]) -> float | None:
    """Return the seconds until a batch expires; None if it does not expire."""
    at_s = expires_at(batch)
    return None if at_s == math.inf else max(0.0, at_s - time.time())


def _errors(code: str, message: str) -> dict[str, Any]:
    return {"object": "list", "data": [{"code": code, "message": message, "param": None}]}
