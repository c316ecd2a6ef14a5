"""Allocators of workers to models: DiffServe, its ablations and its baselines. No torch.

Source: DiffServe section 4.1 (table 1) and section 4.5.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from .enumeration import enumerate_plan
from .problem import (
    OVERPROVISION,
    AllocationPlan,
    DeferralCurve,
    ModelTimes,
    Problem,
    Status,
    fits,
    light_only,
    waiting_s,
)

Solver = Callable[[Problem], AllocationPlan]
QueueModel = Literal["little", "factor"]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Workers, models and SLOs that an allocator plans for.

    Attributes:
        num_workers: S.
        light, heavy: e(b) and T(b) of a worker with each model.
        slos_s: L of each resolution.
        overprovision: lambda.
    """

    num_workers: int
    light: ModelTimes
    heavy: ModelTimes
    slos_s: dict[str, float]
    overprovision: float = OVERPROVISION

    def problem(self, observed: "Observations", **more: float) -> Problem:
        """Return the allocation problem for the current observations."""
        return Problem(
            observed.num_workers or self.num_workers,
            observed.demand,
            self.light,
            self.heavy,
            observed.curve,
            self.slos_s,
            light_workers=None if observed.plan is None else observed.plan.num_light,
            overprovision=self.overprovision,
            **more,
        )


@dataclass(frozen=True, slots=True)
class Observations:
    """Observations of the controller at the time of a plan.

    Attributes:
        demand: D, requests a second.
        curve: f(t).
        light_queue, heavy_queue: average number of waiting requests.
        light_arrivals, heavy_arrivals: requests a second that are sent to each model.
        plan: the current plan; None at the start.
        num_workers: number of live workers after some have died; None for all.
    """

    demand: float
    curve: DeferralCurve
    light_queue: float = 0.0
    heavy_queue: float = 0.0
    light_arrivals: float = 0.0
    heavy_arrivals: float = 0.0
    plan: AllocationPlan | None = None
    num_workers: int | None = None


class Allocator(Protocol):
    """Makes the plan of the next period."""

    def __call__(self, observed: Observations) -> AllocationPlan:
        """Return the plan for the current observations."""
        ...


@dataclass(frozen=True, slots=True)
class DiffServe:
    """The paper's allocation (section 3.3).

    Attributes:
        cluster: workers, models and SLOs.
        solve: `Milp()` or `enumerate_plan`.
        queue_factor: waiting time as a multiple of the batch duration (ablation `no-queue`; Proteus uses 2, and 1
            means waiting for one batch); None to estimate it by Little's law.
        threshold: constant threshold (ablation `static-threshold`); None to choose one in every plan.
        worth: value of a threshold; None if a larger one is always better, as in the paper.
    """

    cluster: Cluster
    solve: Solver = enumerate_plan
    queue_factor: float | None = None
    threshold: float | None = None
    worth: Callable[[float], float] | None = None

    def __call__(self, observed: Observations) -> AllocationPlan:
        """Return the solver's plan under these settings."""
        if self.worth is not None:
            observed = replace(observed, curve=observed.curve.improving(self.worth))
        if self.threshold is not None:
            share = observed.curve.share(self.threshold)
            fixed = (
                DeferralCurve((0.0, self.threshold), (0.0, share)) if self.threshold else DeferralCurve((0.0,), (0.0,))
            )
            observed = replace(observed, curve=fixed)
        cluster = self.cluster
        if self.queue_factor is not None:
            # e + q = (1 + factor) e.
            light, heavy = (_longer(times, 1 + self.queue_factor) for times in (cluster.light, cluster.heavy))
            problem = replace(cluster, light=light, heavy=heavy).problem(observed)
        else:
            waits = _waits(cluster, observed)
            problem = cluster.problem(observed, light_wait_s=waits[0], heavy_wait_s=waits[1])
        plan = self.solve(problem)
        if self.threshold and plan.threshold != self.threshold:
            return _closest_plan(problem, self.threshold)
        return plan


