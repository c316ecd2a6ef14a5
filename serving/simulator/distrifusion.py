"""DistriFusion as PatchedServe section 8 compares with it: one request at a time, on all GPUs. Simulated only.

Our engine runs on one device, so how much faster many GPUs draw one image is taken from the DistriFusion paper (Li et
al., CVPR 2024; SDXL, 50 steps, A100s).
"""

import math
from bisect import bisect
from collections.abc import Sequence

from ...data.errors import UsageError
from ...data.resolution import Resolution
from ..scheduling.policies import StepLatencyPredictor

# Speedup over one GPU by number of GPUs: pixels of the image, and how many times as fast.
# 1024x1024: table 1 (5.02 s on one; 3.35, 2.26 and 1.77 s). 1280x1920: figure 1 (12.3 and 4.16 s). 2048x2048: table 2
# (23.7 and 4.81 s). 3840x3840: figure 6.
_SPEEDUPS: dict[int, tuple[tuple[int, float], ...]] = {
    1: ((1024 * 1024, 1.0),),
    2: ((1024 * 1024, 5.02 / 3.35), (3840 * 3840, 1.8)),
    4: ((1024 * 1024, 5.02 / 2.26), (1280 * 1920, 12.3 / 4.16), (3840 * 3840, 3.4)),
    8: ((1024 * 1024, 5.02 / 1.77), (2048 * 2048, 23.7 / 4.81), (3840 * 3840, 6.1)),
}


def speedup(resolution: Resolution, num_gpus: int) -> float:
    """How many times as fast `num_gpus` GPUs draw one image as one GPU.

    Linear in the logarithm of the pixels between the sizes that the paper reports, and constant beyond them. For images
    below 1024x1024 that is in DistriFusion's favour: the smaller an image, the less there is to share out.

    Raises:
        UsageError: the paper has no figures for this number of GPUs.
    """
    if num_gpus not in _SPEEDUPS:
        allowed = ", ".join(map(str, _SPEEDUPS))
        raise UsageError(f"number of GPUs is {num_gpus}, but distrifusion-fcfs knows speedups only for {allowed}")
    points = _SPEEDUPS[num_gpus]
    place = bisect([pixels for pixels, _ in points], resolution.pixels)
    if place in (0, len(points)):
        return points[max(0, place - 1)][1]
    (low, slow), (high, fast) = points[place - 1 : place + 1]
    share = math.log(resolution.pixels / low) / math.log(high / low)
    return slow + share * (fast - slow)


class DistriFusionLatency:
    """Step latencies of one image at a time on many GPUs, from those of one. Raises UsageError as `speedup`."""

    def __init__(self, single: StepLatencyPredictor, num_gpus: int) -> None:
        speedup(Resolution(1024, 1024), num_gpus)
        self._single = single
        self._num_gpus = num_gpus

    def step_latency_s(self, active: Sequence[Resolution]) -> float:
        """See `StepLatencyPredictor`; the batch is one image. Raises ValueError for another."""
        if len(active) != 1:
            raise ValueError(f"{len(active)} images are active, but DistriFusion draws one at a time")
        return self._single.step_latency_s(active) / speedup(active[0], self._num_gpus)
