"""How long steps last in the simulator beyond what a latency table says of a batch that stays the same. No torch.

Four things make a served step longer than a profiled one: the first step after a request has joined or left packs the
batch anew; the policy is asked and the books are kept between steps; preparing and decoding, which run beside the
steps, share the processor with them; and the machine may be slower than when it was profiled, in large batches more
than in small ones. `profiling.runs.calibration` measures them.
"""

import math
from bisect import bisect
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ...data.errors import UsageError
from ...data.resolution import Resolution
from ...data.work import Work, resolution_of
from ..scheduling.policies import LearningPredictor, StepLatencyPredictor
from ..scheduling.step_latency import MemoisedLatency, PerResolutionLatency

STAGES = ("prepare", "step", "decode")
PREPARE, STEP, DECODE = range(3)
Slowdown = tuple[tuple[float, float, float], tuple[float, float, float], tuple[float, float, float]]
"""By which share each of `STAGES` (rows) is prolonged by each (columns) that works beside it: 1 is twice as long. Two
at once add up, and the diagonal does not count, as every stage does one thing at a time."""
UNDISTURBED: Slowdown = ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
SHARED: Slowdown = ((0.0, 1.0, 1.0), (1.0, 0.0, 1.0), (1.0, 1.0, 0.0))
"""All stages on one core."""
MAX_SLOWDOWN = 9.0


class ProfiledSteps:
    """What was profiled of an engine's steps.

    Args:
        steady: of a batch that is the same as in the step before.
        first: of a batch that has changed, where that was profiled; else these are as long.
        by_resolution: the engine takes a pass for each resolution (the plain one), so that only batches of one are
            looked up, and only a resolution of which a request has joined or left has a first step.

    Attributes:
        steady, first: as given.
        told: latencies of steady steps of any batch.
    """

    def __init__(
        self, steady: StepLatencyPredictor, first: StepLatencyPredictor | None = None, *, by_resolution: bool = False
    ) -> None:
        self.steady, self.first = steady, first
        # One that learns changes, so that nothing it says is remembered.
        self._steady = steady if isinstance(steady, LearningPredictor) else MemoisedLatency(steady)
        self._first = None if first is None else MemoisedLatency(first)
        self._by_resolution = by_resolution
        self.told = MemoisedLatency(PerResolutionLatency(self._steady)) if by_resolution else self._steady

    def extra_s(self, batch: Sequence[Resolution | Work], changed: Collection[Resolution]) -> float:
        """Seconds that a step takes longer than a steady one, where requests of some resolutions have joined or left
        since the step before. Never negative, whatever the profile's noise. Raises as the predictors.
        """
        if self._first is None or not changed:
            return 0.0
        parts: list[Sequence[Resolution | Work]] = [batch]
        if self._by_resolution:
            parts = [(size,) * count for size, count in Counter(batch).items() if resolution_of(size) in changed]
        return sum(max(0.0, self._first.step_latency_s(each) - self._steady.step_latency_s(each)) for each in parts)


@dataclass(frozen=True, slots=True)
class Reuse:
    """Which steps of a request the model runs for where the patch cache takes a request whole or not at all.

    Which ones these are depends on the image; here all requests have as many, evenly spread.

    Attributes:
        warmup_steps: the first steps of every request, which are all computed, as is the last.
        interval: of the steps between, one of so many is computed.
        aside_s: seconds that a step takes where requests reuse, besides those of the requests that are computed.

    Raises:
        UsageError: a number is out of its range.
    """

    warmup_steps: int
    interval: float
    aside_s: float = 0.0

    def __post_init__(self) -> None:
        for name, low in (("warmup_steps", 0), ("interval", 1), ("aside_s", 0)):
            if not low <= getattr(self, name) < math.inf:
                raise UsageError(f"{name} of reuse is {getattr(self, name):g}, but it must be finite and {low} or more")

    def is_computed(self, steps_done: int, num_steps: int) -> bool:
        """Whether the model runs for a request in its next step."""
        between = steps_done - self.warmup_steps
        if between < 0 or steps_done >= num_steps - 1:
            return True
        return math.floor((between + 1) / self.interval) > math.floor(between / self.interval)


@dataclass(frozen=True, slots=True)
class StepDurations:
    """How long steps last, and how stages that work at the same time slow each other.

    Attributes:
        steps: what was profiled.
        scales: by number of requests in the batch, how many times as long steps last as was profiled; on straight
            lines between these numbers, and constant beyond them.
        first_scale: the same for what first steps take longer.
        between_s: from the end of a step to the start of the next, while there is a batch.
        slowdown: of steps and the other stages by each other.
        reuse: which requests of a batch the model runs for; None: all of them.
        is_inline: the other stages work between the steps (`--stages inline`), not beside them.

    Raises:
        UsageError: a number is out of its range.
    """

    steps: ProfiledSteps
    scales: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})
    first_scale: float = 1.0
    between_s: float = 0.0
    slowdown: Slowdown = UNDISTURBED
    reuse: Reuse | None = None
    is_inline: bool = False

    def __post_init__(self) -> None:
        if not self.scales or list(self.scales) != sorted(self.scales):
            raise UsageError("scales of step durations must be given for rising batch sizes")
        for scale in self.scales.values():
            if not 0 < scale < math.inf:
                raise UsageError(f"scale of step durations is {scale:g}, but it must be more than 0 and finite")
        for name in ("first_scale", "between_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name} is {getattr(self, name):g}, but it must be finite and not negative")
        for share in (share for row in self.slowdown for share in row):
            if not 0 <= share <= MAX_SLOWDOWN:
                raise UsageError(f"slowdown is {share:g}, but it must be from 0 to {MAX_SLOWDOWN:g}")

    @property
    def is_as_told(self) -> bool:
        """Whether steps last as long as was profiled of steady ones, so that there is nothing to learn."""
        return self == StepDurations(self.steps) and self.steps.first is None

    def scale_of(self, num_requests: int) -> float:
        """How many times as long as profiled a step of so many requests lasts."""
        if len(self.scales) == 1:
            return next(iter(self.scales.values()))
        sizes = list(self.scales)
        place = min(max(1, bisect(sizes, num_requests)), len(sizes) - 1)
        low, high = sizes[place - 1 : place + 1]
        share = min(max(0.0, (num_requests - low) / (high - low)), 1.0)
        return self.scales[low] + share * (self.scales[high] - self.scales[low])

    def undisturbed_s(
        self, batch: Sequence[Resolution | Work], changed: Collection[Resolution] = (), *, is_reusing: bool = False
    ) -> float:
        """Seconds of a step that the model takes for this batch while no other stage works.

        `changed` is as for `ProfiledSteps.extra_s`. With `is_reusing`, other requests take the step by reuse.
        """
        aside_s = self.reuse.aside_s if is_reusing and self.reuse is not None else 0.0
        if not batch:
            return aside_s
        steady_s = self.steps.told.step_latency_s(batch) * self.scale_of(len(batch))
        return aside_s + steady_s + self.steps.extra_s(batch, changed) * self.first_scale
