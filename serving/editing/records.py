"""The record of a template, in memory or in one file per step (InstGenIE section 4.2)."""

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load, save
from torch import Tensor

from ...data.templates import unit_of
from ..core.prepared import RecordedRow
from .link import RecordLink
from .staging import StagedSteps, Staging
from .uploads import LoadedUnit, PackedRows, Uploads, uploads_to

LATENTS, END = "latents", "end"
"""Keys in the first row of a generation's record: latents (1, channels, h, w) before each step, and the final ones."""
_MAX_OPEN = 4
"""Most open files of one record; edits at one step need two."""


class FileSteps:
    """Steps in memory-mapped files, as a `StepSource`.

    Args:
        folder: folder with the files.
        uploads: copies to the model's device; None for the CPU.
    """

    def __init__(self, folder: Path, uploads: Uploads | None) -> None:
        self.folder, self._uploads = folder, uploads
        # The open files, by step, with the keys of each unit.
        self._files: OrderedDict[int, tuple[Any, Mapping[str, Sequence[str]]]] = OrderedDict()

    def unit(self, step: int, name: str) -> LoadedUnit:
        """Read the tensors of one unit at a step from its file."""
        file, keys = self._files.get(step) or self._open(step)
        rows: dict[int, dict[str, Tensor]] = defaultdict(dict)
        for key in keys.get(name, ()):
            row, _, operator = key.partition(".")
            rows[int(row)][operator] = file.get_tensor(key)
        # Copying reads the mapped file here, rather than at the first use of a tensor.
        if self._uploads is not None:
            return self._uploads.send(PackedRows(rows, is_pinned=True))
        return LoadedUnit({row: {name: tensor.clone() for name, tensor in seen.items()} for row, seen in rows.items()})

    def _open(self, step: int) -> tuple[Any, Mapping[str, Sequence[str]]]:
        file, keys = safe_open(self.folder / file_of(step), "pt"), defaultdict[str, list[str]](list)
        for key in file.keys():  # noqa: SIM118  it is no dictionary
            keys[unit_of(key.partition(".")[2])].append(key)
        self._files[step] = file, keys
        while len(self._files) > _MAX_OPEN:
            self._files.popitem(last=False)
        return file, keys


class HostSteps:
    """Steps in pinned memory, from which a CUDA device copies asynchronously, as a `StepSource`.

    Args:
        steps: recorded tensors of each step and row, by operator name.
        uploads: copies to the device.

    Attributes:
        steps: the same tensors, in pinned memory.
    """

    def __init__(self, steps: Sequence[Sequence[RecordedRow]], uploads: Uploads) -> None:
        self._uploads = uploads
        self._packed: list[dict[str, PackedRows]] = []
        for rows in steps:
            units: dict[str, dict[int, dict[str, Tensor]]] = defaultdict(lambda: defaultdict(dict))
            for row, seen in enumerate(rows):
                for operator, tensor in seen.items():
                    units[unit_of(operator)][row][operator] = tensor
            self._packed.append({unit: PackedRows(each, is_pinned=True) for unit, each in units.items()})
        self.steps = [
            [
                {name: tensor for each in units.values() for name, tensor in each.rows().get(row, {}).items()}
                for row in range(len(steps[0]))
            ]
            for units in self._packed
        ]

    def unit(self, step: int, name: str) -> LoadedUnit:
        """Start the upload of one unit at a step."""
        packed = self._packed[step].get(name)
        return LoadedUnit({}) if packed is None else self._uploads.send(packed)


