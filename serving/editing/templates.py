"""Records of templates: what edits of one image read in place of what they do not compute (InstGenIE section 4.2).

A manifest beside a record's files has their checksums, which a process compares when it first reads it. Records that
fit are kept in memory within a bound, those read last longest; larger ones are read step by step.
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
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ...data.errors import RunError, UsageError
from ...data.fair_store import FairStore, largest
from ...data.files import atomic_folder, private_folder, put_aside, remove_leftovers, sha256_of, write_json
from ...data.requests import Request
from ...data.templates import Keep
from ..core.prepared import Seen
from ..options import TemplateTiers
from .keys import VERSION, TemplateKey, facts_of, no_generation
from .link import Link
from .records import TemplateRecord, content_of, file_of, from_files, in_memory, read_step
from .staging import Staging

MANIFEST = "manifest.json"
_DAMAGE = (FileNotFoundError, ValueError, KeyError, TypeError, SafetensorError)


class TemplateStore:
    """The records of one model in a folder, and those in memory. Any thread may use it.

    Args:
        folder: of the workspace.
        tiers: what they may take. A record that is larger than the memory is read from its files at every step. In the
            folder the records that were read longest ago, of the owner who has most, make room for a new one, but none
            whose files are read at the time.
        link_mbps: reading a step from its file is throttled to so many megabytes per second, and every record is read
            so, whatever the memory is: none is kept there. None: it is as fast as the disk.

    Attributes:
        folder: see above.
        staging: steps that are read ahead, or in use.
        num_added: records that were taken over.
    """

    def __init__(self, folder: Path, tiers: TemplateTiers | None = None, *, link_mbps: float | None = None) -> None:
        tiers = tiers or TemplateTiers()
        self.folder, self._most_disk_bytes = folder, tiers.disk_mb * 1e6
        self._most_bytes = tiers.memory_mb * 1e6 if link_mbps is None else 0.0
        self.staging = Staging(tiers.staging_mb * 1e6)
        self.num_added = 0
        self._lock = threading.Lock()
        self._link = Link(link_mbps)
        # Those that are read step by step, as long as an edit does.
        self._streamed: weakref.WeakValueDictionary[str, TemplateRecord] = weakref.WeakValueDictionary()
        self._held: FairStore[TemplateRecord] = FairStore(self._most_bytes)
        self._checked: set[str] = set()

    @property
    def num_held_bytes(self) -> int:
        """Of the records in memory."""
        return int(self._held.size)

    def find(self, key: TemplateKey, device: torch.device) -> TemplateRecord | None:
        """The record for a key; None: there is none, or it is damaged, which is warned of, and put aside.

        Raises RunError: it is there, but cannot be read.
        """
        digest = key.digest
        with self._lock:
            if (held := self._held.get(digest)) is not None:
                self._held.use(digest)
                return held
            if not (self.folder / digest / MANIFEST).is_file():
                return None
            try:
                self._check(digest)
                found = self._read(digest, device)
            except _DAMAGE as error:
                put_aside(self.folder / digest, f"template {digest}", error)
                return None
            except OSError as error:
                raise RunError(f"template {digest} in {self.folder} cannot be read: {error}") from error
            self._hold(key, found)
            with contextlib.suppress(OSError):  # the folder may be read only
                os.utime(self.folder / digest / MANIFEST)
            return found

    def add(self, key: TemplateKey, steps: Iterable[Sequence[Seen]], device: torch.device) -> None:
        """Take over a record, step by step: into the folder unless it is there already, and into memory if it fits.

        Raises:
            RunError: it holds numbers that are not finite, or is larger than all that the folder may hold.
            OSError: it cannot be written; it is in memory then, if it fits.
        """
        digest, place = key.digest, self.folder / key.digest
        kept, failure = _Kept(self._most_bytes), None
        recorded = kept.through(map(_on_cpu, steps))
        if not (place / MANIFEST).is_file():
            try:
                private_folder(self.folder)
                with atomic_folder(place, is_private=True) as temporary:
                    self._write(key, recorded, kept, temporary)
                self._checked.add(digest)
            except OSError as error:
                # Another process may have been the first to give it its name.
                failure = None if (place / MANIFEST).is_file() else error
        for _ in recorded:  # what was not written
            pass
        if kept.steps is not None:
            with self._lock:
                self._hold(key, in_memory(device, kept.num_bytes, kept.steps, self._link, self.staging))
        if failure is not None:
            raise failure
        self.num_added += 1
        self._make_room(key)

    def _write(self, key: TemplateKey, steps: Iterator[Sequence[Seen]], kept: "_Kept", folder: Path) -> None:
        files = {}
        for step, rows in enumerate(steps):
            if kept.num_bytes > self._most_disk_bytes:
                raise RunError(
                    f"the template's record is larger than {self._most_disk_bytes / 1e6:,.0f} MB, which is all that "
                    f"{self.folder} may hold"
                )
            content = content_of(rows)
            if step == 0:
                # About as large as all of them will be.
                self._make_room(key, len(content) * int(key.about["num_inference_steps"]))
            (folder / file_of(step)).write_bytes(content)
            files[file_of(step)] = hashlib.sha256(content).hexdigest()
        manifest = {"version": VERSION, "about": key.about, "bytes": kept.num_bytes, "files": files}
        write_json(folder / MANIFEST, manifest | {"created": time.time()})

    def list(self) -> list[dict[str, Any]]:
        """The manifests of all records, the newest first, with their `id`; damaged ones have an `error`.

        Raises OSError: the folder cannot be read.
        """
        found = []
        for place in self.folder.iterdir() if self.folder.is_dir() else ():
            # Hidden: those that are being written or deleted.
            if place.name.startswith(".") or not place.is_dir():
                continue
            try:
                content = _manifest_of(place)
                found.append({"id": place.name, **content, "created": float(content["created"])})
            except (*_DAMAGE, OSError) as error:
                found.append({"id": place.name, "error": str(error) or type(error).__name__, "created": 0.0})
        return sorted(found, key=lambda each: -each["created"])

    def require_generation(self, request: Request, keep: Keep) -> None:
        """Raise UsageError unless there is a record of the generation of an edit's image, by any model's schedule."""
        wanted = facts_of(request, keep).items()
        if not any(wanted <= each["about"].items() for each in self.list() if "about" in each):
            raise no_generation(request, keep)

    def check(self, template_id: str) -> None:
        """Compare a record with its checksums. Raises RunError: it is damaged; UsageError: there is none of this id."""
        self._require(template_id)
        self._checked.discard(template_id)
        try:
            self._check(template_id)
        except (*_DAMAGE, OSError) as error:
            raise RunError(f"template {template_id} is damaged: {error}") from error

    def remove(self, template_id: str) -> None:
        """Delete a record. Raises UsageError: there is none of this id."""
        self._require(template_id)
        with self._lock:
            self._held.pop(template_id)
        self._delete(template_id)

    def _make_room(self, kept: TemplateKey, num_bytes: float = 0.0) -> None:
        """Delete what killed processes have left, and the records that were read longest ago of the owners who have
        most, but not this one, until so much more of it fits into the folder.
        """
        remove_leftovers(self.folder)
        found: list[tuple[float, str, int, str]] = []
        for each in self.list():
            with contextlib.suppress(OSError):  # another process has deleted it
                place = self.folder / each["id"]
                manifest = place / MANIFEST
                read_s = (manifest if manifest.exists() else place).stat().st_mtime
                size = sum(file.stat().st_size for file in place.iterdir())
                found.append((read_s, each["id"], size, TemplateKey(each.get("about", {})).owner))
        sizes = {kept.owner: num_bytes}
        for _, _, size, owner in found:
            sizes[owner] = sizes.get(owner, 0.0) + size
        may_go = [each for each in sorted(found) if each[1] != kept.digest and each[1] not in self._streamed]
        while may_go and sum(sizes.values()) > self._most_disk_bytes:
            owner = largest({each[3]: sizes[each[3]] for each in may_go})
            gone = next(each for each in may_go if each[3] == owner)
            may_go.remove(gone)
            self._delete(gone[1])
            sizes[owner] -= gone[2]

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

    def _check(self, digest: str) -> None:
        """Raise what `_DAMAGE` names, or OSError, unless a record is whole; once in a process."""
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
        if content["bytes"] > self._most_bytes:
            found = from_files(
                device,
                content["bytes"],
                place,
                len(content["files"]),
                content["about"]["rows"],
                self._link,
                self.staging,
            )
            self._streamed[digest] = found
            return found
        steps = [read_step(place / name) for name in sorted(content["files"])]
        return in_memory(device, content["bytes"], steps, self._link, self.staging)

    def _hold(self, key: TemplateKey, record: TemplateRecord) -> None:
        if record.steps is not None:
            self._held.put(key.owner, key.digest, record, record.num_bytes)


class _Kept:
    """Steps of a record as they go by, for as long as they fit into memory.

    Attributes:
        num_bytes: of those that have gone by.
        steps: they; None: they do not fit.
    """

    def __init__(self, most_bytes: float) -> None:
        self._most_bytes = most_bytes
        self.num_bytes = 0
        self.steps: list[Sequence[Seen]] | None = []

    def through(self, steps: Iterable[Sequence[Seen]]) -> Iterator[Sequence[Seen]]:
        """The steps, which are kept. Raises RunError: a number is not finite."""
        for rows in steps:
            for row in rows:
                if not all(bool(tensor.isfinite().all()) for tensor in row.values()):
                    raise RunError("the template's passes give numbers that are not finite: nothing is recorded")
            self.num_bytes += sum(tensor.nbytes for row in rows for tensor in row.values())
            if self.num_bytes > self._most_bytes:
                self.steps = None
            elif self.steps is not None:
                self.steps.append(rows)
            yield rows


def _on_cpu(rows: Sequence[Seen]) -> Sequence[Seen]:
    """All steps together are more than a device holds."""
    return [{name: tensor.cpu().contiguous() for name, tensor in row.items()} for row in rows]


def _manifest_of(place: Path) -> dict[str, Any]:
    """The manifest of a record. Raises what `_DAMAGE` names: it has none, or that of another."""
    content = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
    if content["version"] != VERSION or TemplateKey(content["about"]).digest != place.name:
        raise ValueError("it was put aside, or its manifest is of another template")
    return content
