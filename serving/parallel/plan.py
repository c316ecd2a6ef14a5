"""Which images all ranks draw together, and which one rank each draws whole: whatever takes less time. No torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...data.resolution import RESOLUTION_MULTIPLE

_MOST_TRIED = 16
"""Of the largest requests, how many at most are thought of in strips: the rest of a batch is for the ranks to share."""


@dataclass(frozen=True, slots=True)
class SizeTimes:
    """What a call takes for latents of one size.

    Attributes:
        height, width: of the latents.
        rows: of the batch that was measured: those of one request.
        whole_us: on one rank.
        strips_us: on all of them, in strips; None where the image is too low to be shared.
    """

    height: int
    width: int
    rows: int
    whole_us: float
    strips_us: float | None


@dataclass(frozen=True, slots=True)
class Work:
    """A request in a step.

    Attributes:
        rows: that it takes in a batch; ranks may have one each.
        row_us: of one of them, on one rank.
        strips_us: of all of them, on all ranks in strips.
    """

    rows: int
    row_us: float
    strips_us: float


@dataclass(frozen=True, slots=True)
class Times:
    """What was measured, for any size: those of the nearest one, by the number of pixels."""

    sizes: Sequence[SizeTimes]

    def work(self, height: int, width: int, rows: int) -> Work:
        """Of a request with latents of this size."""
        pixels = height * width
        near = min(self.sizes, key=lambda each: abs(math.log(each.height * each.width / pixels)))
        scale = pixels / (near.height * near.width)
        strips_us = math.inf if near.strips_us is None else near.strips_us * scale * rows / near.rows
        return Work(rows, near.whole_us * scale / near.rows, strips_us)

    def gains(self) -> dict[str, float]:
        """How much faster than one rank all of them draw an image in strips, by its width and height in pixels."""
        return {
            _in_pixels(each.height, each.width): round(each.whole_us / each.strips_us, 2)
            for each in self.sizes
            if each.strips_us is not None
        }


def _in_pixels(height: int, width: int) -> str:
    return f"{RESOLUTION_MULTIPLE * width}x{RESOLUTION_MULTIPLE * height}"


def shared_out(costs: Sequence[float], speeds: Sequence[float]) -> list[int]:
    """A rank for each of the costs: the longest first, each where it is done soonest (Graham 1969)."""
    ends, found = [0.0] * len(speeds), [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        rank = min(range(len(speeds)), key=lambda rank: ends[rank] + costs[index] / speeds[rank])
        ends[rank] += costs[index] / speeds[rank]
        found[index] = rank
    return found


def duration(costs: Sequence[float], speeds: Sequence[float]) -> float:
    """Until the last rank has done what it has by `shared_out`."""
    ends = [0.0] * len(speeds)
    for cost, rank in zip(costs, shared_out(costs, speeds), strict=True):
        ends[rank] += cost / speeds[rank]
    return max(ends)


def in_strips(works: Sequence[Work], speeds: Sequence[float]) -> list[bool]:
    """Which requests all ranks draw in strips, so that the step is over soonest.

    Ranks that draw in strips wait for each other in every layer, so that strips begin when all whole images are done.
    The largest requests come first; a request is whole where both take the same time.

    Args:
        works: of every request.
        speeds: of the ranks, relative to the one that was measured.
    """
    order = sorted(range(len(works)), key=lambda index: (-works[index].rows * works[index].row_us, index))
    best, best_us, strips_us = 0, math.inf, 0.0
    for count in range(min(len(works), _MOST_TRIED) + 1):
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