@dataclass(frozen=True, slots=True)
class Fixed:
    """Allocator with one plan for the whole trace: `diffserve-static`, and both `clipper` systems."""

    plan: AllocationPlan

    def __call__(self, observed: Observations) -> AllocationPlan:
        """Return the fixed plan."""
        return self.plan


@dataclass(frozen=True, slots=True)
class Proteus:
    """Random routing with the largest share p of heavy requests that capacity allows (Ahmad et al., ASPLOS 2024).

    p is the largest number with x_1 T_1 >= lambda D (1 - p), x_2 T_2 >= lambda D p and e_i + q_i <= L.
    """

    cluster: Cluster

    def __call__(self, observed: Observations) -> AllocationPlan:
        """Return the plan whose `share` is p and whose `threshold` is None."""
        cluster, waits = self.cluster, _waits(self.cluster, observed)
        problem = cluster.problem(observed)
        now = None if observed.plan is None else observed.plan.num_light
        for light_wait_s, heavy_wait_s in (waits, (0.0, 0.0)):
            found: list[tuple[tuple[float, ...], AllocationPlan]] = []
            light_sizes = _in_time(cluster.light, cluster.slos_s, light_wait_s)
            heavy_sizes = _in_time(cluster.heavy, cluster.slos_s, heavy_wait_s)
            for num_heavy in range(problem.num_workers + 1):
                num_light = problem.num_workers - num_heavy
                light = max(light_sizes, key=cluster.light.throughput.__getitem__, default=None)
                heavy = max(heavy_sizes, key=cluster.heavy.throughput.__getitem__, default=None)
                if (num_light and light is None) or (num_heavy and heavy is None):
                    continue
                light_capacity = 0.0 if light is None else num_light * cluster.light.throughput[light]
                heavy_capacity = 0.0 if heavy is None else num_heavy * cluster.heavy.throughput[heavy]
                share = 1.0 if heavy_capacity >= problem.load else heavy_capacity / problem.load
                if not fits(problem.load * (1 - share), light_capacity):
                    continue
                plan = AllocationPlan(
                    num_light,
                    num_heavy,
                    0 if light is None else cluster.light.batch_sizes[light],
                    0 if heavy is None else cluster.heavy.batch_sizes[heavy],
                    None,
                    share,
                    "optimal" if (light_wait_s, heavy_wait_s) == waits else "without-queues",
                )
                switches = 0 if now is None else abs(num_light - now)
                found.append(((-share, switches, -heavy_capacity), plan))
            if found:
                return min(found, key=lambda each: each[0])[1]
        return replace(light_only(problem), threshold=None)


@dataclass(frozen=True, slots=True)
class Shared:
    """Every worker draws light and heavy images in the same batches, which requires that both are of one model.

    There is nothing to partition and no worker to switch: heavy images use the capacity that light images leave on all
    workers. In batches of b, an image occupies a worker for 1 / T_i(b) seconds, so that

        lambda D (1 / T_1(b) + f(t) / T_2(b)) <= S    and    e_1(b) + e_2(b) + 2 q <= L

    where q is the time that a request waits for a place in a batch. The plan has the largest t; ties between batch
    sizes go to the most spare capacity, then to the shortest batches.

    Attributes:
        cluster: workers, models and SLOs; both models are profiled for the same batch sizes.
        worth: value of a threshold, as in `DiffServe`.
    """

    cluster: Cluster
    worth: Callable[[float], float] | None = None

    def __call__(self, observed: Observations) -> AllocationPlan:
        """Return a plan in which all workers are shared."""
        if self.worth is not None:
            observed = replace(observed, curve=observed.curve.improving(self.worth))
        light, heavy = self.cluster.light, self.cluster.heavy
        # Requests for light and for heavy images wait in the same queues.
        arrivals = observed.light_arrivals + observed.heavy_arrivals
        capacity = self.cluster.num_workers * light.throughput[0]
        wait_s = waiting_s(observed.light_queue + observed.heavy_queue, arrivals, capacity)
        problem = self.cluster.problem(observed, light_wait_s=wait_s, heavy_wait_s=wait_s)
        for with_waiting in (True, False):
            found: list[tuple[tuple[float, ...], AllocationPlan]] = []
            for index, size in enumerate(light.batch_sizes):
                room = problem.num_workers - problem.load / light.throughput[index]
                if room < 0 or not problem.is_in_time(index, None, with_waiting=with_waiting):
                    continue
                capacity, step = room * heavy.throughput[index], 0
                if problem.is_in_time(index, index, with_waiting=with_waiting):
                    step = bisect_right(problem.curve.shares, capacity, key=lambda share: problem.load * share) - 1
                plan = self._plan(problem, size, step, "optimal" if with_waiting else "without-queues")
                spare = capacity - problem.load * plan.share
                found.append(((-step, -spare, heavy.mean_latency_s(index)), plan))
            if found:
                return min(found, key=lambda each: each[0])[1]
        rest = light_only(problem)
        return self._plan(problem, rest.light_batch, 0, rest.status)

    def _plan(self, problem: Problem, size: int, step: int, status: Status) -> AllocationPlan:
        count, curve = problem.num_workers, problem.curve
        return AllocationPlan(
            count, count, size, size, curve.thresholds[step], curve.shares[step], status, is_shared=True
        )


