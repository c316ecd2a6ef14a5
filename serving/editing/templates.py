"""Records of templates: what edits of one image read in place of what they do not compute (InstGenIE section 4.2).

A record is a folder with a safetensors file for every step and a manifest with their checksums. It is read when an edit
of its image comes, checked once in a process, and kept in memory within a bound, those read last longest.
"""

import contextlib
import hashlib
import json
import os
import shutil
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from ...data.errors import RunError, UsageError
from ...data.files import atomic_folder, sha256_of, write_json

VERSION = 1
MEMORY_MB, DISK_MB = 2_000.0, 20_000.0
MANIFEST = "manifest.json"
Seen = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class TemplateKey:
    """Which record suits an edit.

    Attributes:
        about: all that a record depends on: the model and its files, dtype, schedule, image, size, prompt, seed, rows.
    """

    about: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """Names the folder."""
        return hashlib.sha256(json.dumps([VERSION, self.about], sort_keys=True).encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True, eq=False)
class TemplateRecord:
    """A record in memory; see `core.prepared.Template`.

    Attributes:
        steps: of every step and row, what operators have seen, by name: [cells, entries of a cell, ...].
        device: of the model.
    """

    steps: Sequence[Sequence[Seen]]
    device: torch.device

    def seen(self, step: int) -> Sequence[Seen]:
        """See `core.prepared.Template`."""
        return [{name: tensor.to(self.device) for name, tensor in row.items()} for row in self.steps[step]]

    @property
    def num_bytes(self) -> int:
        """What it holds."""
        return sum(tensor.nbytes for rows in self.steps for row in rows for tensor in row.values())


