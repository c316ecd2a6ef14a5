"""Searches that plan a deployment: the rate that GPUs sustain, and the GPUs that a rate needs. No torch.

A search is only as accurate as the simulator. It therefore runs three times: once as simulated, and with steps as much
faster and slower as runs on the engine were (`duration_ratio_range`).
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ....data.errors import RunError, UsageError
from ....data.requests import Request
from ....data.statistics import Estimate, student_interval
from ....data.traces.traces import retime
from ...options import EngineName
from ...scheduling.systems import get_system
from .calibration import Calibration
from .deployment import SimulatedDeployment

MAX_GPUS = 4096
"""Maximum number of GPUs that a search tries."""
_RATE_PRECISION = 0.01
_MAX_DOUBLINGS = 40


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Result of a search: the highest rate in requests per second or the smallest number of GPUs, its SLO attainment,
    and the attainment of all values tried, in ascending order.
    """

    value: float
    attainment: float
    tried: dict[float, float]


class InfeasibleError(RunError):
    """The target is not met at any rate, or by any number of GPUs."""


@dataclass(frozen=True, slots=True)
class DurationRatioRange:
    """Range of the ratio of the measured to the simulated duration of a run's steps.

    Attributes:
        low, high: ends of Student's 95 % prediction interval for a run.
        num: number of runs, or of systems and rates, behind the interval.
        source: `comparison` of the simulator with the engine, or `calibration`, the residuals of its fit.
    """

    low: float
    high: float
    num: int
    source: str


def duration_ratio_range(calibration: Calibration, engine: EngineName, file: Path) -> DurationRatioRange | None:
    """Return the range from the sweep that wrote a calibration file: from its comparison if it has one, otherwise from
    the calibration. None if neither has enough runs.

    Raises UsageError if the result of the sweep is damaged.
    """
    result, ratios, source = file.with_name("result.json"), list(calibration.ratios), "calibration"
    if result.exists():
        try:
            rows = json.loads(result.read_text(encoding="utf-8"))["agreement"]["rows"]
            mine = [row for row in rows if get_system(row["policy"], is_simulated=True).engine == engine]
            compared = [1 / (1 + row["step_difference"]) for row in mine if row["step_difference"] is not None]
        except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
            raise UsageError(f"{result} is damaged: {error}") from error
        if len(compared) > 1:
            ratios, source = compared, "comparison"
    interval = student_interval(ratios)
    if interval is None:
        return None
    # The interval for another run, not for the mean.
    middle, half = sum(interval) / 2, (interval[1] - interval[0]) / 2 * math.sqrt(len(ratios) + 1)
    return DurationRatioRange(max(middle - half, middle / 10), middle + half, len(ratios), source)


def with_error(
    found: SearchResult,
    search: Callable[[SimulatedDeployment], SearchResult],
    deployment: SimulatedDeployment,
    error: DurationRatioRange | None,
    *,
    worst: float | None = None,
) -> Estimate:
    """Return the result of a search with an interval: the results for shorter and for longer steps.

    If the target cannot be met there, `worst` is the end of the interval; without `worst` there is no interval. Raises
    as the search.
    """
    if error is None:
        return Estimate(found.value)
    ends: list[float | None] = [found.value]
    for slower in (error.low, error.high):
        try:
            ends.append(search(replace(deployment, slower=slower)).value)
        except InfeasibleError:
            ends.append(worst)
    known = [end for end in ends if end is not None]
    interval = (min(known), max(known)) if len(known) == len(ends) else (None, None)
    return Estimate(found.value, *interval, error.num)


def at_rate(requests: Sequence[Request], rate: float) -> list[Request]:
    """Return the requests with arrivals scaled in time, so that the mean gap is `1 / rate`.

    Raises:
        UsageError: there are fewer than two requests, or all arrive at one time, so that they have no rate.
    """
    span_s = requests[-1].arrival_s - requests[0].arrival_s if requests else 0.0
    if not span_s > 0:
        raise UsageError(f"{len(requests)} requests of the trace span no time, so they cannot be scaled to a rate")
    return retime(requests, speed=rate * span_s / (len(requests) - 1), from_zero=True)


