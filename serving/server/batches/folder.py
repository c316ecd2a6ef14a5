"""The folder of files and batches: what lies where, and whose it is. Only its owner can read it. No torch."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ....data.files import private_folder, put_aside, write_json
from ....data.records import json_type
from ..errors import ApiError
from ..fields import shown
from .file import ERROR_FILE, OUTPUT_FILE

OWNER = "owner"
"""In the JSON of files and batches: whose they are. It is not told."""
_FILE, _BATCH = "file-", "batch_"
_ID = re.compile(rf"({_FILE}|{_BATCH})[A-Za-z0-9]{{1,64}}", re.ASCII)
_FIELDS_OF_FILE = {"filename": str, "created_at": int, "purpose": str}
_FIELDS_OF_BATCH = {"id": str, "status": str, "created_at": int, "input_file_id": str, "request_counts": dict}
_Whose = tuple[int, str]
"""When it was created, and its owner, of which neither changes."""


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
        self._whose: dict[str, _Whose] = {}
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
        self._whose.pop(file_id, None)

    def read_batch(self, batch_id: str) -> dict[str, Any] | None:
        """What is kept of a batch; None: there is none."""
        found = _read(self.batch(batch_id) / "batch.json", _FIELDS_OF_BATCH, batch_id)
        if found is not None and self._rename_owner(found):
            self.write_batch(found)
        return found

    def write_batch(self, batch: Mapping[str, Any]) -> None:
        """Keep what is known of a batch."""
        private_folder(self.batch(batch["id"]))
        write_json(self.batch(batch["id"]) / "batch.json", dict(batch), is_private=True)

    def file_ids(self, owner: str | None = None) -> list[str]:
        """Files of clients, or of one, the newest first. It reads what it has not read before of each."""
        return self._newest([path.stem for path in self._files.glob(f"{_FILE}*.jsonl")], self.read_file, owner)

    def batch_ids(self, owner: str | None = None) -> list[str]:
        """Batches, likewise."""
        return self._newest([path.name for path in self._batches.glob(f"{_BATCH}*")], self.read_batch, owner)

    def _rename_owner(self, content: dict[str, Any]) -> bool:
        """Write the name of the owner as it is now; returns whether it was another."""
        before = content.get(OWNER, "")
        content[OWNER] = self._renamed.get(before, before)
        return content[OWNER] != before

    def _newest(self, ids: list[str], read: Callable[[str], dict[str, Any] | None], owner: str | None) -> list[str]:
        found: list[tuple[int, str]] = []
        for each in filter(_ID.fullmatch, ids):
            whose = self._whose.get(each)
            if whose is None:
                content = read(each)
                if content is None:
                    continue
                whose = self._whose[each] = content["created_at"], content.get(OWNER, "")
            if owner is None or whose[1] == owner:
                found.append((whose[0], each))
        return [each for _, each in sorted(found, reverse=True)]


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
        put_aside(path, str(path), error)
        return None
    return content


def _safe(name: str, prefix: str) -> str:
    """An id as the name of a file. Raises ApiError: it is not one of ours."""
    if not name.startswith(prefix) or not _ID.fullmatch(name):
        raise ApiError(404, "there is no such id", code="not_found")
    return name
