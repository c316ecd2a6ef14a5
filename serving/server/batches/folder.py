"""The folder of files and batches: what lies where, and whose it is. Only its owner can read it. No torch."""

import json
import os
import re
import shutil
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ....data.files import private_folder, quarantine, write_json
from ....data.records import json_type
from ..errors import ApiError
from ..fields import shown
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
"""A folder that has changed within so long may change again without a newer time: clocks of file systems are coarse."""
_Reader = Callable[[str], dict[str, Any] | None]
_Page = tuple[list[str], bool]


class BatchFolder:
    """Paths and JSON of files and batches by their ids. What is damaged is put aside, and is not there any more.

    Methods raise OSError, and ApiError where an id is none of ours.

    Args:
        root: the folder, which is created.
        renamed: what owners are called now.
    """

    def __init__(self, root: Path, renamed: Mapping[str, str] | None = None) -> None:
        self._renamed = renamed or {}
        self._files, self._batches = root / "files", root / "batches"
        self._files_by_owner, self._batches_by_owner = _ByOwner(self._files, ".jsonl"), _ByOwner(self._batches, "")
        for folder in (root, self._files, self._batches):
            private_folder(folder)

    def file(self, file_id: str) -> Path:
        """The content of a client's file."""
        return self._files / f"{_safe(file_id, _FILE)}.jsonl"

    def batch(self, batch_id: str) -> Path:
        """The folder of a batch."""
        return self._batches / _safe(batch_id, _BATCH)

    def outputs(self, batch_id: str) -> dict[str, Path]:
        """The files of what has become of its lines, by the name that their ids end in."""
        folder = self.batch(batch_id)
        return {"output": folder / OUTPUT_FILE, "errors": folder / ERROR_FILE}

    def of_output(self, file_id: str) -> tuple[str, str]:
        """The id of the batch whose output this would be, and the output's name."""
        batch, _, name = file_id.removeprefix(_FILE).partition("-")
        return f"{_BATCH}{batch}", name

    def remove_output(self, path: Path) -> None:
        """Delete an output, and with the one of images these."""
        path.unlink(missing_ok=True)
        if path.name == OUTPUT_FILE and (images := path.parent / "images").is_dir():
            shutil.rmtree(images)

    def read_file(self, file_id: str) -> dict[str, Any] | None:
        """What is kept of a client's file; None: there is none."""
        path = self.file(file_id)
        if not path.is_file():
            return None
        unknown = {"filename": path.name, "purpose": "batch", "created_at": int(path.stat().st_mtime)}
        found = _read(path.with_suffix(".json"), _FIELDS_OF_FILE) or {}
        if self._rename_owner(found):
            self.write_file(file_id, found)
        return unknown | found

    def write_file(self, file_id: str, about: Mapping[str, Any]) -> None:
        """Keep what is told of a client's file."""
        write_json(self.file(file_id).with_suffix(".json"), dict(about), is_private=True)

    def remove_file(self, file_id: str) -> None:
        """Delete what there is of a client's file."""
        for path in (self.file(file_id), self.file(file_id).with_suffix(".json")):
            path.unlink(missing_ok=True)
        self._files_by_owner.forget(file_id)

    def read_batch(self, batch_id: str) -> dict[str, Any] | None:
        """What is kept of a batch; None: there is none."""
        found = _read(self.batch(batch_id) / "batch.json", _FIELDS_OF_BATCH, batch_id)
        if found is not None and self._rename_owner(found):
            self.write_batch(found)
        return found

    def owned_batch(self, batch_id: str, owner: str) -> dict[str, Any]:
        """Return what is stored about a batch. Raises ApiError if this owner has no such batch."""
        batch = self.read_batch(batch_id)
        if batch is None or batch.get(OWNER, "") != owner:
            raise ApiError(404, "there is no such batch", code="not_found", param="batch_id")
        return batch

    def unfinished(self) -> list[dict[str, Any]]:
        """Return all batches that have not ended, the oldest first."""
        found = map(self.read_batch, self.batches_of())
        return [batch for batch in found if batch is not None and batch["status"] not in ENDED]

    def write_batch(self, batch: Mapping[str, Any]) -> None:
        """Keep what is known of a batch."""
        private_folder(self.batch(batch["id"]))
        write_json(self.batch(batch["id"]) / "batch.json", dict(batch), is_private=True)

    def remove_batch(self, batch_id: str) -> None:
        """Delete what is known of a batch."""
        (self.batch(batch_id) / "batch.json").unlink(missing_ok=True)
        self._batches_by_owner.forget(batch_id)

    def file_page(self, owner: str, after: str | None, limit: int) -> _Page | None:
        """Ids of at most `limit` files of a client, the newest first, from behind `after` on, and whether there are
        more; None: it has no file `after`. It waits for the disk, and reads what it has not read before of each.
        """
        return self._files_by_owner.page(self.read_file, owner, after, limit)

    def batch_page(self, owner: str, after: str | None, limit: int) -> _Page | None:
        """Batches, likewise."""
        return self._batches_by_owner.page(self.read_batch, owner, after, limit)

    def files_of(self, owner: str | None = None) -> list[str]:
        """Files of one client, or of all, the oldest first; likewise."""
        return self._files_by_owner.ids(self.read_file, owner)

    def batches_of(self, owner: str | None = None) -> list[str]:
        """Batches, likewise."""
        return self._batches_by_owner.ids(self.read_batch, owner)

    def _rename_owner(self, content: dict[str, Any]) -> bool:
        """Write the name of the owner as it is now; returns whether it was another."""
        before = content.get(OWNER, "")
        content[OWNER] = self._renamed.get(before, before)
        return content[OWNER] != before