def highest_rate(
    deployment: SimulatedDeployment, trace_at: Callable[[float], Sequence[Request]], target: float
) -> SearchResult:
    """Find the highest request rate at which the SLO attainment is at least `target`.

    The rate is doubled until it is too high and then bisected to 1 %. Attainment falls with the rate, but not strictly
    from one random trace to the next: the returned rate meets the target, and a rate at most 1 % above it does not.

    Args:
        deployment: deployment that serves the trace.
        trace_at: returns the trace at a rate in requests per second.
        target: share of the requests, above 0 and at most 1.

    Raises:
        UsageError: the target, the trace or a number is out of its range.
        InfeasibleError: the target is not met at any rate.
        RunError: the target is met at every rate.
    """
    search = _Search(lambda rate: deployment.attainment(trace_at(rate)), target)
    # The search starts at the rate of one GPU that serves one by one, times the number of GPUs.
    example = trace_at(1.0)[0]
    low = high = start = deployment.num_gpus / deployment.engine.standalone_s(example)
    if search.holds(start):
        high = 2 * start
        while search.holds(high):
            low, high = high, 2 * high
            if low >= start * 2**_MAX_DOUBLINGS:
                raise RunError(
                    f"the target of {target:.2%} is met at {low:.3g} requests a second and still is: give more "
                    "requests (--num-prompts), so that they last long enough to queue up"
                )
    else:
        low = start / 2
        while not search.holds(low):
            if low < start / 1024:
                raise search.infeasible(low, f"{low:.3g} requests a second on {deployment.num_gpus} GPUs")
            low, high = low / 2, low
    while high / low > 1 + _RATE_PRECISION:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if search.holds(middle) else (low, middle)
    return search.result(low)


def gpus_needed(deployment: SimulatedDeployment, requests: Sequence[Request], target: float) -> SearchResult:
    """Find the smallest number of GPUs with which a trace's SLO attainment is at least `target`, by bisection. The
    deployment's own `num_gpus` is ignored.

    Raises:
        UsageError: the target, the trace or a number is out of its range.
        InfeasibleError: not even one GPU for each request (or `MAX_GPUS`) meets the target.
    """
    search = _Search(lambda num_gpus: replace(deployment, num_gpus=int(num_gpus)).attainment(requests), target)
    choices = list(range(1, min(len(requests), MAX_GPUS) + 1))
    if deployment.system.spans_gpus:
        choices = sorted(deployment.speedups.points)
    # Doubling first, because simulations of very many GPUs are slow.
    low, high = -1, 0
    while not search.holds(choices[high]):
        if high == len(choices) - 1:
            raise search.infeasible(choices[high], f"{choices[high]} GPUs")
        low, high = high, min(2 * high + 1, len(choices) - 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if search.holds(choices[middle]) else (middle, high)
    return search.result(choices[high])


class _Search:
    """Attainments of the values that a search has tried, and whether they meet the target."""

    def __init__(self, attainment: Callable[[float], float], target: float) -> None:
        if not 0 < target <= 1:
            raise UsageError(f"SLO target is {target:g}, but it must be a share above 0 and at most 1, such as 0.99")
        self._attainment, self._target = attainment, target
        self._tried: dict[float, float] = {}

    def holds(self, value: float) -> bool:
        self._tried[value] = self._attainment(value)
        return self._tried[value] >= self._target

    def result(self, value: float) -> SearchResult:
        return SearchResult(value, self._tried[value], dict(sorted(self._tried.items())))

    def infeasible(self, value: float, where: str) -> InfeasibleError:
        return InfeasibleError(
            f"the target of {self._target:.2%} cannot be met: at {where} it is {self._tried[value]:.2%}; the SLO "
            "(--slo-scale) is too short or the policy cannot do it"
        )
