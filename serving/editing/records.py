"""A record of a template in files, one for every step, or in memory (InstGenIE section 4.2)."""

import itertools
import math
import threading
import time
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import load, save
from torch import Tensor

from ...data.templates import unit_of
from ..core.threads import LoneThread
from .uploads import Loaded, Packed, Seen, Uploads

LATENTS, END = "latents", "end"
"""Of the first row of a record of a generation: its latents (1, channels, h, w) before each step; those at the end."""
_MOST_OPEN = 4
"""Files of one record; edits at one step need two."""


class Link:
    """What the records of a process are read through: one read after the other, in the order in which they were asked
    for.

    Args:
        mbps: megabytes (10^6 bytes) per second that pass at most; None for as many as there are.
    """

    def __init__(self, mbps: float | None = None) -> None:
        self._asked: SimpleQueue[_Asked | None] = SimpleQueue()
        self._uploads: dict[torch.device, Uploads] = {}
        is_over = threading.Event()
        # A pool's thread would be waited for when the process ends, however slow the link is.
        LoneThread(target=_read_what_is_asked, args=(self._asked, is_over, mbps), name="records").start()
        weakref.finalize(self, _end, self._asked, is_over)

    def uploads(self, device: torch.device) -> Uploads | None:
        """What copies to a device; None for the processor, which reads where things are."""
        if device.type == "cpu":
            return None
        return self._uploads.get(device) or self._uploads.setdefault(device, Uploads(device))

    def submit(self, read: Callable[[], Loaded]) -> "Future[Loaded]":
        """Have something read."""
        asked = _Asked(Future(), read, time.perf_counter())
        self._asked.put(asked)
        return asked.future


class _Asked(NamedTuple):
    future: "Future[Loaded]"
    read: Callable[[], Loaded]
    at_s: float


def _read_what_is_asked(queue: "SimpleQueue[_Asked | None]", is_over: threading.Event, mbps: float | None) -> None:
    free_s = 0.0
    while (asked := queue.get()) is not None:
        if not is_over.is_set() and asked.future.set_running_or_notify_cancel():
            free_s = _answer(asked, is_over, mbps, free_s)
        del asked  # while this thread waits for the next, nothing of the last one keeps the link alive


def _answer(asked: _Asked, is_over: threading.Event, mbps: float | None, free_s: float) -> float:
    """Read what is asked of a link that is free from some time on; returns from when on it is free then."""
    try:
        found = asked.read()
    except Exception as error:  # noqa: BLE001  whoever waits for it is told
        asked.future.set_exception(error)
        return free_s
    if mbps is not None:
        num_bytes = sum(tensor.nbytes for row in found.rows.values() for tensor in row.values())
        # From when the link was free, not from now: a thread that sleeps wakes up late.
        free_s = max(free_s, asked.at_s) + num_bytes / (mbps * 1e6)
        is_over.wait(max(0.0, free_s - time.perf_counter()))
    asked.future.set_result(found)
    return free_s


def _end(queue: "SimpleQueue[_Asked | None]", is_over: threading.Event) -> None:
    is_over.set()
    queue.put(None)


class StepSource(Protocol):
    """Where the steps of a record are read from."""

    def unit(self, step: int, name: str) -> Loaded:
        """What all rows hold of one unit at a step; the same step's units are asked for by one thread at a time.

        Raises OSError, SafetensorError or KeyError: the file is gone, or damaged.
        """
        ...


