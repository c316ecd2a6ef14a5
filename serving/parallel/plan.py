"""Division of a step: images that all ranks draw in strips and images that one rank draws whole. No torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_MAX_TRIED = 16
"""Largest number of requests, the largest ones, that are considered for strips. Ranks share out the rest as wholes."""


@dataclass(frozen=True, slots=True)
class CallTimes:
    """Measured time of a call for latents of one size.

    Attributes:
        height, width: size of the latents.
        rows: number of rows in the measured batch: those of one request.
        whole_us: microseconds on one rank.
        strips_us: microseconds on all ranks, in strips; None if the image is too low to be shared.
    """

    height: int
    width: int
    rows: int
    whole_us: float
    strips_us: float | None


@dataclass(frozen=True, slots=True)
class StripWork:
    """A request in a step.

    Attributes:
        rows: number of its rows in a batch; each may go to a different rank.
        row_us: microseconds of one row, on one rank.
        strips_us: microseconds of all its rows, on all ranks in strips.
    """

    rows: int
    row_us: float
    strips_us: float


@dataclass(frozen=True, slots=True)
class CallTimeTable:
    """Measured times, applied to any size: those of the nearest measured size, scaled by the number of pixels."""

    sizes: Sequence[CallTimes]

    def work(self, height: int, width: int, rows: int) -> StripWork:
        """Return the work of a request with latents of this size."""
        pixels = height * width
        near = min(self.sizes, key=lambda each: abs(math.log(each.height * each.width / pixels)))
        scale = pixels / (near.height * near.width)
        strips_us = math.inf if near.strips_us is None else near.strips_us * scale * rows / near.rows
        return StripWork(rows, near.whole_us * scale / near.rows, strips_us)

    def gains(self, latent_factor: int) -> dict[str, float]:
        """Return the speed-up of all ranks in strips over one rank, by width and height of the image in pixels."""
        return {
            f"{latent_factor * each.width}x{latent_factor * each.height}": round(each.whole_us / each.strips_us, 2)
            for each in self.sizes
            if each.strips_us is not None
        }


def shared_out(costs: Sequence[float], speeds: Sequence[float]) -> list[int]:
    """Assign a rank to each cost: the largest cost first, each to the rank that finishes it soonest (Graham 1969)."""
    ends, found = [0.0] * len(speeds), [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        rank = min(range(len(speeds)), key=lambda rank: ends[rank] + costs[index] / speeds[rank])
        ends[rank] += costs[index] / speeds[rank]
        found[index] = rank
    return found


def duration(costs: Sequence[float], speeds: Sequence[float]) -> float:
    """Return the time until the last rank has finished its costs, as assigned by `shared_out`."""
    ends = [0.0] * len(speeds)
    for cost, rank in zip(costs, shared_out(costs, speeds), strict=True):
        ends[rank] += cost / speeds[rank]
    return max(ends)


def in_strips(works: Sequence[StripWork], speeds: Sequence[float]) -> list[bool]:
    """Choose the requests that all ranks draw in strips, so that the step ends soonest.

    Ranks that draw in strips wait for each other in every layer, so strips begin when all whole images are done. The
    largest requests are considered for strips first; on a tie, the request is drawn whole.

    Args:
        works: work of every request.
        speeds: speed of every rank, relative to the rank that was measured.
    """
    order = sorted(range(len(works)), key=lambda index: (-works[index].rows * works[index].row_us, index))
    best, best_us, strips_us = 0, math.inf, 0.0
    for count in range(min(len(works), _MAX_TRIED) + 1):
        if count:
            strips_us += works[order[count - 1]].strips_us
        if strips_us >= best_us:
            break
        whole = [works[index].row_us for index in order[count:] for _ in range(works[index].rows)]
        taken_us = strips_us + duration(whole, speeds)
        if taken_us < best_us:
            best, best_us = count, taken_us
    chosen = set(order[:best])
    return [index in chosen for index in range(len(works))]
