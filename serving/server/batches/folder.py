"""Folder of files and batches: paths, metadata and owners. Only the server's user can read it. No torch."""

import contextlib
import json
import os
import re
import shutil
import threading
import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ....data.files import private_folder, quarantine, write_json
from ....data.records import json_type
from ..body import shown
from ..errors import ApiError
from .file import ERROR_FILE, OUTPUT_FILE

OWNER, EXPIRES = "owner", "expires_at"
"""Fields in the JSON of files and batches. Clients do not see the owner."""
ENDED = frozenset({"completed", "failed", "cancelled", "expired"})
"""Final statuses of batches."""
_FILE, _BATCH = "file-", "batch_"
_ID = re.compile(rf"({_FILE}|{_BATCH})[A-Za-z0-9]{{1,64}}", re.ASCII)
_FIELDS_OF_FILE = {"filename": str, "created_at": int, "purpose": str}
_FIELDS_OF_BATCH = {"id": str, "status": str, "created_at": int, "input_file_id": str, "request_counts": dict}
_SETTLED_S = 2.0
"""Seconds in which a folder may change again without a newer modification time: clocks of file systems are coarse."""
_Reader = Callable[[str], dict[str, Any] | None]
_Page = tuple[list[str], bool]


class BatchFolder:
    """Paths and metadata of files and batches by id. Damaged metadata is renamed with a warning, and then missing.

    Methods raise OSError, and ApiError for an invalid id.

    Args:
        root: the folder, which is created.
        renamed: current names of owners by their former ones.
    """

    def __init__(self, root: Path, renamed: Mapping[str, str] | None = None) -> None:
        self._renamed = renamed or {}
        self._files, self._batches = root / "files", root / "batches"
        self._files_by_owner, self._batches_by_owner = _ByOwner(self._files, ".jsonl"), _ByOwner(self._batches, "")
        for folder in (root, self._files, self._batches):
            private_folder(folder)

    def file(self, file_id: str) -> Path:
        """Return the path of a client's file."""
        return self._files / f"{_safe(file_id, _FILE)}.jsonl"

    def batch(self, batch_id: str) -> Path:
        """Return the folder of a batch."""
        return self._batches / _safe(batch_id, _BATCH)

    def outputs(self, batch_id: str) -> dict[str, Path]:
        """Return the paths of a batch's outputs, by the name in which their ids end."""
        folder = self.batch(batch_id)
        return {"output": folder / OUTPUT_FILE, "errors": folder / ERROR_FILE}

    def of_output(self, file_id: str) -> tuple[str, str]:
        """Return the id of the batch whose output this would be, and the output's name."""
        batch, _, name = file_id.removeprefix(_FILE).partition("-")
        return f"{_BATCH}{batch}", name

    def remove_output(self, path: Path) -> None:
        """Delete an output; that of completed lines with its images."""
        path.unlink(missing_ok=True)
        if path.name == OUTPUT_FILE and (images := path.parent / "images").is_dir():
            shutil.rmtree(images)

    def read_file(self, file_id: str) -> dict[str, Any] | None:
        """Return what is stored about a client's file; None if there is no such file."""
        path = self.file(file_id)
        if not path.is_file():
            return None
        unknown = {"filename": path.name, "purpose": "batch", "created_at": int(path.stat().st_mtime)}
        found = _read(path.with_suffix(".json"), _FIELDS_OF_FILE) or {}
        if self._rename_owner(found):
            with contextlib.suppress(OSError):  # a full disk; it is renamed again when it is read again
                self.write_file(file_id, found)
        return unknown | found

    def write_file(self, file_id: str, about: Mapping[str, Any]) -> None:
        """Store metadata of a client's file."""
        write_json(self.file(file_id).with_suffix(".json"), dict(about), is_private=True)

    def remove_file(self, file_id: str) -> None:
        """Delete a client's file and its metadata."""
        for path in (self.file(file_id), self.file(file_id).with_suffix(".json")):
            path.unlink(missing_ok=True)
        self._files_by_owner.forget(file_id)

    def read_batch(self, batch_id: str) -> dict[str, Any] | None:
        """Return what is stored about a batch; None if there is no such batch."""
        found = _read(self.batch(batch_id) / "batch.json", _FIELDS_OF_BATCH, batch_id)
        if found is not None and self._rename_owner(found):
            with contextlib.suppress(OSError):  # as above
                self.write_batch(found)
        return found

    def owned_batch(self, batch_id: str, owner: str) -> dict[str, Any]:
        """Return what is stored about a batch. Raises ApiError if this owner has no such batch."""
        batch = self.read_batch(batch_id)
        if batch is None or batch.get(OWNER, "") != owner:
            raise ApiError(404, "there is no such batch", code="not_found", param="batch_id")
        return batch

    def unfinished(self) -> list[dict[str, Any]]:
        """Return all batches that have not ended, the oldest first. One that cannot be read is left out."""
        found = (_unless_unreadable(self.read_batch, each) for each in self.batches_of())
        return [batch for batch in found if batch is not None and batch["status"] not in ENDED]

    def write_batch(self, batch: Mapping[str, Any]) -> None:
        """Store metadata of a batch."""
        private_folder(self.batch(batch["id"]))
        write_json(self.batch(batch["id"]) / "batch.json", dict(batch), is_private=True)

    def remove_batch(self, batch_id: str) -> None:
        """Delete metadata of a batch."""
        (self.batch(batch_id) / "batch.json").unlink(missing_ok=True)
        self._batches_by_owner.forget(batch_id)

    def file_page(self, owner: str, after: str | None, limit: int) -> _Page | None:
        """Return the ids of at most `limit` files of an owner, the newest first, that follow the id `after`, and
        whether there are more; None if the owner has no file `after`. Waits for the disk; metadata is read only once.
        """
        return self._files_by_owner.page(self.read_file, owner, after, limit)

    def batch_page(self, owner: str, after: str | None, limit: int) -> _Page | None:
        """Return a page of batches, as `file_page` does for files."""
        return self._batches_by_owner.page(self.read_batch, owner, after, limit)

    def files_of(self, owner: str | None = None) -> list[str]:
        """Return the ids of the files of one owner, or of all, the oldest first. Waits for the disk."""
        return self._files_by_owner.ids(self.read_file, owner)

    def batches_of(self, owner: str | None = None) -> list[str]:
        """Return the ids of the batches of one owner, or of all, the oldest first. Waits for the disk."""
        return self._batches_by_owner.ids(self.read_batch, owner)

    def _rename_owner(self, content: dict[str, Any]) -> bool:
        """Set the current name of the owner; return whether it was another."""
        before = content.get(OWNER, "")
        content[OWNER] = self._renamed.get(before, before)
        return content[OWNER] != before


