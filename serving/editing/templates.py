"""Records of templates, which edits of an image read in place of what they do not compute (InstGenIE section 4.2).

A manifest beside the files of a record holds their checksums; each process verifies them when it first reads the
record. Records are cached in memory up to a bound, with LRU eviction; larger ones are read step by step.
"""

import contextlib
import hashlib
import json
import os
import shutil
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ...data.errors import RunError, UsageError
from ...data.fair_store import FairStore, largest
from ...data.files import (
    atomic_folder,
    lock_folder,
    private_folder,
    quarantine,
    remove_leftovers,
    sha256_of,
    write_json,
)
from ...data.requests import Request
from ...data.templates import Keep
from ..core.prepared import RecordedRow
from ..core.record_key import VERSION, RecordKey, digest_of
from ..options import TemplateTiers
from .records import FileSteps, MemorySteps, TemplateRecord, content_of, file_of, read_step
from .staging import Staging

MANIFEST = "manifest.json"
_DAMAGE = (FileNotFoundError, ValueError, KeyError, TypeError, SafetensorError)


class TemplateStore:
    """Records of one model, in a folder and in memory. Any thread may use it.

    Args:
        folder: folder in the workspace.
        tiers: bounds on disk, memory and staging. A record that is larger than the memory is read from its files at
            every step. In the folder, the least recently read records of the owner that has most are evicted for a new
            one, except those whose files are in use.
        link_mbps: limit in megabytes per second on reading steps from files. With a limit, all records are read from
            their files at every step, and none is kept in memory. None for the speed of the disk.

    Attributes:
        folder: see above.
        staging: steps that are read ahead or in use.
        num_added: number of records added.
    """

    def __init__(self, folder: Path, tiers: TemplateTiers | None = None, *, link_mbps: float | None = None) -> None:
        tiers = tiers or TemplateTiers()
        self.folder, self._max_disk_bytes = folder, tiers.disk_mb * 1e6
        self._max_bytes = tiers.memory_mb * 1e6 if link_mbps is None else 0.0
        self.staging = Staging(tiers.staging_mb * 1e6, link_mbps)
        self.num_added = 0
        self._lock = threading.Lock()
        self._in_memory: FairStore[TemplateRecord] = FairStore(self._max_bytes)
        self._checked: set[str] = set()

    @property
    def num_memory_bytes(self) -> int:
        """Size of the records in memory."""
        return int(self._in_memory.size)

    def find(self, key: RecordKey, device: torch.device) -> TemplateRecord | None:
        """Return the record for a key, or None if there is none. A damaged record is put aside with a warning.

        Raises RunError: the record exists but cannot be read.
        """
        digest = key.digest
        with self._lock:
            if (known := self._in_memory.get(digest)) is not None:
                self._in_memory.touch(digest)
                return known
            manifest = self.folder / digest / MANIFEST
            if not manifest.is_file():
                return None
            try:
                with contextlib.ExitStack() as reading:
                    # Others may share the folder, and make room in it.
                    reading.enter_context(lock_folder(self.folder / digest, is_shared=True))
                    self._check(digest)
                    found = self._read(digest, device)
                    if isinstance(found.source, FileSteps):
                        # As long as it is read from its files.
                        weakref.finalize(found, reading.pop_all().close)
            except _DAMAGE as error:
                if not manifest.is_file():  # another process has deleted it
                    return None
                quarantine(self.folder / digest, f"template {digest}", error)
                return None
            except OSError as error:
                raise RunError(f"template {digest} in {self.folder} cannot be read: {error}") from error
            self._cache_in_memory(key, found)
            with contextlib.suppress(OSError):  # the folder may be read-only
                os.utime(self.folder / digest / MANIFEST)
            return found

    def add(self, key: RecordKey, steps: Iterable[Sequence[RecordedRow]], device: torch.device) -> None:
        """Add a record, step by step: to the folder unless it is there already, and to memory if it fits.

        Raises:
            RunError: the record holds numbers that are not finite, or is larger than the bound on the folder.
            OSError: the record cannot be written; it is still kept in memory if it fits.
        """
        digest, place = key.digest, self.folder / key.digest
        collector, failure = _StepCollector(self._max_bytes), None
        recorded = collector.collect(steps)
        if not (place / MANIFEST).is_file():
            try:
                private_folder(self.folder)
                with atomic_folder(place, is_private=True) as temporary:
                    self._write(key, recorded, collector, temporary)
                self._checked.add(digest)
            except OSError as error:
                # Another process may have written the record first.
                failure = None if (place / MANIFEST).is_file() else error
        for _ in recorded:  # consume the steps that were not written
            pass
        if collector.steps is not None:
            source = MemorySteps(collector.steps, collector.num_bytes, device)
            with self._lock:
                self._cache_in_memory(key, TemplateRecord(source, self.staging))
        if failure is not None:
            raise failure
        self.num_added += 1
        self._make_room(key)

    def _write(
        self, key: RecordKey, steps: Iterator[Sequence[RecordedRow]], collector: "_StepCollector", folder: Path
    ) -> None:
        files = {}
        for step, rows in enumerate(steps):
            if collector.num_bytes > self._max_disk_bytes:
                raise RunError(
                    f"the template's record is larger than {self._max_disk_bytes / 1e6:,.0f} MB, which is all that "
                    f"{self.folder} may hold"
                )
            content = content_of(rows)
            if step == 0:
                # An estimate: all steps are about as large as the first.
                self._make_room(key, len(content) * key.num_inference_steps)
            (folder / file_of(step)).write_bytes(content)
            files[file_of(step)] = hashlib.sha256(content).hexdigest()
        manifest = {"version": VERSION, "about": key.about, "bytes": collector.num_bytes, "files": files}
        write_json(folder / MANIFEST, manifest | {"created": time.time()})

    def list(self) -> list[dict[str, Any]]:
        """Return the manifests of all records, newest first, with their `id`; damaged records have an `error`.

        Raises OSError: the folder cannot be read.
        """
        found = []
        for place in self.folder.iterdir() if self.folder.is_dir() else ():
            # Hidden folders are records that are being written or deleted.
            if place.name.startswith(".") or not place.is_dir():
                continue
            try:
                content = _manifest_of(place)
                found.append({"id": place.name, **content, "created": float(content["created"])})
            except (*_DAMAGE, OSError) as error:
                found.append({"id": place.name, "error": str(error) or type(error).__name__, "created": 0.0})
        return sorted(found, key=lambda each: -each["created"])

    def require_generation(self, request: Request, keep: Keep) -> None:
        """Raise UsageError unless there is a record, of any model, of the generation of an edit's image."""
        key = RecordKey.of(request)
        assert key is not None, "only edits of a template have records"
        key = replace(key, of_model=(("keep", keep),))
        wanted = key.about
        del wanted["rows"]  # only the model knows how many rows a pass has
        if not any(wanted.items() <= each["about"].items() for each in self.list() if "about" in each):
            raise no_generation(key)

    def check(self, template_id: str) -> None:
        """Verify the checksums of a record. Raises RunError: it is damaged; UsageError: there is no such record."""
        self._require(template_id)
        self._checked.discard(template_id)
        try:
            self._check(template_id)
        except (*_DAMAGE, OSError) as error:
            raise RunError(f"template {template_id} is damaged: {error}") from error

    def remove(self, template_id: str) -> None:
        """Delete a record. Raises UsageError: there is no such record."""
        self._require(template_id)
        with self._lock:
            self._in_memory.pop(template_id)
        self._delete(template_id)

    def _make_room(self, protected: RecordKey, num_bytes: float = 0.0) -> None:
        """Delete leftovers of killed processes, and evict the least recently read records of the owners that have most
        until `num_bytes` more fit.

        The record `protected` is never evicted.
        """
        remove_leftovers(self.folder)
        found: list[tuple[float, str, int, str]] = []
        for each in self.list():
            with contextlib.suppress(OSError):  # another process has deleted it
                place = self.folder / each["id"]
                manifest = place / MANIFEST
                read_s = (manifest if manifest.exists() else place).stat().st_mtime
                size = sum(file.stat().st_size for file in place.iterdir())
                found.append((read_s, each["id"], size, each.get("about", {}).get("owner", "")))
        sizes = {protected.owner: num_bytes}
        for _, _, size, owner in found:
            sizes[owner] = sizes.get(owner, 0.0) + size
        may_go = [each for each in sorted(found) if each[1] != protected.digest]
        while may_go and sum(sizes.values()) > self._max_disk_bytes:
            owner = largest({each[3]: sizes[each[3]] for each in may_go})
            gone = next(each for each in may_go if each[3] == owner)
            may_go.remove(gone)
            with contextlib.suppress(FileNotFoundError), lock_folder(self.folder / gone[1]) as is_free:
                if is_free:  # else it is read, by whichever process
                    self._delete(gone[1])
                    sizes[owner] -= gone[2]

    def _delete(self, template_id: str) -> None:
        """Delete a record so that concurrent readers find either all of it or nothing."""
        gone = self.folder / f".{template_id}.{time.time_ns()}"
        with contextlib.suppress(FileNotFoundError):  # another process has deleted it
            (self.folder / template_id).rename(gone)
            shutil.rmtree(gone)

    def _require(self, template_id: str) -> None:
        known = [each["id"] for each in self.list()]
        if template_id not in known:
            raise UsageError(f"there is no template {template_id!r} in {self.folder}, but {', '.join(known) or 'none'}")

    def _check(self, digest: str) -> None:
        """Verify the checksums of a record, once per process. Raises an error of `_DAMAGE`, or OSError."""
        if digest in self._checked:
            return
        place = self.folder / digest
        for name, checksum in _manifest_of(place)["files"].items():
            if sha256_of(place / name) != checksum:
                raise ValueError(f"{name} has another checksum than its manifest says")
        self._checked.add(digest)

    def _read(self, digest: str, device: torch.device) -> TemplateRecord:
        place = self.folder / digest
        content = _manifest_of(place)
        num_bytes, names = content["bytes"], sorted(content["files"])
        if num_bytes > self._max_bytes:
            source = FileSteps(place, len(names), content["about"]["rows"], num_bytes, device)
        else:
            source = MemorySteps([read_step(place / name) for name in names], num_bytes, device)
        return TemplateRecord(source, self.staging)

    def _cache_in_memory(self, key: RecordKey, record: TemplateRecord) -> None:
        if isinstance(record.source, MemorySteps):
            self._in_memory.put(key.owner, key.digest, record, record.num_bytes)


