"""Inputs and results of the allocation problem (DiffServe section 3.3, equations 1 to 5). No torch."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from ...data.errors import UsageError

OVERPROVISION = 1.05
"""DiffServe's lambda: the ratio of capacity to estimated demand that a plan must provide."""

Status = Literal["optimal", "without-queues", "light-only", "overloaded"]


@dataclass(frozen=True, slots=True)
class ModelTimes:
    """Batch latency and throughput of one worker with one model, scoring included.

    Attributes:
        batch_sizes: batch sizes, ascending.
        throughput: T(b), requests a second for the mix of resolutions, by batch size.
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
        """Return the mean of e(b) over all resolutions for the batch size at this index."""
        return sum(numbers[index] for numbers in self.latency_s.values()) / len(self.latency_s)


@dataclass(frozen=True, slots=True)
class DeferralCurve:
    """f(t): the share of requests that is deferred to the heavy model at a confidence threshold t.

    Attributes:
        thresholds: t_0 = 0, then strictly ascending, at most 1.
        shares: f_0 = 0, then non-descending, at most 1.

    Raises:
        UsageError: the lists differ in length, are empty, or break these rules.
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
        """Return f at the greatest threshold of the curve that is not above this one."""
        return self.shares[max(k for k, each in enumerate(self.thresholds) if each <= threshold)]

    def improving(self, worth: Callable[[float], float]) -> "DeferralCurve":
        """Keep only the thresholds that are worth more than every smaller one.

        The largest feasible threshold is then always the best one, because a plan with capacity for a threshold also
        has capacity for all smaller ones.
        """
        best, kept = -math.inf, list[int]()
        for step, threshold in enumerate(self.thresholds):
            if (value := worth(threshold)) > best or not step:
                best = max(best, value)
                kept.append(step)
        return DeferralCurve(tuple(self.thresholds[k] for k in kept), tuple(self.shares[k] for k in kept))


@dataclass(frozen=True, slots=True)
class AllocationPlan:
    """Allocation of workers to models, valid until the next plan.

    Attributes:
        num_light, num_heavy: number of workers of each model. They add up to all workers; if workers are shared, each
            is the number of all workers.
        light_batch, heavy_batch: largest batch sizes; the heavy one is 0 if nothing is deferred.
        threshold: least confidence at which a light image is the answer; None if the system ignores confidences.
        share: f(t), the expected share of deferred requests; without a threshold, the share of requests that go to the
            heavy model directly.
        status: `optimal`: all SLOs are met and capacity suffices. `without-queues`: the same, but only if waiting
            times are ignored. `light-only`: there is no capacity for heavy images. `overloaded`: not even light images
            meet their SLOs.
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
    """Inputs for the allocation of the next period.

    Attributes:
        num_workers: S.
        demand: D, requests a second; 0 without traffic.
        light, heavy: e(b) and T(b) of each model.
        curve: f(t).
        slos_s: L of each resolution.
        light_wait_s, heavy_wait_s: q, the time that requests wait for a worker of each model.
        light_workers: current number of light workers; None at the start.
        overprovision: lambda.
        load: lambda D, requests a second.

    Raises:
        UsageError: a number is out of range, or profile and SLOs cover different resolutions.
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
        """Return whether equation 1 holds for every resolution.

        Args:
            light, heavy: indices of the batch sizes; heavy is None if nothing is deferred.
            with_waiting: whether waiting times count.
        """
        wait_s = 0.0
        if with_waiting:
            wait_s = self.light_wait_s + (0.0 if heavy is None else self.heavy_wait_s)
        return all(
            self.light.latency_s[name][light] + (0.0 if heavy is None else self.heavy.latency_s[name][heavy]) + wait_s
            <= slo_s
            for name, slo_s in self.slos_s.items()
        )

    def min_light_workers(self, light: int) -> int:
        """Return the least x_1 that carries the load at the batch size with this index (equation 2); at least 1."""
        # A billionth of a worker counts as a rounding error.
        return max(1, math.ceil(self.load / self.light.throughput[light] - 1e-9))


def best_of(problem: Problem, step: int, *, with_waiting: bool) -> AllocationPlan | None:
    """Return the best feasible plan with the threshold t_k, where k is `step`; None if there is none.

    The best plan switches the fewest workers; ties go to the most spare heavy capacity, then to the shortest batches.
    Spare workers serve the heavy model. Both solvers end with this function, so that they agree on ties.
    """
    threshold, share = problem.curve.thresholds[step], problem.curve.shares[step]
    needed = problem.load * share
    found: list[tuple[tuple[float, ...], AllocationPlan]] = []
    for light, light_batch in enumerate(problem.light.batch_sizes):
        num_light = problem.min_light_workers(light)
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
            plan = AllocationPlan(num_light, num_heavy, light_batch, heavy_batch, threshold, share, status)
            found.append(((switches, needed - capacity, latency_s, light_batch, heavy_batch), plan))
    return min(found, key=lambda each: each[0])[1] if found else None


def fits(needed: float, capacity: float) -> bool:
    """Return whether the capacity suffices; an excess of a billionth counts as a rounding error."""
    return needed <= capacity * (1 + 1e-9)


def light_only(problem: Problem) -> AllocationPlan:
    """Return the plan for when no other is feasible: all workers light, with the batch size of the highest throughput.

    Only batch sizes that meet all SLOs count, unless none does.
    """
    sizes = range(len(problem.light.batch_sizes))
    in_time = [index for index in sizes if problem.is_in_time(index, None, with_waiting=False)]
    status: Status = "light-only" if in_time else "overloaded"
    best = max(in_time or sizes, key=lambda index: (problem.light.throughput[index], -index))
    return AllocationPlan(problem.num_workers, 0, problem.light.batch_sizes[best], 0, 0.0, 0.0, status)


def waiting_s(length: float, arrivals: float, capacity: float) -> float:
    """Return q, the time that requests wait in a queue, by Little's law.

    Args:
        length: Q, the average length of the queue.
        arrivals: a, requests a second that join it.
        capacity: requests a second of the workers that serve it now. It takes the place of `arrivals` when no requests
            arrive any more and the queue only drains.
    """
    if length <= 0:
        return 0.0
    rate = arrivals if arrivals > 0 else capacity
    return length / rate if rate > 0 else math.inf


def thresholds_of(confidences: Sequence[float], step: float) -> tuple[float, ...]:
    """Return the thresholds of a curve, from 0 to 1: a grid of width `step`, and percentiles of the confidences."""
    grid = {round(number * step, 12) for number in range(math.floor(1 / step) + 1)} | {0.0, 1.0}
    ordered = sorted(confidences)
    quantiles = {ordered[len(ordered) * part // 100] for part in range(1, 100)} if ordered else set[float]()
    return tuple(sorted(grid | {value for value in quantiles if 0 < value < 1}))
