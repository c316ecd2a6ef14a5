"""Interleaved timing of steps: every repeat times the lanes one after the other, each the lane of one side."""

import math
import statistics
import time
from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from ...serving.core.timing import synchronize
from ..experiment.turns import turns
from .matrix_peak import count_operations
from .sides import StepSide

SHORTEST_TIMING_S = 0.005
"""Shorter steps are repeated within one timing until it takes this long."""
_MAX_STEPS = 100


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """Extent of a benchmark: the timings of every side, the warm-up rounds before them (each a step of a new batch and
    one of the same batch), and the seed of the first request's noise.
    """

    repeats: int = 15
    warmup: int = 3
    seed: int = 0


@dataclass(slots=True)
class Lane:
    """One side and its measurements: the first steps of new batches (in the warm-up), and the repeats, each of enough
    steps that it is not too short for the clock.
    """

    side: StepSide
    device: torch.device
    first_ms: list[float] = field(default_factory=list)
    samples_ms: list[float] = field(default_factory=list)
    steps_per_timing: int = 1

    def warm_up(self) -> None:
        self.side.begin()
        self.first_ms.append(self._time(1))
        steady_ms = self._time(1)
        wanted = math.ceil(SHORTEST_TIMING_S * 1e3 / steady_ms)
        self.steps_per_timing = max(1, min(wanted, _MAX_STEPS, self.side.steps_left - 1))

    def measure(self) -> None:
        self.make_room()
        self.samples_ms.append(self._time(self.steps_per_timing))

    def make_room(self) -> None:
        """Restart the side if the next timing would reach the end of the schedule; its first step is not timed."""
        if self.side.steps_left <= self.steps_per_timing:
            self.side.begin()
            self.side.step()

    @property
    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)

    def _time(self, num_steps: int) -> float:
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(num_steps):
            self.side.step()
        synchronize(self.device)
        return (time.perf_counter() - start) / num_steps * 1e3


def operations_of(side: StepSide) -> int:
    """Return the number of operations of one step of a batch that stays the same."""
    side.begin()
    side.step()
    operations = count_operations(side.step)
    if operations:
        return operations
    # A recorded pass was replayed. The first pass of a batch is not; it also computes what the batch keeps.
    side.begin()
    return count_operations(side.step)


def time_lanes(lanes: Collection[Lane], settings: BenchSettings) -> None:
    """Warm up all lanes, then measure them in turn."""
    for number, lane in turns(list(lanes), settings.repeats, num_warmups=settings.warmup):
        lane.warm_up() if number < 0 else lane.measure()
