"""What an allocation is decided from, and what it says (DiffServe section 3.3, equations 1 to 5). No torch."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from ...data.errors import UsageError

OVERPROVISION = 1.05
"""DiffServe's lambda: by how much capacity must exceed the estimated demand."""

Status = Literal["optimal", "without-queues", "light-only", "overloaded"]


@dataclass(frozen=True, slots=True)
class ModelTimes:
    """What one worker takes for batches of one model, scoring included.

    Attributes:
        batch_sizes: ascending.
        throughput: T(b), requests a second of the mix of resolutions, by batch size.
        latency_s: e(b) of each resolution, by batch size.

    Raises:
        UsageError: a number is missing, or is not positive.
    """

    batch_sizes: tuple[int, ...]
    throughput: tuple[float, ...]
    latency_s: Mapping[str, tuple[float, ...]]

    def __post_init__(self) -> None:
        count = len(self.batch_sizes)
        if not count or any(one >= other for one, other in pairwise((0, *self.batch_sizes))):
            raise UsageError(f"batch sizes are {list(self.batch_sizes)}, but they must be ascending numbers from 1 on")
        for what, numbers in {"throughput": self.throughput, **self.latency_s}.items():
            if len(numbers) != count or not all(0 < number < math.inf for number in numbers):
                raise UsageError(
                    f"the profile has {list(numbers)} for {what}, but it must have a positive number for each of the "
                    f"batch sizes {list(self.batch_sizes)}"
                )

    def mean_latency_s(self, index: int) -> float:
        """e(b) over all resolutions, of the batch size with this index."""
        return sum(numbers[index] for numbers in self.latency_s.values()) / len(self.latency_s)


@dataclass(frozen=True, slots=True)
class DeferralCurve:
    """f(t): which share of requests goes on to the heavy model at a threshold t of confidence.

    Attributes:
        thresholds: t_0 = 0, then ascending, at most 1.
        shares: f_0 = 0, then not descending, at most 1.

    Raises:
        UsageError: they are not so.
    """

    thresholds: tuple[float, ...]
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        t, f = self.thresholds, self.shares
        if len(t) != len(f) or not t:
            raise UsageError(
                f"a deferral curve has {len(t)} thresholds and {len(f)} shares, but it needs as many of both"
            )
        if t[0] != 0 or f[0] != 0:
            raise UsageError(f"a deferral curve begins with {t[0]:g}, {f[0]:g}, but nothing is deferred at threshold 0")
        if any(not one < other <= 1 for one, other in pairwise(t)):
            raise UsageError("thresholds of a deferral curve must ascend, up to 1 at most")
        if any(not one <= other <= 1 for one, other in pairwise(f)):
            raise UsageError("shares of a deferral curve must not descend, and be 1 at most")

    def share(self, threshold: float) -> float:
        """f at the greatest threshold of the curve that is not above this one."""
        return self.shares[max(k for k, each in enumerate(self.thresholds) if each <= threshold)]

    def improving(self, worth: Callable[[float], float]) -> "DeferralCurve":
        """Only the thresholds that are worth more than every smaller one. Whatever there is room for, the largest of
        them is then the best: a plan that has room for a threshold has room for all below it.
        """
        best, kept = -math.inf, list[int]()
        for step, threshold in enumerate(self.thresholds):
            if (value := worth(threshold)) > best or not step:
                best = max(best, value)
                kept.append(step)
        return DeferralCurve(tuple(self.thresholds[k] for k in kept), tuple(self.shares[k] for k in kept))