class _ByOwner:
    """Ids in a folder by owner, in the order of their creation. Thread-safe.

    Other servers may share the folder: it is listed again whenever its modification time has changed.

    Args:
        folder: folder of files or folders that are named by id.
        suffix: suffix of these names.
    """

    def __init__(self, folder: Path, suffix: str) -> None:
        self._folder, self._suffix = folder, suffix
        self._listed_ns = -1
        # Time of creation and owner by id; neither changes.
        self._entries: dict[str, tuple[int, str]] = {}
        self._ids_by_owner: dict[str, list[tuple[int, str]]] = {}
        self._unread: set[str] = set()
        self._lock = threading.Lock()

    def page(self, read: _Reader, owner: str, after: str | None, limit: int) -> _Page | None:
        """Return a page of one owner, as `BatchFolder.file_page` does."""
        with self._lock:
            self._refresh(read)
            found = self._ids_by_owner.get(owner, [])
            end = len(found)
            if after is not None:
                entry = self._entries.get(after)
                if entry is None or entry[1] != owner:
                    return None
                end = bisect_left(found, (entry[0], after))
            return [each for _, each in reversed(found[max(0, end - limit) : end])], end > limit

    def ids(self, read: _Reader, owner: str | None) -> list[str]:
        """Return the ids of one owner, or of all, the oldest first."""
        with self._lock:
            self._refresh(read)
            found = self._ids_by_owner.values() if owner is None else [self._ids_by_owner.get(owner, [])]
            return [each for _, each in sorted(entry for entries in found for entry in entries)]

    def forget(self, removed_id: str) -> None:
        """Remove an id; it reappears if its metadata can be read again."""
        with self._lock:
            self._remove(removed_id)
            self._listed_ns = -1

    def _remove(self, removed_id: str) -> None:
        if (entry := self._entries.pop(removed_id, None)) is not None:
            created, owner = entry
            del self._ids_by_owner[owner][bisect_left(self._ids_by_owner[owner], (created, removed_id))]

    def _refresh(self, read: _Reader) -> None:
        changed_ns = self._folder.stat().st_mtime_ns
        if changed_ns != self._listed_ns:
            self._listed_ns = changed_ns if time.time_ns() - changed_ns > _SETTLED_S * 1e9 else -1
            with os.scandir(self._folder) as entries:
                names = [entry.name for entry in entries if entry.name.endswith(self._suffix)]
            ids = set(filter(_ID.fullmatch, (name.removesuffix(self._suffix) for name in names)))
            for removed_id in self._entries.keys() - ids:
                self._remove(removed_id)
            self._unread = ids - self._entries.keys()
        owners = set[str]()
        try:
            for each in list(self._unread):
                content = _unless_unreadable(read, each)
                if content is not None:  # else it is not complete yet, damaged or unreadable
                    created, owner = self._entries[each] = content["created_at"], content.get(OWNER, "")
                    self._ids_by_owner.setdefault(owner, []).append((created, each))
                    self._unread.discard(each)
                    owners.add(owner)
        finally:
            for owner in owners:
                self._ids_by_owner[owner].sort()


def _unless_unreadable(read: _Reader, known_id: str) -> dict[str, Any] | None:
    """Read metadata; None, with a warning, if the disk does not allow it, so that one file cannot hide all others."""
    try:
        return read(known_id)
    except OSError as error:
        warnings.warn(f"{known_id} cannot be read: {error}", stacklevel=2)
        return None


def _read(path: Path, kinds: Mapping[str, type], known_id: str | None = None) -> dict[str, Any] | None:
    """Read a JSON object with these fields and this id.

    Returns None if there is no file, or a damaged one, which is renamed with a warning. Raises OSError.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds {json_type(content)}")
        for name, kind in kinds.items():
            if not isinstance(content.get(name), kind):
                raise ValueError(f"{name} is {shown(content.get(name))}")
        if content.get("id") != known_id:
            raise ValueError(f"it is of {shown(content.get('id'))}")
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        quarantine(path, str(path), error)
        return None
    return content


def _safe(name: str, prefix: str) -> str:
    """Return an id, which is safe as the name of a file. Raises ApiError if it is invalid."""
    if not name.startswith(prefix) or not _ID.fullmatch(name):
        raise ApiError(404, "there is no such id", code="not_found")
    return name
