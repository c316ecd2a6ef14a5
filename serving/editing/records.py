"""The record of a template, in memory or in one file per step (InstGenIE section 4.2)."""

import itertools
import math
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load, save
from torch import Tensor

from ...data.templates import unit_of
from ..core.prepared import RecordedRow
from .staging import LazyRow, Staging
from .uploads import LoadedUnit, PackedRows, upload

LATENTS, END = "latents", "end"
"""Keys in the first row of a generation's record: latents (1, channels, h, w) before each step, and the final ones."""
_MAX_OPEN = 4
"""Most open files of one record; edits at one step need two."""


class FileSteps:
    """Steps in memory-mapped files, as a `StepSource`.

    Args:
        folder: folder with the files.
        num_steps, num_rows, num_bytes: see `StepSource`.
        device: device of the model.
    """

    def __init__(self, folder: Path, num_steps: int, num_rows: int, num_bytes: int, device: torch.device) -> None:
        self.num_steps, self.num_rows, self.num_bytes, self.device = num_steps, num_rows, num_bytes, device
        self._folder = folder
        # The open files, by step, with the keys of each unit.
        self._files: OrderedDict[int, tuple[Any, Mapping[str, Sequence[str]]]] = OrderedDict()

    def first_row(self, step: int, operator: str) -> Tensor:
        """Return a tensor of the first row at a step."""
        with safe_open(self._folder / file_of(step), "pt") as file:
            return file.get_tensor(f"0.{operator}")

    def unit(self, step: int, name: str) -> LoadedUnit:
        """Read the tensors of one unit at a step from its file."""
        file, keys = self._files.get(step) or self._open(step)
        rows: dict[int, dict[str, Tensor]] = defaultdict(dict)
        for key in keys.get(name, ()):
            row, _, operator = key.partition(".")
            rows[int(row)][operator] = file.get_tensor(key)
        # Copying reads the mapped file here, rather than at the first use of a tensor.
        if self.device.type != "cpu":
            return upload(PackedRows(rows, is_pinned=True), self.device)
        return LoadedUnit({row: {name: tensor.clone() for name, tensor in seen.items()} for row, seen in rows.items()})

    def _open(self, step: int) -> tuple[Any, Mapping[str, Sequence[str]]]:
        file, keys = safe_open(self._folder / file_of(step), "pt"), defaultdict[str, list[str]](list)
        for key in file.keys():  # noqa: SIM118  it is no dictionary
            keys[unit_of(key.partition(".")[2])].append(key)
        self._files[step] = file, keys
        while len(self._files) > _MAX_OPEN:
            self._files.popitem(last=False)
        return file, keys


class MemorySteps:
    """Steps in memory, as a `StepSource`. If the model is on a CUDA device, the memory is pinned, so that the device
    copies from it asynchronously.

    Args:
        steps: recorded tensors of each step and row, by operator name: [cells, entries of a cell, ...].
        num_bytes: size of all steps.
        device: device of the model.

    Attributes:
        steps: the same tensors, in pinned memory for a CUDA device.
    """

    def __init__(self, steps: Sequence[Sequence[RecordedRow]], num_bytes: int, device: torch.device) -> None:
        self.num_steps, self.num_rows, self.num_bytes, self.device = len(steps), len(steps[0]), num_bytes, device
        self.steps = steps
        self._packed: list[dict[str, PackedRows]] = []
        if device.type == "cpu":
            return
        for rows in steps:
            units: dict[str, dict[int, dict[str, Tensor]]] = defaultdict(lambda: defaultdict(dict))
            for row, seen in enumerate(rows):
                for operator, tensor in seen.items():
                    units[unit_of(operator)][row][operator] = tensor
            self._packed.append({unit: PackedRows(each, is_pinned=True) for unit, each in units.items()})
        self.steps = [
            [
                {name: tensor for each in units.values() for name, tensor in each.rows().get(row, {}).items()}
                for row in range(self.num_rows)
            ]
            for units in self._packed
        ]

    def first_row(self, step: int, operator: str) -> Tensor:
        """Return a tensor of the first row at a step."""
        return self.steps[step][0][operator]

    def unit(self, step: int, name: str) -> LoadedUnit:
        """Start the upload of one unit at a step."""
        packed = self._packed[step].get(name)
        return LoadedUnit({}) if packed is None else upload(packed, self.device)


class TemplateRecord:
    """A record in memory or in files, as a `core.prepared.Template`. Any thread may use it.

    Args:
        source: its steps. A model on the CPU reads those in memory in place.
        staging: holds the steps that are read ahead or in use otherwise.

    Attributes:
        source: see above.
        num_bytes: size of all steps.

    Raises:
        RunError: a step exceeds the bound of `staging`.
    """

    _numbers = itertools.count()

    def __init__(self, source: FileSteps | MemorySteps, staging: Staging) -> None:
        self.source, self.num_bytes = source, source.num_bytes
        self._in_place = source.steps if isinstance(source, MemorySteps) and source.device.type == "cpu" else None
        self._staging, self._number = staging, next(self._numbers)
        if self._in_place is None:
            staging.check(source)
            weakref.finalize(self, staging.evict, self._number)

    def latents(self, first: int) -> Tensor:
        """Return the latents of a generation before each step from `first` on, and at the end.

        Their shape is (steps + 1, channels, h, w).
        """
        source = self.source
        found = [source.first_row(step, LATENTS) for step in range(first, source.num_steps)]
        return torch.cat([*found, source.first_row(source.num_steps - 1, END)]).to(source.device)

    def expect(self, step: int, units: Sequence[str]) -> None:
        """Start to read these units of a step ahead, in this order; nothing happens if the step is read in place."""
        if self._in_place is None and step < self.source.num_steps:
            self._staging.read_ahead(self._number, self.source, step, units)

    def read_rows(self, step: int, units: Sequence[str]) -> Sequence[RecordedRow]:
        """Return the recorded tensors of each row at a step; each is fetched at its first access."""
        if self._in_place is None:
            return self._staging.read(self._number, self.source, step, units)
        return [LazyRow(row.__getitem__) for row in self._in_place[step]]


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
        staging = Staging(math.inf)
        num_bytes = num_steps * sum(tensor.nbytes for row in rows for tensor in row.values())
        yield [TemplateRecord(FileSteps(place, num_steps, len(rows), num_bytes, device), staging) for _ in range(count)]


def file_of(step: int) -> str:
    """Return the name of a step's file."""
    return f"step-{step:04}.safetensors"


def content_of(rows: Sequence[RecordedRow]) -> bytes:
    """Return the content of a step's file, in the form that `read_step` reads."""
    named = {f"{row}.{operator}": tensor for row, each in enumerate(rows) for operator, tensor in each.items()}
    return save({name: tensor.cpu().contiguous() for name, tensor in named.items()})


def read_step(path: Path) -> list[dict[str, Tensor]]:
    """Read the recorded tensors of each row of a step.

    Raises OSError, SafetensorError or ValueError: the file is missing or damaged.
    """
    rows: dict[int, dict[str, Tensor]] = {}
    for key, tensor in load(path.read_bytes()).items():
        row, _, operator = key.partition(".")
        rows.setdefault(int(row), {})[operator] = tensor
    return [rows[row] for row in range(len(rows))]
