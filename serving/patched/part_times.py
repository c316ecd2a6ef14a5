"""Measures at start what the parts of masked passes take, for plans of loads (InstGenIE section 4.4)."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
import torch

from ...data.templates import unit_of
from ..core.denoiser import Conditions
from ..core.kept import load_or_measure
from ..core.prepared import PreparedRequest, Seen, Template
from ..core.stepper import Tuning
from ..core.timing import synchronize
from ..samplers.batched import BatchedSampler
from .masked import MaskedPasses, MaskedRows, PassInputs
from .masked_batch import inputs_of

_EDITS, _SHARES = (1, 4), (0.1, 0.4)
"""Of the batches that are measured, for each size."""
_WARMUP, _REPEATS = 1, 5
Stage = Callable[[Sequence[Seen], int, int], AbstractContextManager[Sequence[Template]]]
"""Given what operators have seen of the rows of a request, so many records of so many equal steps, as edits read them
that are not in memory.
"""


@dataclass(frozen=True, slots=True)
class MeasuredPass:
    """What masked passes over one batch took.

    Attributes:
        width, height: of the images, in pixels.
        rows: of the batch.
        active_share: of each row.
        whole_s, active_s: seconds of each part of a pass (`MaskedPasses.parts`) where all tokens are computed, or the
            active ones; what stands before the first, and behind each, counts with it. So does, for active ones, what
            it costs the pass that meanwhile the next step is read.
        bytes_per_cell: of each part, what records hold of a cell.
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
    """Of batches of each of the target's sizes that is made of whole cells, see `load_or_measure`."""

    def measure() -> list[MeasuredPass]:
        sized = [each for each in target.examples() if not any(side % passes.cell for side in each.size)]
        return [found for each in sized for found in _measured(passes, conditions, sampler, each, stage)]

    circumstances = target.circumstances(passes) | {"keep": passes.keep, "parts": len(passes.parts), "reads": True}
    return load_or_measure(target.folder, "parts", circumstances, MeasuredPass, measure)


@torch.inference_mode()
def _measured(
    passes: MaskedPasses, conditions: Conditions, sampler: BatchedSampler, example: PreparedRequest, stage: Stage
) -> Iterator[MeasuredPass]:
    """Time passes over batches of a request of which some cells are computed, by turns with whole ones."""
    for count, share in product(_EDITS, _SHARES):
        packing, repeats, inputs = inputs_of(passes, conditions, sampler, [example] * count)
        _, seen = passes.record(passes.batch(packing, repeats=repeats), *inputs)
        num_cells = len(next(iter(seen[0].values())))
        active = np.arange(num_cells) < max(1, round(share * num_cells))
        samples: dict[bool, list[list[float]]] = {True: [], False: []}
        # Parts of a pass that is played back as a whole have no times.
        batches = {
            is_reused: replace(
                passes.batch(
                    packing, repeats=repeats, active=[active] * len(seen), reuses=[is_reused] * len(passes.parts)
                ),
                played=None,
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
    """Of reading a step of all records, while nothing is computed."""
    start_s = time.perf_counter()
    for row in [row for record in records for row in record.seen(step, units)]:
        for name in names:
            _ = row[name]
    return time.perf_counter() - start_s


def _seconds_staged(
    passes: MaskedPasses, rows: MaskedRows, records: Sequence[Template], inputs: PassInputs
) -> list[float]:
    """Of passes one behind the other, of edits that read these records, each while the step behind it is read."""
    found = []
    for step in range(_WARMUP + _REPEATS):
        start_s = time.perf_counter()
        seen = [row for record in records for row in record.seen(step, rows.units)]
        for record in records:
            record.expect(step + 1, rows.units)
        passes.run(rows, seen, *inputs)
        synchronize(passes.device)
        if step >= _WARMUP:
            found.append(time.perf_counter() - start_s)
    return found


def _seconds(passes: MaskedPasses, rows: MaskedRows, seen: Sequence[Seen], inputs: PassInputs) -> list[float]:
    """Of each part of a pass, with what stands behind it, and before the first one."""
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