class FileSteps:
    """Steps in files, which are mapped; see `StepSource`.

    Args:
        folder: with the files.
        uploads: to the model's device; None: it is the processor.
    """

    def __init__(self, folder: Path, uploads: Uploads | None) -> None:
        self.folder, self._uploads = folder, uploads
        # The keys of each unit in the files that were read last.
        self._files: OrderedDict[int, tuple[Any, Mapping[str, Sequence[str]]]] = OrderedDict()

    def unit(self, step: int, name: str) -> Loaded:
        """See `StepSource`."""
        file, keys = self._files.get(step) or self._open(step)
        rows: dict[int, dict[str, Tensor]] = defaultdict(dict)
        for key in keys.get(name, ()):
            row, _, operator = key.partition(".")
            rows[int(row)][operator] = file.get_tensor(key)
        # The file is mapped: it is read here, not where a tensor is first used.
        if self._uploads is not None:
            return self._uploads.send(Packed(rows, is_pinned=True))
        return Loaded({row: {name: tensor.clone() for name, tensor in seen.items()} for row, seen in rows.items()})

    def _open(self, step: int) -> tuple[Any, Mapping[str, Sequence[str]]]:
        file, keys = safe_open(self.folder / file_of(step), "pt"), defaultdict[str, list[str]](list)
        for key in file.keys():  # noqa: SIM118  it is no dictionary
            keys[unit_of(key.partition(".")[2])].append(key)
        self._files[step] = file, keys
        while len(self._files) > _MOST_OPEN:
            self._files.popitem(last=False)
        return file, keys


class HostSteps:
    """Steps in memory from which a CUDA device copies by itself; see `StepSource`.

    Args:
        steps: of every step and row, what operators have seen.
        uploads: to the device.

    Attributes:
        steps: the same, in that memory.
    """

    def __init__(self, steps: Sequence[Sequence[Seen]], uploads: Uploads) -> None:
        self._uploads = uploads
        self._packed: list[dict[str, Packed]] = []
        for rows in steps:
            units: dict[str, dict[int, dict[str, Tensor]]] = defaultdict(lambda: defaultdict(dict))
            for row, seen in enumerate(rows):
                for operator, tensor in seen.items():
                    units[unit_of(operator)][row][operator] = tensor
            self._packed.append({unit: Packed(each, is_pinned=True) for unit, each in units.items()})
        self.steps = [
            [
                {name: tensor for each in units.values() for name, tensor in each.rows().get(row, {}).items()}
                for row in range(len(steps[0]))
            ]
            for units in self._packed
        ]

    def unit(self, step: int, name: str) -> Loaded:
        """See `StepSource`."""
        packed = self._packed[step].get(name)
        return Loaded({}) if packed is None else self._uploads.send(packed)


class _StagedStep:
    """A step of a record, unit by unit."""

    def __init__(self, read: Callable[[str], Loaded], link: Link) -> None:
        self._read, self._link = read, link
        self._loads: dict[str, Future[Loaded]] = {}
        self._lock = threading.Lock()

    def expect(self, units: Sequence[str]) -> None:
        """Have these units read, unless they are there, or being read; of others nothing that has not begun."""
        with self._lock:
            for unit in set(self._loads).difference(units):
                if self._loads[unit].cancel():
                    del self._loads[unit]
            for unit in units:
                load = self._loads.get(unit)
                if load is None or (load.done() and load.exception() is not None):
                    self._loads[unit] = self._link.submit(partial(self._read, unit))

    def wait_for(self, row: int, operator: str) -> Tensor:
        """Raises as `StepSource.unit`."""
        return self._loads[unit_of(operator)].result().take(row, operator)


@dataclass(slots=True, eq=False)
class _Held:
    """A step that is staged: what it takes, the pass that has read it last, and whether one is to read it yet."""

    staged: _StagedStep
    num_bytes: float
    read_by: int = -1
    is_awaited: bool = True


