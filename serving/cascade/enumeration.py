"""Allocation by enumerating all pairs of batch sizes: exact, since they determine the rest of a plan. No torch."""

from bisect import bisect_right

from .problem import AllocationPlan, Problem, best_of, fits, light_only


def enumerate_plan(problem: Problem) -> AllocationPlan:
    """Return the plan with the largest threshold (equation 5), or the next best. The plan's `status` says which."""
    for with_waiting in (True, False):
        step = largest_step(problem, with_waiting=with_waiting)
        if step is not None:
            plan = best_of(problem, step, with_waiting=with_waiting)
            assert plan is not None
            return plan
    return light_only(problem)


def largest_step(problem: Problem, *, with_waiting: bool) -> int | None:
    """Return k of the largest threshold t_k of any feasible plan; None if no plan is feasible."""
    shares, best = problem.curve.shares, None
    for light in range(len(problem.light.batch_sizes)):
        num_heavy = problem.num_workers - problem.min_light_workers(light)
        if num_heavy < 0:
            continue
        if best is None and problem.is_in_time(light, None, with_waiting=with_waiting):
            best = 0
        if num_heavy < 1:
            continue
        for heavy in range(len(problem.heavy.batch_sizes)):
            if problem.is_in_time(light, heavy, with_waiting=with_waiting):
                capacity = num_heavy * problem.heavy.throughput[heavy]
                step = bisect_right(shares, capacity, key=lambda share: problem.load * share)
                # An excess of a billionth still fits.
                while step < len(shares) and fits(problem.load * shares[step], capacity):
                    step += 1
                best = max(step - 1, best or 0) if step > 1 else best
    return best