class TemplateStore:
    """The records of one model in a folder, and those in memory. Any thread may use it.

    Args:
        folder: of the workspace.
        memory_mb: most that is kept in memory; a record that is larger is read from its files by every edit.
        disk_mb: most that is kept in the folder; the records that were read longest ago make room for a new one.
    """

    def __init__(self, folder: Path, *, memory_mb: float = MEMORY_MB, disk_mb: float = DISK_MB) -> None:
        self.folder, self._most_bytes, self._most_disk_bytes = folder, memory_mb * 1e6, disk_mb * 1e6
        self._lock = threading.Lock()
        self._held: OrderedDict[str, TemplateRecord] = OrderedDict()
        self._checked: set[str] = set()

    def find(self, key: TemplateKey, device: torch.device) -> TemplateRecord | None:
        """The record for a key; None: there is none, or it is damaged, which is warned of once, and put aside."""
        digest = key.digest
        with self._lock:
            if (held := self._held.get(digest)) is not None:
                self._held.move_to_end(digest)
                return held
            if not (self.folder / digest / MANIFEST).is_file():
                return None
            try:
                found = self._read(digest, device)
            except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
                self._put_aside(digest, error)
                return None
            self._hold(digest, found)
            with contextlib.suppress(OSError):  # the folder may be read only
                os.utime(self.folder / digest / MANIFEST)
            return found

    def add(self, key: TemplateKey, record: TemplateRecord) -> Path:
        """Take over a record: into memory, and into the folder unless it is there already.

        Raises:
            RunError: it holds numbers that are not finite.
            OSError: it cannot be written; it is in memory then, if there is room.
        """
        for rows in record.steps:
            for row in rows:
                if not all(bool(tensor.isfinite().all()) for tensor in row.values()):
                    raise RunError("the template's passes give numbers that are not finite: nothing is recorded")
        place = self.folder / key.digest
        with self._lock:
            self._hold(key.digest, record)
        if not (place / MANIFEST).is_file():
            with atomic_folder(place) as temporary:
                files = {}
                for step, rows in enumerate(record.steps):
                    name = f"step-{step:04}.safetensors"
                    content = {
                        f"{row}.{operator}": tensor.contiguous().cpu()
                        for row, each in enumerate(rows)
                        for operator, tensor in each.items()
                    }
                    save_file(content, temporary / name)
                    files[name] = sha256_of(temporary / name)
                manifest = {"version": VERSION, "about": key.about, "bytes": record.num_bytes, "files": files}
                write_json(temporary / MANIFEST, manifest | {"created": time.time()})
            self._make_room(key.digest)
        self._checked.add(key.digest)
        return place

    def list(self) -> list[dict[str, Any]]:
        """The manifests of all records, the newest first, with their `id`; damaged ones have an `error`."""
        found = []
        for path in self.folder.glob(f"*/{MANIFEST}") if self.folder.is_dir() else ():
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
                found.append({"id": path.parent.name, **content})
            except (OSError, ValueError) as error:
                found.append({"id": path.parent.name, "error": str(error), "created": 0.0})
        return sorted(found, key=lambda each: -each["created"])

    def check(self, template_id: str) -> None:
        """Compare a record with its checksums. Raises RunError: it is damaged; UsageError: there is none of this id."""
        self._require(template_id)
        try:
            self._checked.discard(template_id)
            self._read(template_id, torch.device("cpu"))
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise RunError(f"template {template_id} is damaged: {error}") from error

    def remove(self, template_id: str) -> None:
        """Delete a record. Raises UsageError: there is none of this id."""
        self._require(template_id)
        with self._lock:
            self._held.pop(template_id, None)
        self._delete(template_id)

    def _make_room(self, kept: str) -> None:
        """Delete the records that were read longest ago, but not this one, until the others fit into the folder."""
        found = []
        for each in self.list():
            with contextlib.suppress(OSError):  # another process has deleted it
                read_s = (self.folder / each["id"] / MANIFEST).stat().st_mtime
                found.append((read_s, each["id"], each.get("bytes", 0)))
        total = sum(size for _, _, size in found)
        for _, template_id, size in sorted(found):
            if total <= self._most_disk_bytes:
                return
            if template_id != kept:
                self._delete(template_id)
                total -= size

    def _delete(self, template_id: str) -> None:
        """Whoever reads it meanwhile finds all of it, or nothing."""
        gone = self.folder / f".{template_id}.{time.time_ns()}"
        with contextlib.suppress(FileNotFoundError):  # another process has deleted it
            (self.folder / template_id).rename(gone)
            shutil.rmtree(gone)

    def _require(self, template_id: str) -> None:
        known = [each["id"] for each in self.list()]
        if template_id not in known:
            raise UsageError(f"there is no template {template_id!r} in {self.folder}, but {', '.join(known) or 'none'}")

    def _read(self, digest: str, device: torch.device) -> TemplateRecord:
        place = self.folder / digest
        manifest = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
        if manifest["version"] != VERSION or TemplateKey(manifest["about"]).digest != digest:
            raise ValueError("the manifest is of another template")
        steps = []
        for name, checksum in sorted(manifest["files"].items()):
            content = (place / name).read_bytes()
            if digest not in self._checked and hashlib.sha256(content).hexdigest() != checksum:
                raise ValueError(f"{name} has another checksum than its manifest says")
            rows: list[dict[str, Tensor]] = [{} for _ in range(manifest["about"]["rows"])]
            for key, tensor in load(content).items():
                row, _, operator = key.partition(".")
                rows[int(row)][operator] = tensor
            steps.append(rows)
        self._checked.add(digest)
        return TemplateRecord(steps, device)

    def _hold(self, digest: str, record: TemplateRecord) -> None:
        if record.num_bytes > self._most_bytes:
            return
        self._held[digest] = record
        while sum(each.num_bytes for each in self._held.values()) > self._most_bytes:
            self._held.popitem(last=False)

    def _put_aside(self, digest: str, error: Exception) -> None:
        place = self.folder / digest
        aside = place.with_name(f"{digest}-{time.time_ns()}.bad")
        with contextlib.suppress(OSError):  # another process has done it, or the folder is read only
            place.rename(aside)
        warnings.warn(f"template {digest} is damaged and was put aside as {aside}: {error}", stacklevel=3)