class Staging:
    """The steps of records that are read ahead or in use, on the model's device: within a bound. Any thread may use it.

    What a pass reads is there whatever the bound is; beside it only what fits is read ahead.

    Args:
        most_bytes: of all steps together.
    """

    def __init__(self, most_bytes: float) -> None:
        self._most_bytes = most_bytes
        self._held: OrderedDict[tuple[int, int], _Held] = OrderedDict()
        # Passes are told apart by what they read ahead, behind what they read.
        self._pass, self._has_read_ahead = 0, False
        self._lock = threading.RLock()  # a record may be let go of meanwhile

    @property
    def num_bytes(self) -> float:
        """Of all steps that are staged."""
        return sum(each.num_bytes for each in self._held.values())

    def read(self, record: int, step: int, num_bytes: float, make: Callable[[], _StagedStep]) -> _StagedStep:
        """Stage a step of a record (a number of its own) that a pass reads now, if it is not there yet."""
        with self._lock:
            self._pass += self._has_read_ahead
            self._has_read_ahead = False
            held = self._held.pop((record, step), None) or _Held(make(), num_bytes)
            self._make_room(held.num_bytes, lambda each: each.read_by != self._pass)
            held.read_by, held.is_awaited = self._pass, False
            self._held[record, step] = held
            return held.staged

    def ahead(self, record: int, step: int, num_bytes: float, make: Callable[[], _StagedStep]) -> _StagedStep | None:
        """Stage a step that a pass will read; None: there is no room for it beside what others read."""
        with self._lock:
            self._has_read_ahead = True
            held = self._held.pop((record, step), None)
            if held is None:
                if not self._make_room(num_bytes, lambda each: not each.is_awaited and each.read_by != self._pass):
                    return None
                held = _Held(make(), num_bytes)
            held.is_awaited = True
            self._held[record, step] = held
            return held.staged

    def read_all(self) -> None:
        """Say that a pass reads no more, and nothing ahead."""
        with self._lock:
            self._has_read_ahead = True

    def forget(self, record: int) -> None:
        """Let go of all steps of a record."""
        with self._lock:
            for key in [key for key in self._held if key[0] == record]:
                del self._held[key]

    def _make_room(self, num_bytes: float, may_go: Callable[[_Held], bool]) -> bool:
        """Let go of what was asked for longest ago; whether so many bytes fit then."""
        for key in list(self._held):
            if self.num_bytes + num_bytes <= self._most_bytes:
                return True
            if may_go(self._held[key]):
                del self._held[key]
        return self.num_bytes + num_bytes <= self._most_bytes


class StagedSteps:
    """The steps of a record, of which units are read while others are computed. Any thread may use it.

    Args:
        source: where they are.
        num_steps, num_rows, num_bytes: of the record.
        link: reads them.
        staging: holds them.

    Attributes:
        source, num_rows: see above.
    """

    _numbers = itertools.count()

    def __init__(
        self, source: StepSource, num_steps: int, num_rows: int, num_bytes: float, link: Link, staging: Staging
    ) -> None:
        self.source, self.num_rows, self._num_steps, self._link = source, num_rows, num_steps, link
        self._step_bytes, self._staging, self._number = num_bytes / num_steps, staging, next(self._numbers)
        weakref.finalize(self, staging.forget, self._number)

    def expect(self, step: int, units: Sequence[str]) -> None:
        """Have units of a step read in this order, and no others of it, if there is such a step, and room for it."""
        if step >= self._num_steps:
            self._staging.read_all()
        else:
            staged = self._staging.ahead(self._number, step, self._step_bytes, partial(self._step, step))
            if staged is not None:
                staged.expect(units)

    def read(self, step: int, units: Sequence[str]) -> Callable[[int, str], Tensor]:
        """The same for a pass that reads them now; gives what an operator has seen of a row, see `StepSource.unit`."""
        staged = self._staging.read(self._number, step, self._step_bytes, partial(self._step, step))
        staged.expect(units)
        return staged.wait_for

    def _step(self, step: int) -> _StagedStep:
        return _StagedStep(partial(self.source.unit, step), self._link)


