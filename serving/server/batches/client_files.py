"""Files of clients, and outputs of their batches: limits, expiry, and the descriptions that clients see. No torch."""

import math
import os
import secrets
import shutil
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from ....data.files import atomic_write
from ..errors import ApiError, invalid
from .fields import MOST_FILE_S
from .folder import ENDED, EXPIRES, OWNER, BatchFolder
from .quota import DiskUse

_OUTPUT = "batch_output"
"""Purpose of outputs of batches, which no client has sent."""
_NAME_LENGTH = 200


class ClientFiles:
    """Files of a folder. A client finds those of its own key only.

    Methods raise ApiError if there is no such file. They wait for the disk.

    Args:
        disk: folder of files and batches.
        use: disk use of the owners in it.
    """

    def __init__(self, disk: BatchFolder, use: DiskUse) -> None:
        self._disk, self._use = disk, use
        self._expires_s: dict[str, float] = {}

    def load(self) -> None:
        """Read when each file expires, and delete expired ones."""
        for file_id in self._disk.files_of():
            if (about := self._disk.read_file(file_id)) is not None:
                self._expires_s[file_id] = expires_at(about)
        self.remove_expired()

    def remove_expired(self) -> None:
        """Delete expired files, except inputs of batches that have not ended. Those that cannot be deleted are kept
        until the next call, with a warning.
        """
        now_s = time.time()
        if expired := [file_id for file_id, at_s in list(self._expires_s.items()) if at_s <= now_s]:
            in_use = {batch["input_file_id"] for batch in self._disk.unfinished()}
            for file_id in expired:
                if file_id in in_use:
                    continue
                try:
                    self._remove(file_id)
                except OSError as error:
                    warnings.warn(f"expired file {file_id} cannot be deleted: {error}", stacklevel=2)

    def add(
        self, name: str, content: IO[bytes], purpose: str, key: str, lifetime_s: int = MOST_FILE_S
    ) -> dict[str, Any]:
        """Store a file for `lifetime_s` seconds. Raises ApiError if it does not fit into the owner's quota."""
        file_id, disk = f"file-{secrets.token_hex(12)}", self._disk
        filename = name[:_NAME_LENGTH].encode("utf-8", "backslashreplace").decode()
        self._use.reserve(key, file_id, content.seek(0, os.SEEK_END))
        content.seek(0)
        try:
            # Before the file, which has no owner without it.
            now, about = int(time.time()), {"filename": filename, "purpose": purpose, OWNER: key}
            disk.write_file(file_id, about | {"created_at": now, EXPIRES: now + lifetime_s})
            self._expires_s[file_id] = now + lifetime_s
            with atomic_write(disk.file(file_id), is_private=True) as temporary, temporary.open("wb") as kept:
                shutil.copyfileobj(content, kept)
        except BaseException:
            self._remove(file_id)
            raise
        finally:
            self._use.release(file_id)
        return self.about(file_id, key)

    def about(self, file_id: str, key: str) -> dict[str, Any]:
        """Return the description of a file that clients see."""
        path, about = self._valid(file_id, key)
        expiry = {EXPIRES: at_s} if (at_s := expires_at(about)) < math.inf else {}
        return {
            "id": file_id,
            "object": "file",
            "bytes": path.stat().st_size,
            "created_at": about["created_at"],
            **expiry,
            "filename": about["filename"],
            "purpose": about["purpose"],
            "status": "processed",
        }

    def content(self, file_id: str, key: str) -> Path:
        """Return the path of a client's file, or of an output of its batches."""
        return self._valid(file_id, key)[0]

    def page(self, key: str, after: str | None, limit: int) -> tuple[list[str], bool] | None:
        """Return a page of files that a client has sent, as `BatchFolder.file_page` does."""
        return self._disk.file_page(key, after, limit)

    def delete(self, file_id: str, key: str) -> dict[str, Any]:
        """Delete a file that a client has sent, or an output of a batch that has ended, with its images."""
        path, about = self._valid(file_id, key)
        if about["purpose"] != _OUTPUT:
            self._remove(file_id)
        elif self._disk.owned_batch(self._disk.of_output(file_id)[0], key)["status"] not in ENDED:
            raise invalid("this file is an output of a batch that has not ended", "file_id")
        else:
            self._disk.remove_output(path)
        return {"id": file_id, "object": "file", "deleted": True}

    def find(self, file_id: str, key: str) -> tuple[Path, dict[str, Any]]:
        """Return the path of a file, even of an expired one, and what is stored about it."""
        batch_id, name = self._disk.of_output(file_id)
        if name in ("output", "errors"):
            self._disk.owned_batch(batch_id, key)
            path = self._disk.outputs(batch_id)[name]
            if path.is_file():
                about = {"filename": path.name, "purpose": _OUTPUT, "created_at": int(path.stat().st_mtime)}
                return path, about
        elif (about := self._disk.read_file(file_id)) is not None and about.get(OWNER, "") == key:
            return self._disk.file(file_id), about
        raise _no_file()

    def _valid(self, file_id: str, key: str) -> tuple[Path, dict[str, Any]]:
        path, about = self.find(file_id, key)
        if expires_at(about) <= time.time():
            raise _no_file()
        return path, about

    def _remove(self, file_id: str) -> None:
        self._disk.remove_file(file_id)
        self._expires_s.pop(file_id, None)


def expires_at(about: Mapping[str, Any]) -> float:
    """Return when a file or a batch expires; infinity if it is from an earlier version, which set no time."""
    at_s = about.get(EXPIRES)
    return at_s if isinstance(at_s, int) else math.inf


def _no_file() -> ApiError:
    return ApiError(404, "there is no such file", code="not_found", param="file_id")
