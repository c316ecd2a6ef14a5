"""DistriFusion as the baseline of PatchedServe section 8: one request at a time, on all GPUs. Simulated.

The speed-ups of several GPUs on one image are those of the DistriFusion paper (Li et al., CVPR 2024; SDXL, 50 steps,
A100s), or our own measurements.
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
"""Pairs of an image's number of pixels, rising, and its speed-up."""

ALONE: Points = ((1024 * 1024, 1.0),)
"""Points of one GPU, for all sizes."""


@dataclass(frozen=True, slots=True)
class Speedups:
    """Speed-ups of several GPUs that draw one image, over one GPU.

    Attributes:
        points: points by number of GPUs.
        source: name of the source of these figures, for messages.
    """

    points: Mapping[int, Points]
    source: str

    def of(self, resolution: Resolution, num_gpus: int) -> float:
        """Return the speed-up for a resolution: linear in the logarithm of the pixels between the known sizes, and
        constant beyond them.

        For images smaller than all known sizes, this favours DistriFusion: the smaller an image, the less work there is
        to share.

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
        """Return the points for a number of GPUs. Raises UsageError if there are none."""
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
    """Step latencies of one image at a time on several GPUs, from those of one GPU.

    Raises UsageError if there are no figures for the number of GPUs.
    """

    def __init__(self, single: StepLatencyPredictor, num_gpus: int, speedups: Speedups = PUBLISHED) -> None:
        speedups.check(num_gpus)
        self._single, self._num_gpus, self._speedups = single, num_gpus, speedups

    def step_latency_s(self, active: Sequence[Resolution | Work]) -> float:
        """Return the seconds of one step over one whole image. Raises ValueError for any other batch."""
        if isinstance(active[0], Work):
            raise ValueError(f"{active[0]} is to be drawn, but DistriFusion draws whole images")
        if len(active) != 1:
            raise ValueError(f"{len(active)} images are active, but DistriFusion draws one at a time")
        return self._single.step_latency_s(active) / self._speedups.of(active[0], self._num_gpus)