def clipper(cluster: Cluster, leg: Literal["light", "heavy"]) -> Fixed:
    """Return the plan in which all workers serve one model; its batch sizes follow `Aimd`."""
    if leg == "light":
        return Fixed(AllocationPlan(cluster.num_workers, 0, cluster.light.batch_sizes[-1], 0, None, 0.0))
    return Fixed(AllocationPlan(0, cluster.num_workers, 0, cluster.heavy.batch_sizes[-1], None, 1.0))


def static(cluster: Cluster, curve: DeferralCurve, peak: float, solve: Solver = enumerate_plan) -> Fixed:
    """Return DiffServe's plan for the peak of the trace, kept for the whole trace."""
    return Fixed(solve(cluster.problem(Observations(peak, curve))))


def _waits(cluster: Cluster, observed: Observations) -> tuple[float, float]:
    """Return q of both models by Little's law; a queue without arrivals drains at the capacity of its workers."""
    light = heavy = 0.0
    if (plan := observed.plan) is not None:
        light = plan.num_light * _throughput(cluster.light, plan.light_batch)
        heavy = plan.num_heavy * _throughput(cluster.heavy, plan.heavy_batch)
    return (
        waiting_s(observed.light_queue, observed.light_arrivals, light),
        waiting_s(observed.heavy_queue, observed.heavy_arrivals, heavy),
    )


def _throughput(times: ModelTimes, batch_size: int) -> float:
    return times.throughput[times.batch_sizes.index(batch_size)] if batch_size else 0.0


def _in_time(times: ModelTimes, slos_s: dict[str, float], wait_s: float) -> list[int]:
    """Return the indices of the batch sizes at which every resolution meets its SLO."""
    return [
        index
        for index in range(len(times.batch_sizes))
        if all(times.latency_s[name][index] + wait_s <= slo_s for name, slo_s in slos_s.items())
    ]


def _longer(times: ModelTimes, factor: float) -> ModelTimes:
    latency_s = {name: tuple(factor * each for each in numbers) for name, numbers in times.latency_s.items()}
    return replace(times, latency_s=latency_s)


def _closest_plan(problem: Problem, threshold: float) -> AllocationPlan:
    """Return the plan for a threshold that exceeds the capacity.

    Workers are divided in proportion to the work of each model, at the batch sizes of the highest throughput.
    """
    share = problem.curve.share(threshold)
    light = max(range(len(problem.light.batch_sizes)), key=problem.light.throughput.__getitem__)
    heavy = max(range(len(problem.heavy.batch_sizes)), key=problem.heavy.throughput.__getitem__)
    of_light, of_heavy = 1 / problem.light.throughput[light], share / problem.heavy.throughput[heavy]
    count = problem.num_workers
    num_light = min(max(1, math.ceil(count * of_light / (of_light + of_heavy) - 0.5)), max(1, count - 1))
    return AllocationPlan(
        num_light,
        count - num_light,
        problem.light.batch_sizes[light],
        problem.heavy.batch_sizes[heavy],
        threshold,
        share,
        "overloaded",
    )