class _LazyRow(dict[str, Tensor]):
    """Recorded tensors of a row by operator name, each fetched at its first access."""

    def __init__(self, fetch: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._fetch = fetch

    def __missing__(self, operator: str) -> Tensor:
        self[operator] = found = self._fetch(operator)
        return found


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class TemplateRecord:
    """A record in memory or in files, as a `core.prepared.Template`.

    Attributes:
        device: device of the model.
        num_bytes: size of all steps.
        steps: recorded tensors of each step and row, by operator name: [cells, entries of a cell, ...]. None if they
            are in files.
        staged: reads the steps from files, or from memory for another device; None if the model reads `steps`.
    """

    device: torch.device
    num_bytes: int
    steps: Sequence[Sequence[RecordedRow]] | None
    staged: StagedSteps | None = None

    def latents(self, first: int) -> Tensor:
        """Return the latents of a generation before each step from `first` on, and at the end.

        Their shape is (steps + 1, channels, h, w).
        """
        if self.steps is not None:
            found = [rows[0][LATENTS] for rows in self.steps[first:]] + [self.steps[-1][0][END]]
        else:
            assert self.staged is not None
            assert isinstance(self.staged.source, FileSteps)
            files = [str(path) for path in sorted(self.staged.source.folder.glob("step-*.safetensors"))[first:]]
            found = [_read_one(path, LATENTS) for path in files] + [_read_one(files[-1], END)]
        return torch.cat(found).to(self.device)

    def expect(self, step: int, units: Sequence[str]) -> None:
        """Start to read these units of a step ahead, in this order; nothing happens if the model reads `steps`."""
        if self.staged is not None:
            self.staged.expect(step, units)

    def read_rows(self, step: int, units: Sequence[str]) -> Sequence[RecordedRow]:
        """Return the recorded tensors of each row at a step; each is fetched at its first access."""
        if self.staged is None:
            assert self.steps is not None
            fetches = [row.__getitem__ for row in self.steps[step]]
        else:
            reading = self.staged.read(step, units)
            fetches = [partial(reading.wait_for, row) for row in range(self.staged.num_rows)]
        return [_LazyRow(fetch) for fetch in fetches]


def in_memory(
    device: torch.device, num_bytes: int, steps: Sequence[Sequence[RecordedRow]], link: RecordLink, staging: Staging
) -> TemplateRecord:
    """Return a record in memory: in pinned memory that is uploaded through the link, if the model is not on the CPU."""
    if (uploads := uploads_to(device)) is None:
        return TemplateRecord(device, num_bytes, steps)
    host = HostSteps(steps, uploads)
    staged = StagedSteps(host, len(steps), len(steps[0]), num_bytes, link, staging)
    return TemplateRecord(device, num_bytes, host.steps, staged)


def from_files(
    device: torch.device,
    num_bytes: int,
    folder: Path,
    num_steps: int,
    num_rows: int,
    link: RecordLink,
    staging: Staging,
) -> TemplateRecord:
    """Return a record that is read from its files at every step."""
    source = FileSteps(folder, uploads_to(device))
    staged = StagedSteps(source, num_steps, num_rows, num_bytes, link, staging)
    return TemplateRecord(device, num_bytes, None, staged)


@contextmanager
def in_files(
    device: torch.device, folder: Path, rows: Sequence[RecordedRow], count: int, num_steps: int
) -> Iterator[list[TemplateRecord]]:
    """Provide records whose steps are all alike, in files that exist until the context ends.

    Args:
        device: device of the model.
        folder: folder for the files. All records and steps share one file.
        rows: recorded tensors of each row of a step.
        count: number of records.
        num_steps: number of steps of each record.
    """
    with TemporaryDirectory(dir=folder, prefix=".record-") as name:
        place = Path(name)
        (place / file_of(0)).write_bytes(content_of(rows))
        for step in range(1, num_steps):
            (place / file_of(step)).symlink_to(file_of(0))
        link, staging = RecordLink(), Staging(math.inf)
        num_bytes = num_steps * sum(tensor.nbytes for row in rows for tensor in row.values())
        yield [from_files(device, num_bytes, place, num_steps, len(rows), link, staging) for _ in range(count)]


def file_of(step: int) -> str:
    """Return the name of a step's file."""
    return f"step-{step:04}.safetensors"


def content_of(rows: Sequence[RecordedRow]) -> bytes:
    """Return the content of a step's file, in the form that `read_step` reads."""
    named = {f"{row}.{operator}": tensor for row, each in enumerate(rows) for operator, tensor in each.items()}
    return save({name: tensor.cpu().contiguous() for name, tensor in named.items()})


def _read_one(path: str, operator: str) -> Tensor:
    with safe_open(path, "pt") as file:
        return file.get_tensor(f"0.{operator}")


def read_step(path: Path) -> list[dict[str, Tensor]]:
    """Read the recorded tensors of each row of a step.

    Raises OSError, SafetensorError or ValueError: the file is missing or damaged.
    """
    rows: dict[int, dict[str, Tensor]] = {}
    for key, tensor in load(path.read_bytes()).items():
        row, _, operator = key.partition(".")
        rows.setdefault(int(row), {})[operator] = tensor
    return [rows[row] for row in range(len(rows))]
