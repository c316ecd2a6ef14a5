"""Prefetch of record steps to the model's device, unit by unit and within a memory bound (InstGenIE section 4.2)."""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from torch import Tensor

from ...data.errors import RunError
from ...data.templates import unit_of
from ..core.prepared import RecordedRow
from .link import RecordLink
from .uploads import LoadedUnit


class StepSource(Protocol):
    """Source of the steps of a record.

    Attributes:
        num_steps, num_rows, num_bytes: number of steps, number of rows and size of the record.
    """

    num_steps: int
    num_rows: int
    num_bytes: int

    def unit(self, step: int, name: str) -> LoadedUnit:
        """Read the tensors of one unit at a step, for all rows. Only one thread at a time reads units.

        Raises OSError, SafetensorError or KeyError: the file is missing or damaged.
        """
        ...


class LazyRow(dict[str, Tensor]):
    """Recorded tensors of a row by operator name, each fetched at its first access."""

    def __init__(self, fetch: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._fetch = fetch

    def __missing__(self, operator: str) -> Tensor:
        self[operator] = found = self._fetch(operator)
        return found


class _StagedStep:
    """The reads of a record's step, one per unit."""

    def __init__(self, source: StepSource, step: int) -> None:
        self._source, self._step = source, step
        self.num_bytes = source.num_bytes / source.num_steps
        self._loads: dict[str, Future[LoadedUnit]] = {}
        self._rows: list[weakref.ref[LazyRow]] = []

    @property
    def is_expected(self) -> bool:
        """Whether a pass will read it that has not begun."""
        return not self._rows

    @property
    def is_done(self) -> bool:
        """Whether passes have finished reading it: none of its rows exists any more."""
        return bool(self._rows) and all(row() is None for row in self._rows)

    def expect(self, units: Sequence[str], link: RecordLink) -> None:
        """Submit reads of these units unless they are read already, and cancel reads of other units not yet begun."""
        for unit in set(self._loads).difference(units):
            if self._loads[unit].cancel():
                del self._loads[unit]
        for unit in units:
            load = self._loads.get(unit)
            if load is None or (load.done() and load.exception() is not None):
                self._loads[unit] = link.submit(partial(self._source.unit, self._step, unit))

    def renew(self) -> None:
        """Expect another pass if those that have read it are done."""
        if self.is_done:
            self._rows = []

    def rows(self) -> list[LazyRow]:
        """Return its rows for a pass, which waits for each tensor at its first access and raises as `StepSource`."""
        rows = [LazyRow(partial(self._wait_for, row)) for row in range(self._source.num_rows)]
        self._rows = [row for row in self._rows if row() is not None] + list(map(weakref.ref, rows))
        return rows

    def _wait_for(self, row: int, operator: str) -> Tensor:
        return self._loads[unit_of(operator)].result().take(row, operator)


class Staging:
    """Staged steps of records, within a memory bound. Any thread may use it.

    The step that a pass reads is staged even beyond the bound; steps are read ahead only within it.

    Args:
        max_bytes: bound on the size of all staged steps together.
        link_mbps: limit of reads in megabytes per second, see `RecordLink`.
    """

    def __init__(self, max_bytes: float, link_mbps: float | None = None) -> None:
        self._max_bytes, self._link = max_bytes, RecordLink(link_mbps)
        self._staged: OrderedDict[tuple[int, int], _StagedStep] = OrderedDict()
        self._lock = threading.RLock()  # a record may be finalised, and so evicted, while the lock is held

    @property
    def num_bytes(self) -> float:
        """Size of all staged steps."""
        with self._lock:
            return sum(each.num_bytes for each in self._staged.values())

    def check(self, source: StepSource) -> None:
        """Raise RunError if a step of this record does not fit."""
        num_bytes = source.num_bytes / source.num_steps
        if num_bytes > self._max_bytes:
            raise RunError(
                f"a step of the template's record is {num_bytes / 1e6:,.1f} MB, and --template-staging-mb is "
                f"{self._max_bytes / 1e6:g}"
            )

    def read(self, record: int, source: StepSource, step: int, units: Sequence[str]) -> Sequence[RecordedRow]:
        """Return the rows of a step for a pass that needs these units now; they stay staged while a row exists.

        `record` is a number that identifies the record.
        """
        with self._lock:
            staged = self._staged.pop((record, step), None)
            if staged is None:
                staged = _StagedStep(source, step)
                self._make_room(staged.num_bytes, lambda each: each.is_expected or each.is_done)
            self._staged[record, step] = staged
            staged.expect(units, self._link)
            return staged.rows()

    def read_ahead(self, record: int, source: StepSource, step: int, units: Sequence[str]) -> None:
        """Read these units of a step ahead, in this order and no others, if it fits beside steps still to be read."""
        with self._lock:
            staged = self._staged.pop((record, step), None)
            if staged is None:
                staged = _StagedStep(source, step)
                if not self._make_room(staged.num_bytes, lambda each: each.is_done):
                    return
            staged.renew()
            self._staged[record, step] = staged
            staged.expect(units, self._link)

    def evict(self, record: int) -> None:
        """Evict all steps of a record."""
        with self._lock:
            for key in [key for key in self._staged if key[0] == record]:
                del self._staged[key]

    def _make_room(self, num_bytes: float, may_go: Callable[[_StagedStep], bool]) -> bool:
        """Evict the least recently used steps among those that may go; return whether `num_bytes` then fit."""
        excess = self.num_bytes + num_bytes - self._max_bytes
        for key, staged in list(self._staged.items()):
            if excess <= 0:
                break
            if may_go(staged):
                excess -= staged.num_bytes
                self._staged.pop(key, None)
        return excess <= 0
