"""Allocation as a mixed integer linear program: DiffServe's own form, solved by HiGHS. No torch.

The variables are vectors over batch sizes or thresholds: z_1 and z_2 select the batch size of each model, y_1 and y_2
count its workers, u selects the threshold. The constraints are equations 1 to 5 of section 3.3, with the products of
workers and batch sizes linearised.
"""

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import Bounds, LinearConstraint, milp

from .enumeration import enumerate_plan, largest_step
from .problem import AllocationPlan, Problem, best_of, light_only

LIMIT_S = 1.0


class Milp:
    """Solver that uses HiGHS and checks every plan.

    Attributes:
        num_plans: number of plans made so far.
        num_replaced: number of plans replaced by `enumerate_plan`, because HiGHS exceeded its time limit or its plan
            was not optimal.
    """

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self.num_plans = self.num_replaced = 0

    def __call__(self, problem: Problem) -> AllocationPlan:
        """Return the plan with the largest feasible threshold, as `enumerate_plan` does."""
        self.num_plans += 1
        for with_waiting in (True, False):
            step, is_late = solve(problem, with_waiting=with_waiting, limit_s=self._limit_s)
            if is_late or step != largest_step(problem, with_waiting=with_waiting):
                self.num_replaced += 1
                return enumerate_plan(problem)
            if step is not None:
                plan = best_of(problem, step, with_waiting=with_waiting)
                assert plan is not None
                return plan
        return light_only(problem)


def solve(problem: Problem, *, with_waiting: bool, limit_s: float = LIMIT_S) -> tuple[int | None, bool]:
    """Return k of the largest feasible threshold and whether the solver gave up first; k is None without a result."""
    light, heavy, curve = problem.light, problem.heavy, problem.curve
    counts = (len(light.batch_sizes), len(heavy.batch_sizes))
    ends = np.cumsum([*counts, *counts, len(curve.thresholds)])
    z_1, z_2, y_1, y_2, u = (
        slice(end - size, end) for end, size in zip(ends, (*counts, *counts, len(curve.shares)), strict=True)
    )
    rows: list[tuple[np.ndarray, float, float]] = []

    def row(low: float, high: float, **parts: ArrayLike) -> None:
        weights = np.zeros(ends[-1])
        for name, values in parts.items():
            weights[places[name]] = values
        rows.append((weights, low, high))

    places = {"z_1": z_1, "z_2": z_2, "y_1": y_1, "y_2": y_2, "u": u}
    first = np.zeros(len(curve.shares))
    first[0] = 1.0
    workers, infinity = problem.num_workers, np.inf
    row(1, 1, u=1)
    row(1, 1, z_1=1)
    row(1, 1, z_2=1, u=first)
    row(1, infinity, y_1=1)
    row(1, infinity, y_2=1, u=first)
    row(-infinity, workers, y_1=1, y_2=1)
    for y, z, count in (("y_1", "z_1", counts[0]), ("y_2", "z_2", counts[1])):
        for own in np.eye(count):
            row(-infinity, 0, **{y: own, z: -workers * own})
    row(problem.load, infinity, y_1=np.array(light.throughput))
    row(0, infinity, y_2=np.array(heavy.throughput), u=-problem.load * np.array(curve.shares))
    waits = (problem.light_wait_s, problem.heavy_wait_s) if with_waiting else (0.0, 0.0)
    if not np.isfinite(waits[0]):
        return None, False
    for name, slo_s in problem.slos_s.items():
        # An infinite wait is replaced by one that no SLO allows.
        heavy_wait_s = min(waits[1], 2 * slo_s)
        row(
            -infinity,
            slo_s - waits[0] - heavy_wait_s,
            z_1=np.array(light.latency_s[name]),
            z_2=np.array(heavy.latency_s[name]),
            u=-heavy_wait_s * first,
        )
    weights, low, high = (np.array(each) for each in zip(*rows, strict=True))
    objective = np.zeros(ends[-1])
    objective[u] = -np.array(curve.thresholds)
    most = np.ones(ends[-1])
    most[y_1] = most[y_2] = workers
    found = milp(
        objective,
        constraints=LinearConstraint(weights, low, high),  # pyright: ignore[reportArgumentType]  it takes arrays
        integrality=np.ones(ends[-1]),
        bounds=Bounds(0, most),  # pyright: ignore[reportArgumentType]  as above
        options={"time_limit": limit_s, "mip_rel_gap": 0.0},
    )
    if found.status == 2:  # infeasible
        return None, False
    if found.status != 0 or found.x is None:
        return None, True
    return int(np.argmax(found.x[u])), False