class _ByOwner:
    """Ids in a folder by their owner, in the order in which they were created. Any thread may ask.

    Other servers may share the folder: its names are looked at again when its time says that it has changed.

    Args:
        folder: of files or folders that are named by their ids.
        suffix: that their names have besides.
    """

    def __init__(self, folder: Path, suffix: str) -> None:
        self._folder, self._suffix = folder, suffix
        self._seen_ns = -1
        # When it was created, and its owner, of which neither changes.
        self._whose: dict[str, tuple[int, str]] = {}
        self._of: dict[str, list[tuple[int, str]]] = {}
        self._unread: set[str] = set()
        self._lock = threading.Lock()

    def page(self, read: _Reader, owner: str, after: str | None, limit: int) -> _Page | None:
        """Return a page of one owner, as `BatchFolder.file_page` does."""
        with self._lock:
            self._look(read)
            found = self._of.get(owner, [])
            end = len(found)
            if after is not None:
                whose = self._whose.get(after)
                if whose is None or whose[1] != owner:
                    return None
                end = bisect_left(found, (whose[0], after))
            return [each for _, each in reversed(found[max(0, end - limit) : end])], end > limit

    def ids(self, read: _Reader, owner: str | None) -> list[str]:
        """Ids of one owner, or of all, the oldest first."""
        with self._lock:
            self._look(read)
            found = self._of.values() if owner is None else [self._of.get(owner, [])]
            return [each for _, each in sorted(entry for entries in found for entry in entries)]

    def forget(self, gone: str) -> None:
        """Take an id out; it comes back if it can be read again."""
        with self._lock:
            self._remove(gone)
            self._seen_ns = -1

    def _remove(self, gone: str) -> None:
        if (whose := self._whose.pop(gone, None)) is not None:
            created, owner = whose
            del self._of[owner][bisect_left(self._of[owner], (created, gone))]

    def _look(self, read: _Reader) -> None:
        changed_ns = self._folder.stat().st_mtime_ns
        if changed_ns != self._seen_ns:
            self._seen_ns = changed_ns if time.time_ns() - changed_ns > _SETTLED_S * 1e9 else -1
            with os.scandir(self._folder) as entries:
                names = [entry.name for entry in entries if entry.name.endswith(self._suffix)]
            ids = set(filter(_ID.fullmatch, (name.removesuffix(self._suffix) for name in names)))
            for gone in self._whose.keys() - ids:
                self._remove(gone)
            self._unread = ids - self._whose.keys()
        owners = set[str]()
        try:
            for each in list(self._unread):
                content = read(each)
                if content is not None:  # else it is not whole yet, or damaged
                    created, owner = self._whose[each] = content["created_at"], content.get(OWNER, "")
                    self._of.setdefault(owner, []).append((created, each))
                    self._unread.discard(each)
                    owners.add(owner)
        finally:
            for owner in owners:
                self._of[owner].sort()


def _read(path: Path, kinds: Mapping[str, type], known_id: str | None = None) -> dict[str, Any] | None:
    """An object with these fields, and this id. None: there is none, or it is damaged, which is warned of. Raises
    OSError.
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
    """An id as the name of a file. Raises ApiError: it is not one of ours."""
    if not name.startswith(prefix) or not _ID.fullmatch(name):
        raise ApiError(404, "there is no such id", code="not_found")
    return name
