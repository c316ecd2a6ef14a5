"""Prefetch of record steps to the model's device, unit by unit and within a memory bound (InstGenIE section 4.2)."""

import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from ...data.errors import RunError
from ...data.templates import unit_of
from .link import RecordLink
from .uploads import LoadedUnit


class StepSource(Protocol):
    """Source of the steps of a record."""

    def unit(self, step: int, name: str) -> LoadedUnit:
        """Read the tensors of one unit at a step, for all rows. Only one thread at a time reads units of a step.

        Raises OSError, SafetensorError or KeyError: the file is missing or damaged.
        """
        ...


class _StagedStep:
    """The reads of a record's step, one per unit."""

    def __init__(self, read: Callable[[str], LoadedUnit], link: RecordLink) -> None:
        self._read, self._link = read, link
        self._loads: dict[str, Future[LoadedUnit]] = {}
        self._lock = threading.Lock()

    def expect(self, units: Sequence[str]) -> None:
        """Submit reads of these units unless they are read already, and cancel reads of other units not yet begun."""
        with self._lock:
            for unit in set(self._loads).difference(units):
                if self._loads[unit].cancel():
                    del self._loads[unit]
            for unit in units:
                load = self._loads.get(unit)
                if load is None or (load.done() and load.exception() is not None):
                    self._loads[unit] = self._link.submit(partial(self._read, unit))

    def wait_for(self, row: int, operator: str) -> Tensor:
        """Wait for the tensor of an operator and a row. Raises what `StepSource.unit` raises."""
        return self._loads[unit_of(operator)].result().take(row, operator)


class StepReading:
    """A step that a pass reads. The step counts as read when this object is gone."""

    def __init__(self, staged: _StagedStep) -> None:
        self.staged = staged

    def wait_for(self, row: int, operator: str) -> Tensor:
        """Wait for the tensor of an operator and a row. Raises what `StepSource.unit` raises."""
        return self.staged.wait_for(row, operator)


@dataclass(slots=True, eq=False)
class _StagedEntry:
    """A staged step: its size, and the `StepReading` of the pass that reads it; None if no pass reads it yet."""

    staged: _StagedStep
    num_bytes: float
    reading: "weakref.ref[StepReading] | None" = None

    @property
    def is_done(self) -> bool:
        """Whether a pass has finished reading it."""
        return self.reading is not None and self.reading() is None


class Staging:
    """Staged steps of records, within a memory bound. Any thread may use it.

    The step that a pass reads is staged even beyond the bound; steps are read ahead only within it.

    Args:
        max_bytes: bound on the size of all staged steps together.
    """

    def __init__(self, max_bytes: float) -> None:
        self._max_bytes = max_bytes
        self._staged: OrderedDict[tuple[int, int], _StagedEntry] = OrderedDict()
        self._lock = threading.RLock()  # a record may be finalised, and so evicted, while the lock is held

    @property
    def num_bytes(self) -> float:
        """Size of all staged steps."""
        with self._lock:
            return sum(each.num_bytes for each in self._staged.values())

    def check(self, num_bytes: float) -> None:
        """Raise RunError if a step of this size does not fit."""
        if num_bytes > self._max_bytes:
            raise RunError(
                f"a step of the template's record is {num_bytes / 1e6:,.1f} MB, and --template-staging-mb is "
                f"{self._max_bytes / 1e6:g}"
            )

    def read(self, record: int, step: int, num_bytes: float, make: Callable[[], _StagedStep]) -> StepReading:
        """Return the reading of a step for a pass that reads it now, and stage the step if necessary.

        `record` is a number that identifies the record.
        """
        with self._lock:
            entry = self._staged.pop((record, step), None)
            if entry is None:
                self._make_room(num_bytes, lambda each: each.reading is None or each.is_done)
                entry = _StagedEntry(make(), num_bytes)
            self._staged[record, step] = entry
            # Edits at the same step of a record share its reading.
            reading = (entry.reading and entry.reading()) or StepReading(entry.staged)
            entry.reading = weakref.ref(reading)
            return reading

    def stage_ahead(
        self, record: int, step: int, num_bytes: float, make: Callable[[], _StagedStep]
    ) -> _StagedStep | None:
        """Stage a step that a pass will read later; None if it does not fit beside steps still to be read."""
        with self._lock:
            entry = self._staged.pop((record, step), None)
            if entry is None:
                if not self._make_room(num_bytes, lambda each: each.is_done):
                    return None
                entry = _StagedEntry(make(), num_bytes)
            elif entry.is_done:
                entry.reading = None
            self._staged[record, step] = entry
            return entry.staged

    def evict(self, record: int) -> None:
        """Evict all steps of a record."""
        with self._lock:
            for key in [key for key in self._staged if key[0] == record]:
                del self._staged[key]

    def _make_room(self, num_bytes: float, may_go: Callable[[_StagedEntry], bool]) -> bool:
        """Evict the least recently used steps among those that may go; return whether `num_bytes` then fit."""
        excess = self.num_bytes + num_bytes - self._max_bytes
        for key, entry in list(self._staged.items()):
            if excess <= 0:
                break
            if may_go(entry):
                excess -= entry.num_bytes
                del self._staged[key]
        return excess <= 0


class StagedSteps:
    """The steps of a record, whose units are read while others are computed. Any thread may use it.

    Args:
        source: source of the steps.
        num_steps, num_rows, num_bytes: number of steps, number of rows and size of the record.
        link: performs the reads.
        staging: holds the staged steps.

    Attributes:
        source, num_rows: see above.

    Raises:
        RunError: a step exceeds the bound of `staging`.
    """

    _numbers = itertools.count()

    def __init__(
        self, source: StepSource, num_steps: int, num_rows: int, num_bytes: float, link: RecordLink, staging: Staging
    ) -> None:
        self.source, self.num_rows, self._num_steps, self._link = source, num_rows, num_steps, link
        self._step_bytes, self._staging, self._number = num_bytes / num_steps, staging, next(self._numbers)
        staging.check(self._step_bytes)
        weakref.finalize(self, staging.evict, self._number)

    def expect(self, step: int, units: Sequence[str]) -> None:
        """Read these units of a step ahead, in this order and no others, if the step exists and fits."""
        if step < self._num_steps:
            staged = self._staging.stage_ahead(self._number, step, self._step_bytes, partial(self._step, step))
            if staged is not None:
                staged.expect(units)

    def read(self, step: int, units: Sequence[str]) -> StepReading:
        """Read these units for a pass that needs them now; they stay staged while the returned reading exists."""
        reading = self._staging.read(self._number, step, self._step_bytes, partial(self._step, step))
        reading.staged.expect(units)
        return reading

    def _step(self, step: int) -> _StagedStep:
        return _StagedStep(partial(self.source.unit, step), self._link)
