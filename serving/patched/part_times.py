"""Measures at start what the parts of masked passes take, for plans of loads (InstGenIE section 4.4)."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import torch

from ...data.templates import unit_of
from ..core.denoiser import Conditions
from ..core.kept import load_or_measure
from ..core.prepared import PreparedRequest
from ..core.stepper import Tuning
from ..core.timing import synchronize
from ..samplers.batched import BatchedSampler
from .masked import MaskedPasses, MaskedRows, Seen
from .masked_batch import PassInputs, inputs_of

_EDITS, _SHARES = (1, 4), (0.1, 0.4)
"""Of the batches that are measured, for each size."""
_WARMUP, _REPEATS = 1, 5


@dataclass(frozen=True, slots=True)
class MeasuredPass:
    """What masked passes over one batch took.

    Attributes:
        width, height: of the images, in pixels.
        rows: of the batch.
        active_share: of each row.
        whole_s, active_s: seconds of each part of a pass (`MaskedPasses.parts`) where all tokens are computed, or the
            active ones; what stands before the first, and behind each, counts with it.
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
    passes: MaskedPasses, conditions: Conditions, sampler: BatchedSampler, target: Tuning
) -> list[MeasuredPass]:
    """Of batches of each of the target's sizes that is made of whole cells, see `load_or_measure`."""

    def measure() -> list[MeasuredPass]:
        sized = [each for each in target.examples() if not any(side % passes.cell for side in each.size)]
        return [found for each in sized for found in _measured(passes, conditions, sampler, each)]

    circumstances = target.circumstances(passes) | {"keep": passes.keep}
    return load_or_measure(target.folder, "parts", circumstances, MeasuredPass, measure)


@torch.inference_mode()
def _measured(
    passes: MaskedPasses, conditions: Conditions, sampler: BatchedSampler, example: PreparedRequest
) -> Iterator[MeasuredPass]:
    """Time passes over batches of a request of which some cells are computed, by turns with whole ones."""
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
        yield MeasuredPass(
            *example.request.resolution,
            rows=len(seen),
            active_share=float(active.mean()),
            whole_s=whole_s,
            active_s=active_s,
            bytes_per_cell=[
                sum(tensor.nbytes for name, tensor in seen[0].items() if unit_of(name) in units) / num_cells
                for units in passes.parts
            ],
        )


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