@dataclass(frozen=True, slots=True)
class Plan:
    """Who serves what, until the next plan.

    Attributes:
        num_light, num_heavy: workers of each model; together all of them, or each all of them if they are shared.
        light_batch, heavy_batch: largest batches; the heavy one is 0 where nothing is deferred.
        threshold: a light image of this confidence or more is the answer; None where nobody looks at confidences.
        share: f(t), of requests that are expected to be deferred; without a threshold, that are heavy from the start.
        status: `optimal`: in time and with room. `without-queues`: only if waiting is left out of account.
            `light-only`: there is no room for anything heavy. `overloaded`: not even light images are in time.
        is_shared: whether every worker draws with both models at once, in the same batches.
    """

    num_light: int
    num_heavy: int
    light_batch: int
    heavy_batch: int
    threshold: float | None
    share: float
    status: Status = "optimal"
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class Problem:
    """What the allocation of the next period is decided from.

    Attributes:
        num_workers: S.
        demand: D, requests a second; 0 where nobody asks.
        light, heavy: what a worker takes.
        curve: f(t).
        slos_s: L of each resolution.
        light_wait_s, heavy_wait_s: q, how long requests wait for a worker of each model.
        light_workers: how many there are of the light model now; None at the start.
        overprovision: lambda.

    Raises:
        UsageError: a number is out of its range, or the resolutions of profile and SLOs differ.
    """

    num_workers: int
    demand: float
    light: ModelTimes
    heavy: ModelTimes
    curve: DeferralCurve
    slos_s: Mapping[str, float]
    light_wait_s: float = 0.0
    heavy_wait_s: float = 0.0
    light_workers: int | None = None
    overprovision: float = OVERPROVISION
    load: float = field(init=False)

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise UsageError(f"there are {self.num_workers} workers, but at least one is needed")
        if not 0 < self.overprovision < math.inf:
            raise UsageError(f"lambda is {self.overprovision:g}, but it must be a positive number")
        if not 0 <= self.demand < math.inf:
            raise UsageError(f"demand is {self.demand:g} requests a second, but it must be a number from 0 on")
        known = set(self.slos_s)
        for what, times in (("light", self.light), ("heavy", self.heavy)):
            if set(times.latency_s) != known:
                raise UsageError(
                    f"the {what} model is profiled for {', '.join(sorted(times.latency_s)) or 'nothing'}, but SLOs are "
                    f"given for {', '.join(sorted(known)) or 'nothing'}"
                )
        object.__setattr__(self, "load", self.overprovision * self.demand)

    def is_in_time(self, light: int, heavy: int | None, *, with_waiting: bool) -> bool:
        """Equation 1, for every resolution, of the batch sizes with these indices; None if nothing is deferred."""
        wait_s = 0.0
        if with_waiting:
            wait_s = self.light_wait_s + (0.0 if heavy is None else self.heavy_wait_s)
        return all(
            self.light.latency_s[name][light] + (0.0 if heavy is None else self.heavy.latency_s[name][heavy]) + wait_s
            <= slo_s
            for name, slo_s in self.slos_s.items()
        )

    def least_light(self, light: int) -> int:
        """x_1 for the batch size with this index: as many as the load needs (equation 2), and at least one."""
        # A billionth of a worker is a rounding error.
        return max(1, math.ceil(self.load / self.light.throughput[light] - 1e-9))


def best_of(problem: Problem, step: int, *, with_waiting: bool) -> Plan | None:
    """Of all plans with the threshold t_k of `step`, the one that switches fewest workers; then with most heavy
    capacity to spare; then with the shortest batches. None if there is none.

    Both solvers end with this, so that they agree where several plans are as good. Spare workers are heavy.
    """
    threshold, share = problem.curve.thresholds[step], problem.curve.shares[step]
    needed = problem.load * share
    found: list[tuple[tuple[float, ...], Plan]] = []
    for light, light_batch in enumerate(problem.light.batch_sizes):
        num_light = problem.least_light(light)
        num_heavy = problem.num_workers - num_light
        if num_heavy < 0:
            continue
        for heavy, heavy_batch in [(None, 0)] if step == 0 else list(enumerate(problem.heavy.batch_sizes)):
            if not problem.is_in_time(light, heavy, with_waiting=with_waiting):
                continue
            capacity = 0.0 if heavy is None else num_heavy * problem.heavy.throughput[heavy]
            if heavy is not None and (num_heavy < 1 or not fits(needed, capacity)):
                continue
            switches = 0 if problem.light_workers is None else abs(num_light - problem.light_workers)
            latency_s = problem.light.mean_latency_s(light)
            latency_s += 0.0 if heavy is None else problem.heavy.mean_latency_s(heavy)
            status: Status = "optimal" if with_waiting else "without-queues"
            plan = Plan(num_light, num_heavy, light_batch, heavy_batch, threshold, share, status)
            found.append(((switches, needed - capacity, latency_s, light_batch, heavy_batch), plan))
    return min(found, key=lambda each: each[0])[1] if found else None


def fits(needed: float, capacity: float) -> bool:
    """Whether capacity is enough; a billionth is a rounding error."""
    return needed <= capacity * (1 + 1e-9)


def light_only(problem: Problem) -> Plan:
    """What is left where no plan is in time and has room: all workers light, as fast as the SLOs allow, or faster."""
    sizes = range(len(problem.light.batch_sizes))
    in_time = [index for index in sizes if problem.is_in_time(index, None, with_waiting=False)]
    status: Status = "light-only" if in_time else "overloaded"
    best = max(in_time or sizes, key=lambda index: (problem.light.throughput[index], -index))
    return Plan(problem.num_workers, 0, problem.light.batch_sizes[best], 0, 0.0, 0.0, status)


def waiting_s(length: float, arrivals: float, capacity: float) -> float:
    """q by Little's law: how long requests wait in a queue.

    Args:
        length: Q, of the queue on average.
        arrivals: a, into it, a second.
        capacity: of the workers that serve it now, a second: where nobody arrives any more, they drain it.
    """
    if length <= 0:
        return 0.0
    rate = arrivals if arrivals > 0 else capacity
    return length / rate if rate > 0 else math.inf


def thresholds_of(confidences: Sequence[float], step: float) -> tuple[float, ...]:
    """Where a curve is looked at: every `step`, and at quantiles of the confidences, from 0 to 1."""
    grid = {round(number * step, 12) for number in range(math.floor(1 / step) + 1)} | {0.0, 1.0}
    ordered = sorted(confidences)
    quantiles = {ordered[len(ordered) * part // 100] for part in range(1, 100)} if ordered else set[float]()
    return tuple(sorted(grid | {value for value in quantiles if 0 < value < 1}))
