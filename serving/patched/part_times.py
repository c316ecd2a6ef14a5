"""Measurement of the parts of masked passes at the start, for load plans (InstGenIE section 4.4)."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import torch

from ...data.templates import unit_of
from ..core.denoiser import Conditions
from ..core.kept import load_or_measure
from ..core.prepared import PreparedRequest, RecordedRow, Template
from ..core.stepper import Tuning
from ..core.timing import synchronize
from ..samplers.batched import BatchedSampler
from .masked import MaskedPasses, MaskedRows, PassInputs
from .masked_batch import inputs_of

_EDITS, _SHARES = (1, 4), (0.1, 0.4)
"""Numbers of edits and active shares of the measured batches, for each size."""
_WARMUP, _REPEATS = 1, 5
Stage = Callable[[Sequence[RecordedRow], int, int], AbstractContextManager[Sequence[Template]]]
"""Provides records of equal steps that are read from files, given the recorded tensors of a request's rows, the number
of records and the number of steps.
"""


@dataclass(frozen=True, slots=True)
class MeasuredPass:
    """Measured times of masked passes over one batch.

    Attributes:
        width, height: size of the images in pixels.
        rows: number of rows of the batch.
        active_share: active share of each row.
        whole_s, active_s: seconds of each part of a pass (`MaskedPasses.parts`) that computes all tokens, or the active
            ones. They include the modules before the first part and after each part and, for active tokens, the
            slowdown from reading the next step at the same time.
        bytes_per_cell: size in records of a cell, for each part.
    """

    width: int
    height: int
    rows: int
    active_share: float
    whole_s: list[float]
    active_s: list[float]
    bytes_per_cell: list[float]


def part_times(
    passes: MaskedPasses, conditions: Conditions, sampler: BatchedSampler, target: Tuning, stage: Stage
) -> list[MeasuredPass]:
    """Measure batches of each of the target's sizes that consist of whole cells, see `load_or_measure`."""

    def measure() -> list[MeasuredPass]:
        sized = [each for each in target.examples() if not any(side % passes.cell for side in each.size)]
        return [found for each in sized for found in _measured(passes, conditions, sampler, each, stage)]

    circumstances = target.circumstances(passes) | {"keep": passes.keep, "parts": len(passes.parts), "reads": True}
    return load_or_measure(target.folder, "parts", circumstances, MeasuredPass, measure)


@torch.inference_mode()
def _measured(
    passes: MaskedPasses, conditions: Conditions, sampler: BatchedSampler, example: PreparedRequest, stage: Stage
) -> Iterator[MeasuredPass]:
    """Time passes that compute some cells of batches of a request, alternating with passes that compute all."""
    for count, share in product(_EDITS, _SHARES):
        packing, repeats, inputs = inputs_of(passes, conditions, sampler, [example] * count)
        _, seen = passes.record(passes.batch(packing, repeats=repeats), *inputs)
        num_cells = len(next(iter(seen[0].values())))
        active = np.arange(num_cells) < max(1, round(share * num_cells))
        samples: dict[bool, list[list[float]]] = {True: [], False: []}
        batches = {
            is_reused: passes.batch(
                packing, repeats=repeats, active=[active] * len(seen), reuses=[is_reused] * len(passes.parts)
            )
            for is_reused in samples
        }
        for repeat, (is_reused, rows) in product(range(_WARMUP + _REPEATS), batches.items()):
            times_s = _seconds(passes, rows, seen, inputs)
            if repeat >= _WARMUP:
                samples[is_reused].append(times_s)
        whole_s, active_s = (
            [statistics.median(each) for each in zip(*samples[key], strict=True)] for key in (False, True)
        )
        with stage(seen[: example.num_rows], count, _WARMUP + _REPEATS + 2) as records:
            names = [name for name in seen[0] if unit_of(name) in batches[True].units]
            alone_s = _seconds_reading(records, batches[True].units, names, _WARMUP + _REPEATS + 1)
            staged_s = _seconds_staged(passes, batches[True], records, inputs)
        computing_s = statistics.median(map(sum, samples[True]))
        reading_s = max(0.0, statistics.median(staged_s) - max(computing_s, alone_s))
        num_bytes = [
            sum(tensor.nbytes for name, tensor in seen[0].items() if unit_of(name) in units) for units in passes.parts
        ]
        yield MeasuredPass(
            *example.request.resolution,
            rows=len(seen),
            active_share=float(active.mean()),
            whole_s=whole_s,
            active_s=[own + reading_s * each / sum(num_bytes) for own, each in zip(active_s, num_bytes, strict=True)],
            bytes_per_cell=[each / num_cells for each in num_bytes],
        )


def _seconds_reading(records: Sequence[Template], units: Sequence[str], names: Sequence[str], step: int) -> float:
    """Return the time to read a step of all records while nothing is computed."""
    start_s = time.perf_counter()
    for row in [row for record in records for row in record.read_rows(step, units)]:
        for name in names:
            _ = row[name]
    return time.perf_counter() - start_s


def _seconds_staged(
    passes: MaskedPasses, rows: MaskedRows, records: Sequence[Template], inputs: PassInputs
) -> list[float]:
    """Return the times of consecutive passes of edits that read these records, each while the next step is read."""
    found = []
    for step in range(_WARMUP + _REPEATS):
        start_s = time.perf_counter()
        seen = [row for record in records for row in record.read_rows(step, rows.units)]
        for record in records:
            record.expect(step + 1, rows.units)
        passes.run(rows, seen, *inputs)
        synchronize(passes.device)
        if step >= _WARMUP:
            found.append(time.perf_counter() - start_s)
    return found


def _seconds(passes: MaskedPasses, rows: MaskedRows, seen: Sequence[RecordedRow], inputs: PassInputs) -> list[float]:
    """Return the time of each part of a pass, with the modules after it, and for the first also those before it."""
    noted_s: list[float] = []

    def note(*unused: object) -> None:
        synchronize(passes.device)
        noted_s.append(time.perf_counter())

    handles = [block.register_forward_pre_hook(note) for block in passes.starts[1:]]
    try:
        note()
        passes.run(rows, seen, *inputs)
        note()
    finally:
        for handle in handles:
            handle.remove()
    return [end_s - start_s for start_s, end_s in pairwise(noted_s)]