class _StepCollector:
    """Collector of a record's steps on their way to the folder.

    Attributes:
        num_bytes: size of the steps so far.
        steps: the steps so far; None if they do not fit into memory.
    """

    def __init__(self, max_bytes: float) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self.steps: list[Sequence[RecordedRow]] | None = []

    def collect(self, steps: Iterable[Sequence[RecordedRow]]) -> Iterator[Sequence[RecordedRow]]:
        """Copy the steps to the CPU, because all together exceed the memory of a device; keep and yield them.

        Raises RunError: a number is not finite.
        """
        for step in steps:
            rows = [{name: tensor.cpu().contiguous() for name, tensor in row.items()} for row in step]
            tensors = [tensor for row in rows for tensor in row.values()]
            if not all(bool(tensor.isfinite().all()) for tensor in tensors):
                raise RunError("the template's passes give numbers that are not finite: nothing is recorded")
            self.num_bytes += sum(tensor.nbytes for tensor in tensors)
            if self.num_bytes > self._max_bytes:
                self.steps = None
            elif self.steps is not None:
                self.steps.append(rows)
            yield rows


def no_generation(key: RecordKey) -> UsageError:
    """Return the error for an edit whose image has no record of its generation."""
    about = key.about
    return UsageError(
        f"there is no record of the image's generation with {about['num_inference_steps']} steps, guidance scale "
        f"{about['guidance']:g} and --keep {about['keep']}: psctl generate --save-template makes it"
    )


def _manifest_of(place: Path) -> dict[str, Any]:
    """Read the manifest of a record. Raises an error of `_DAMAGE`: it is missing, or belongs to another record."""
    content = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
    if content["version"] != VERSION or digest_of(content["about"]) != place.name:
        raise ValueError("it was put aside, or its manifest is of another template")
    return content
