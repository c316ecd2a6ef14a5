"""Durations of steps in the simulator, beyond the profiled latency of an unchanged batch. No torch.

Four effects make a served step longer than a profiled one: the first step after a request has joined or left packs the
batch again; scheduling and bookkeeping take time between steps; preparing and decoding, which run concurrently with the
steps, share the processor with them; and the machine may be slower than during profiling, in large batches more than in
small ones. `serving.runs.simulated.calibration` measures them.
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
from .graphs import GraphModel

STAGES = ("prepare", "step", "decode")
PREPARE, STEP, DECODE = range(3)
Slowdown = tuple[tuple[float, float, float], tuple[float, float, float], tuple[float, float, float]]
"""Slowdown of each of `STAGES` (rows) by each stage that works at the same time (columns), as a share: 1 doubles its
time. The shares of two such stages add up. The diagonal is ignored, as a stage does one thing at a time."""
UNDISTURBED: Slowdown = ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
SHARED: Slowdown = ((0.0, 1.0, 1.0), (1.0, 0.0, 1.0), (1.0, 1.0, 0.0))
"""All stages on one core."""
MAX_SLOWDOWN = 9.0


class ProfiledSteps:
    """Profiled latencies of an engine's steps.

    Args:
        steady: latencies of steps with the same batch as the previous step.
        first: latencies of steps after a change of the batch, if profiled; None if they are as long as steady ones.
        by_resolution: whether the engine runs one pass per resolution (the plain engine). Then only batches of one
            resolution are looked up, and only a resolution whose requests have joined or left has a first step.

    Attributes:
        steady, first: as given.
        policy_latency: latencies of steady steps of any batch.
    """

    def __init__(
        self, steady: StepLatencyPredictor, first: StepLatencyPredictor | None = None, *, by_resolution: bool = False
    ) -> None:
        self.steady, self.first = steady, first
        # A learning predictor changes, so its predictions are not memoised.
        self._steady = steady if isinstance(steady, LearningPredictor) else MemoisedLatency(steady)
        self._first = None if first is None else MemoisedLatency(first)
        self._by_resolution = by_resolution
        self.policy_latency = MemoisedLatency(PerResolutionLatency(self._steady)) if by_resolution else self._steady

    def extra_s(self, batch: Sequence[Resolution | Work], changed: Collection[Resolution]) -> float:
        """Return the seconds that a step takes longer than a steady one, if requests of the `changed` resolutions have
        joined or left since the previous step. Never negative, despite noise in the profile. Raises the predictors'
        errors.
        """
        if self._first is None or not changed:
            return 0.0
        parts: list[Sequence[Resolution | Work]] = [batch]
        if self._by_resolution:
            parts = [(size,) * count for size, count in Counter(batch).items() if resolution_of(size) in changed]
        return sum(max(0.0, self._first.step_latency_s(each) - self._steady.step_latency_s(each)) for each in parts)


@dataclass(frozen=True, slots=True)
class Reuse:
    """Steps of a request that are computed, if the patch cache reuses a request either whole or not at all.

    In reality these steps depend on the image; here all requests have the same number of them, evenly spread.

    Attributes:
        warmup_steps: number of first steps of every request that are all computed. The last step is computed, too.
        interval: one in `interval` of the steps in between is computed.
        aside_s: seconds that a step with reusing requests takes in addition to those of the computed requests.

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
        """Return whether the model runs for a request in its next step."""
        between = steps_done - self.warmup_steps
        if between < 0 or steps_done >= num_steps - 1:
            return True
        return math.floor((between + 1) / self.interval) > math.floor(between / self.interval)


@dataclass(frozen=True, slots=True)
class StepDurations:
    """Durations of steps, and the slowdown of stages that work at the same time.

    Attributes:
        steps: profiled latencies.
        scales: factors on profiled latencies by number of requests in the batch; linear between these numbers, and
            constant beyond them.
        first_scale: factor on the extra time of first steps.
        between_s: seconds from the end of a step to the start of the next one, while the batch is not empty.
        slowdown: slowdown of steps and the other stages by each other.
        reuse: steps of requests that the model computes; None: all of them.
        is_inline: whether the other stages run between the steps (`--stages inline`), not concurrently with them.
        graphs: how passes are launched, for workers; None: profiled latencies include it.

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
    graphs: GraphModel | None = None

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
    def is_as_profiled(self) -> bool:
        """Whether all steps last as long as profiled steady ones, so that a predictor has nothing to learn."""
        return self == StepDurations(self.steps) and self.steps.first is None

    def scale_of(self, num_requests: int) -> float:
        """Return the factor on the profiled latency of a step of `num_requests` requests."""
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
        """Return the seconds of a step in which the model computes this batch while no other stage works.

        `changed` is as in `ProfiledSteps.extra_s`. With `is_reusing`, other requests take the step by reuse.
        """
        aside_s = self.reuse.aside_s if is_reusing and self.reuse is not None else 0.0
        if not batch:
            return aside_s
        steady_s = self.steps.policy_latency.step_latency_s(batch) * self.scale_of(len(batch))
        return aside_s + steady_s + self.steps.extra_s(batch, changed) * self.first_scale
