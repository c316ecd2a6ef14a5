"""DistriFusion as PatchedServe section 8 compares with it: one request at a time, on all GPUs. Simulated.

How much faster many GPUs draw one image is taken from the DistriFusion paper (Li et al., CVPR 2024; SDXL, 50 steps,
A100s), or from what was measured here.
"""

import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...data.errors import UsageError
from ...data.resolution import Resolution
from ...data.work import Work
from ..scheduling.policies import StepLatencyPredictor

Points = tuple[tuple[int, float], ...]
"""Pixels of an image, rising, and how many times as fast it is drawn."""

ALONE: Points = ((1024 * 1024, 1.0),)
"""Of one GPU, for all sizes."""


@dataclass(frozen=True, slots=True)
class Speedups:
    """How many times as fast several GPUs draw one image as one GPU.

    Attributes:
        points: by number of GPUs.
        source: whose figures they are, for messages.
    """

    points: Mapping[int, Points]
    source: str

    def of(self, resolution: Resolution, num_gpus: int) -> float:
        """Linear in the logarithm of the pixels between the sizes that are known, and constant beyond them.

        For images that are smaller than all of them that is in DistriFusion's favour: the smaller an image, the less
        there is to share out.

        Raises:
            UsageError: there are no figures for this number of GPUs.
        """
        points = self.check(num_gpus)
        place = bisect([pixels for pixels, _ in points], resolution.pixels)
        if place in (0, len(points)):
            return points[max(0, place - 1)][1]
        (low, slow), (high, fast) = points[place - 1 : place + 1]
        share = math.log(resolution.pixels / low) / math.log(high / low)
        return slow + share * (fast - slow)

    def check(self, num_gpus: int) -> Points:
        """The points of a number of GPUs. Raises as `of`."""
        if num_gpus not in self.points:
            allowed = ", ".join(map(str, sorted(self.points)))
            raise UsageError(f"number of GPUs is {num_gpus}, but {self.source} knows speedups only for {allowed}")
        return self.points[num_gpus]


# 1024x1024: table 1 (5.02 s on one; 3.35, 2.26 and 1.77 s). 1280x1920: figure 1 (12.3 and 4.16 s). 2048x2048: table 2
# (23.7 and 4.81 s). 3840x3840: figure 6.
PUBLISHED = Speedups(
    {
        1: ALONE,
        2: ((1024 * 1024, 5.02 / 3.35), (3840 * 3840, 1.8)),
        4: ((1024 * 1024, 5.02 / 2.26), (1280 * 1920, 12.3 / 4.16), (3840 * 3840, 3.4)),
        8: ((1024 * 1024, 5.02 / 1.77), (2048 * 2048, 23.7 / 4.81), (3840 * 3840, 6.1)),
    },
    "distrifusion-fcfs",
)


class DistriFusionLatency:
    """Step latencies of one image at a time on many GPUs, from those of one. Raises UsageError as `Speedups.of`."""

    def __init__(self, single: StepLatencyPredictor, num_gpus: int, speedups: Speedups = PUBLISHED) -> None:
        speedups.check(num_gpus)
        self._single, self._num_gpus, self._speedups = single, num_gpus, speedups

    def step_latency_s(self, active: Sequence[Resolution | Work]) -> float:
        """See `StepLatencyPredictor`; the batch is one whole image. Raises ValueError for another."""
        if isinstance(active[0], Work):
            raise ValueError(f"{active[0]} is to be drawn, but DistriFusion draws whole images")
        if len(active) != 1:
            raise ValueError(f"{len(active)} images are active, but DistriFusion draws one at a time")
        return self._single.step_latency_s(active) / self._speedups.of(active[0], self._num_gpus)
