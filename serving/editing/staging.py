"""Steps of records that are read ahead, on the model's device, unit by unit, within a bound (InstGenIE section 4.2)."""

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
from .link import Link
from .uploads import Loaded


class StepSource(Protocol):
    """Where the steps of a record are read from."""

    def unit(self, step: int, name: str) -> Loaded:
        """What all rows hold of one unit at a step; the same step's units are asked for by one thread at a time.

        Raises OSError, SafetensorError or KeyError: the file is gone, or damaged.
        """
        ...


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


class Reading:
    """A step that a pass reads, as long as it does."""

    def __init__(self, staged: _StagedStep) -> None:
        self.staged = staged

    def wait_for(self, row: int, operator: str) -> Tensor:
        """What an operator has seen of a row. Raises as `StepSource.unit`."""
        return self.staged.wait_for(row, operator)


@dataclass(slots=True, eq=False)
class _Held:
    """A step that is staged: what it takes, and the pass that reads it; None: one is to read it yet."""

    staged: _StagedStep
    num_bytes: float
    reading: "weakref.ref[Reading] | None" = None

    @property
    def is_over(self) -> bool:
        """Whether it has been read."""
        return self.reading is not None and self.reading() is None


class Staging:
    """The steps of records that are staged, within a bound. Any thread may use it.

    What a pass reads is there whatever the bound is; beside it only what fits is read ahead.

    Args:
        most_bytes: of all steps together.
    """

    def __init__(self, most_bytes: float) -> None:
        self._most_bytes = most_bytes
        self._held: OrderedDict[tuple[int, int], _Held] = OrderedDict()
        self._lock = threading.RLock()  # a record may be let go of meanwhile

    @property
    def num_bytes(self) -> float:
        """Of all steps that are staged."""
        with self._lock:
            return sum(each.num_bytes for each in self._held.values())

    def check(self, num_bytes: float) -> None:
        """Raise RunError: a step of so many bytes does not fit."""
        if num_bytes > self._most_bytes:
            raise RunError(
                f"a step of the template's record is {num_bytes / 1e6:,.1f} MB, and --template-staging-mb is "
                f"{self._most_bytes / 1e6:g}"
            )

    def read(self, record: int, step: int, num_bytes: float, make: Callable[[], _StagedStep]) -> Reading:
        """Stage a step of a record (a number of its own) that a pass reads now, if it is not there yet."""
        with self._lock:
            held = self._held.pop((record, step), None)
            if held is None:
                self._make_room(num_bytes, lambda each: each.reading is None or each.is_over)
                held = _Held(make(), num_bytes)
            self._held[record, step] = held
            # Edits at one step of a record share what is read of it.
            reading = (held.reading and held.reading()) or Reading(held.staged)
            held.reading = weakref.ref(reading)
            return reading

    def ahead(self, record: int, step: int, num_bytes: float, make: Callable[[], _StagedStep]) -> _StagedStep | None:
        """Stage a step that a pass will read; None: there is no room for it beside what others read, or will."""
        with self._lock:
            held = self._held.pop((record, step), None)
            if held is None:
                if not self._make_room(num_bytes, lambda each: each.is_over):
                    return None
                held = _Held(make(), num_bytes)
            elif held.is_over:
                held.reading = None
            self._held[record, step] = held
            return held.staged

    def forget(self, record: int) -> None:
        """Let go of all steps of a record."""
        with self._lock:
            for key in [key for key in self._held if key[0] == record]:
                del self._held[key]

    def _make_room(self, num_bytes: float, may_go: Callable[[_Held], bool]) -> bool:
        """Let go of what was asked for longest ago; whether so many bytes fit then."""
        excess = self.num_bytes + num_bytes - self._most_bytes
        for key, held in list(self._held.items()):
            if excess <= 0:
                break
            if may_go(held):
                excess -= held.num_bytes
                del self._held[key]
        return excess <= 0


class StagedSteps:
    """The steps of a record, of which units are read while others are computed. Any thread may use it.

    Args:
        source: where they are.
        num_steps, num_rows, num_bytes: of the record.
        link: reads them.
        staging: holds them.

    Attributes:
        source, num_rows: see above.

    Raises:
        RunError: a step is more than may be staged.
    """

    _numbers = itertools.count()

    def __init__(
        self, source: StepSource, num_steps: int, num_rows: int, num_bytes: float, link: Link, staging: Staging
    ) -> None:
        self.source, self.num_rows, self._num_steps, self._link = source, num_rows, num_steps, link
        self._step_bytes, self._staging, self._number = num_bytes / num_steps, staging, next(self._numbers)
        staging.check(self._step_bytes)
        weakref.finalize(self, staging.forget, self._number)

    def expect(self, step: int, units: Sequence[str]) -> None:
        """Have units of a step read in this order, and no others of it, if there is such a step, and room for it."""
        if step < self._num_steps:
            staged = self._staging.ahead(self._number, step, self._step_bytes, partial(self._step, step))
            if staged is not None:
                staged.expect(units)

    def read(self, step: int, units: Sequence[str]) -> Reading:
        """The same for a pass that reads them now: they stay at least as long as what is given."""
        reading = self._staging.read(self._number, step, self._step_bytes, partial(self._step, step))
        reading.staged.expect(units)
        return reading

    def _step(self, step: int) -> _StagedStep:
        return _StagedStep(partial(self.source.unit, step), self._link)