class _WhenAsked(dict[str, Tensor]):
    """What operators have seen of a row, each of which is fetched when it is first asked for."""

    def __init__(self, fetch: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._fetch = fetch

    def __missing__(self, operator: str) -> Tensor:
        self[operator] = found = self._fetch(operator)
        return found


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class TemplateRecord:
    """A record, in memory or in its files; see `core.prepared.Template`.

    Attributes:
        device: of the model.
        num_bytes: of all steps.
        steps: of every step and row, what operators have seen, by name: [cells, entries of a cell, ...]. None: they
            are in files.
        staged: reads them from files, or from memory for another device. None: the model reads `steps`.
    """

    device: torch.device
    num_bytes: int
    steps: Sequence[Sequence[Seen]] | None
    staged: StagedSteps | None = None

    def latents(self, first: int) -> Tensor:
        """Of a generation, before each step from `first` on, and at the end: (steps + 1, channels, h, w)."""
        if self.steps is not None:
            found = [rows[0][LATENTS] for rows in self.steps[first:]] + [self.steps[-1][0][END]]
        else:
            assert self.staged is not None
            assert isinstance(self.staged.source, FileSteps)
            files = [str(path) for path in sorted(self.staged.source.folder.glob("step-*.safetensors"))[first:]]
            found = [_read_one(path, LATENTS) for path in files] + [_read_one(files[-1], END)]
        return torch.cat(found).to(self.device)

    def expect(self, step: int, units: Sequence[str]) -> None:
        """See `core.prepared.Template`."""
        if self.staged is not None:
            self.staged.expect(step, units)

    def seen(self, step: int, units: Sequence[str]) -> Sequence[Seen]:
        """See `core.prepared.Template`."""
        if self.staged is None:
            assert self.steps is not None
            fetches = [row.__getitem__ for row in self.steps[step]]
        else:
            wait_for = self.staged.read(step, units)
            fetches = [partial(wait_for, row) for row in range(self.staged.num_rows)]
        return [_WhenAsked(fetch) for fetch in fetches]


def in_memory(
    device: torch.device, num_bytes: int, steps: Sequence[Sequence[Seen]], link: Link, staging: Staging
) -> TemplateRecord:
    """A record in memory; for another device in memory that it copies from by itself, while the link asks it to."""
    if (uploads := link.uploads(device)) is None:
        return TemplateRecord(device, num_bytes, steps)
    host = HostSteps(steps, uploads)
    staged = StagedSteps(host, len(steps), len(steps[0]), num_bytes, link, staging)
    return TemplateRecord(device, num_bytes, host.steps, staged)


def from_files(
    device: torch.device, num_bytes: int, folder: Path, num_steps: int, num_rows: int, link: Link, staging: Staging
) -> TemplateRecord:
    """A record that is read from its files at every step."""
    source = FileSteps(folder, link.uploads(device))
    staged = StagedSteps(source, num_steps, num_rows, num_bytes, link, staging)
    return TemplateRecord(device, num_bytes, None, staged)


@contextmanager
def in_files(
    device: torch.device, folder: Path, rows: Sequence[Seen], count: int, num_steps: int
) -> Iterator[list[TemplateRecord]]:
    """Records of steps that are all alike, in files of this folder as long as the context lasts.

    Args:
        device: of the model.
        folder: for them; there is one file, however many records and steps read it.
        rows: of a step, what operators have seen.
        count: of records.
        num_steps: of each.
    """
    with TemporaryDirectory(dir=folder, prefix=".record-") as name:
        place = Path(name)
        (place / file_of(0)).write_bytes(content_of(rows))
        for step in range(1, num_steps):
            (place / file_of(step)).symlink_to(file_of(0))
        link, staging = Link(), Staging(math.inf)
        num_bytes = num_steps * sum(tensor.nbytes for row in rows for tensor in row.values())
        yield [from_files(device, num_bytes, place, num_steps, len(rows), link, staging) for _ in range(count)]


def file_of(step: int) -> str:
    """The name of a step's file."""
    return f"step-{step:04}.safetensors"


def content_of(rows: Sequence[Seen]) -> bytes:
    """Of such a file, which `read_step` reads."""
    named = {f"{row}.{operator}": tensor for row, each in enumerate(rows) for operator, tensor in each.items()}
    return save({name: tensor.cpu().contiguous() for name, tensor in named.items()})


def _read_one(path: str, operator: str) -> Tensor:
    with safe_open(path, "pt") as file:
        return file.get_tensor(f"0.{operator}")


def read_step(path: Path) -> list[dict[str, Tensor]]:
    """What operators have seen of each row. Raises OSError, SafetensorError or ValueError: the file is damaged."""
    rows: dict[int, dict[str, Tensor]] = {}
    for key, tensor in load(path.read_bytes()).items():
        row, _, operator = key.partition(".")
        rows.setdefault(int(row), {})[operator] = tensor
    return [rows[row] for row in range(len(rows))]
