"""Calibration of the simulator: what it needs to know of a machine besides its latency table, fitted to served runs.

While a stage works for T seconds beside another, it does only T / (1 + slowdown) of its work, so that

    duration = work + sum over the others of lost * (seconds beside them), lost = slowdown / (1 + slowdown)

where the work of a step is the profiled latency, scaled by the size of the batch, and the work of the other stages
depends on the resolution alone. Non-negative least squares of relative errors give the work and the lost shares of each
stage; the gaps between steps are means. The calibration runs are separate from the runs that are then simulated. This
module imports no torch.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from ....data.errors import RunError, UsageError
from ....data.resolution import Resolution, parse
from ....training.latency.online_correction import LONGEST
from ...core.request_state import RequestRecord
from ...core.step_row import StepRow
from ...scheduling.step_latency import TableLatency
from ...simulator.stage_times import StageTimes
from ...simulator.step_durations import (
    DECODE,
    MAX_SLOWDOWN,
    PREPARE,
    STAGES,
    STEP,
    UNDISTURBED,
    ProfiledSteps,
    Reuse,
    Slowdown,
    StepDurations,
)

_MIN_STEPS = 20
_EQUAL_S = 1e-9
_SIZES = (1, 4, 8, 12, 16, 24, 32)
"""Batch sizes at which steps have their own scale, if enough steps near that size were measured."""


class ServedRun(NamedTuple):
    """Records and steps of a served run with one denoise loop."""

    records: Sequence[RequestRecord]
    steps: Sequence[StepRow]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Calibration of one engine on one machine.

    Attributes:
        prepare_s, postprocess_s: seconds of the stages by resolution, as in "128x128", while no other stage works.
        scales, first_scale, between_s, slowdown, reuse, is_inline: as in `StepDurations`.
        told_scale: ratio of the time of all measured steps to the profiled time of steady ones; the factor that a
            policy's online predictor (`OnlineCorrection`) converges to.
        num_steps: number of steps in the fit.
        error: mean of |fitted - measured|, relative to the mean of measured.
        ratios: ratio of measured to fitted time of the steps of each run; shows how far off another run may be.
    """

    prepare_s: Mapping[str, float]
    postprocess_s: Mapping[str, float]
    scales: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})
    first_scale: float = 1.0
    between_s: float = 0.0
    slowdown: Slowdown = UNDISTURBED
    told_scale: float = 1.0
    num_steps: int = 0
    error: float = 0.0
    ratios: tuple[float, ...] = ()
    reuse: Reuse | None = None
    is_inline: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.told_scale < math.inf or not all(0 < ratio < math.inf for ratio in self.ratios):
            raise UsageError("a ratio of a calibration must be more than 0 and finite")
        _ = self.times, self.durations(ProfiledSteps(TableLatency({(Resolution(8, 8),): 1.0})))

    @property
    def times(self) -> StageTimes:
        """Times of the stages other than the steps."""
        stages = self.prepare_s, self.postprocess_s
        return StageTimes(*({parse(name): time_s for name, time_s in each.items()} for each in stages))

    def durations(self, steps: ProfiledSteps) -> StepDurations:
        """Return the durations of steps with this profile."""
        return StepDurations(
            steps, self.scales, self.first_scale, self.between_s, self.slowdown, self.reuse, self.is_inline
        )


def calibrate(
    runs: Sequence[ServedRun], steps: ProfiledSteps, *, warmup_steps: int = 0, is_inline: bool = False
) -> Calibration:
    """Fit what served runs show beyond the profiled step latencies.

    Args:
        runs: runs of one engine.
        steps: profile of the engine.
        warmup_steps: first steps of every request in which the cache reuses nothing.
        is_inline: whether the engine's other stages ran between its steps.

    Raises:
        RunError: no request was completed, or there are fewer than 20 steps.
        UsageError: the profile does not cover a resolution.
    """
    done = [record for run in runs for record in run.records if record.status == "completed"]
    if not done:
        raise RunError("no request was completed, so there is nothing to calibrate by")
    rows = [row for run in runs for row in run.steps]
    if len(rows) < _MIN_STEPS:
        raise RunError(
            f"the calibration runs took {len(rows)} steps, but at least {_MIN_STEPS} are needed: give more requests"
        )
    between_s = _between_s(runs, is_inline)
    works = [_works_of(run, between_s if is_inline else None) for run in runs]
    measured_s = np.array([row.duration_s for row in rows])
    # The requests that the model ran for; if there are none, a step lasts as long as the work of reuse.
    batches = [_batch(row.ran) for row in rows]
    changed = [each for run in runs for each in _changed(run)]
    steady_s = np.array([steps.policy_latency.step_latency_s(batch) if batch else 0.0 for batch in batches])
    extra_s = np.array([steps.extra_s(*each) if each[0] else 0.0 for each in zip(batches, changed, strict=True)])
    counts = np.array([len(batch) for batch in batches])
    is_reusing = np.array([row.computed is not None for row in rows], dtype=float)
    nothing_ran_s = measured_s[counts == 0]
    expected_s = steady_s + extra_s
    expected_s += is_reusing * (np.median(nothing_ran_s) if len(nothing_ran_s) else 0.0)
    sizes = [size for size in _SIZES if size <= max(1, counts.max())]
    while True:
        # Weight of each size for each step, with linear interpolation between sizes.
        hats = np.stack([np.interp(counts, sizes, row) for row in np.eye(len(sizes))], 1) * (counts > 0)[:, None]
        step = _fit(works, STEP, np.column_stack([hats * steady_s[:, None], extra_s, is_reusing]), expected_s)
        num_near = hats.sum(0) * (step.weights[: len(sizes)] > 0)
        if len(sizes) == 1 or num_near.min() >= _MIN_STEPS:
            break
        sizes.pop(int(num_near.argmin()))
    if step.weights[0] <= 0:  # too few steps to distinguish first ones from others
        step = _fit(works, STEP, np.column_stack([hats * steady_s[:, None], 0 * extra_s, is_reusing]), expected_s)
    shares = {STEP: step.lost}
    alone: dict[int, dict[str, float]] = {}
    for stage in (PREPARE, DECODE):
        names = [name for each in works for name in each.names[stage]]
        known = sorted(set(names))
        fit = _fit(works, stage, np.array([[name == each for each in known] for name in names], dtype=float))
        shares[stage], alone[stage] = fit.lost, dict(zip(known, fit.weights.tolist(), strict=True))
    *scales, first_scale, aside_s = step.weights.tolist()
    full_s = sum(steps.policy_latency.step_latency_s(_batch(row.resolutions)) for row in rows)
    ends = np.cumsum([len(run.steps) for run in runs])[:-1]
    parts = zip(np.split(measured_s, ends), np.split(step.fitted_s, ends), strict=True)
    return Calibration(
        alone[PREPARE],
        alone[DECODE],
        dict(zip(sizes, scales, strict=True)),
        first_scale,
        between_s,
        (shares[PREPARE], shares[STEP], shares[DECODE]),
        float(measured_s.sum() / full_s),
        len(rows),
        float(np.abs(step.fitted_s - measured_s).sum() / measured_s.sum()),
        tuple(float(measured.sum() / fitted.sum()) for measured, fitted in parts if len(measured)),
        _reuse(runs, warmup_steps, aside_s) if is_reusing.any() else None,
        is_inline,
    )


def _batch(counts: Mapping[str, int]) -> tuple[Resolution, ...]:
    """Return the resolutions of a batch from its counts by name."""
    return tuple(parse(name) for name, count in counts.items() for _ in range(count))


def _reuse(runs: Sequence[ServedRun], warmup_steps: int, aside_s: float) -> Reuse:
    """Return the cache's reuse: the average distance between computed steps, except those that are always computed."""
    rows = [row for run in runs for row in run.steps]
    took = sum(row.active for row in rows)
    ran = sum(sum(row.ran.values()) for row in rows)
    asked = [record.num_inference_steps for run in runs for record in run.records if record.admitted_s is not None]
    always = sum(min(num_steps, warmup_steps + 1) for num_steps in asked)
    return Reuse(warmup_steps, max(1.0, (took - always) / max(1, ran - always)), aside_s)


class _StageIntervals(NamedTuple):
    """Work of the stages in a run, by stage: starts and ends in seconds, and the names of the resolutions."""

    starts: list[list[float]]
    ends: list[list[float]]
    names: list[list[str]]

    def beside(self, stage: int) -> np.ndarray:
        """Return (n, 3): seconds for which each work of a stage overlapped with one other stage, the other, or both."""
        starts, ends = ([np.array(each) for each in edges] for edges in (self.starts, self.ends))
        edges = np.unique(np.concatenate([*starts, *ends]))
        middles = (edges[1:] + edges[:-1]) / 2
        # A stage does one thing at a time: it works where one more work has started than ended.
        works = [
            np.searchsorted(np.sort(starts[each]), middles) > np.searchsorted(np.sort(ends[each]), middles)
            for each in range(len(STAGES))
        ]
        one, other = (works[each] for each in range(len(STAGES)) if each != stage)
        passed = np.stack([one & ~other, other & ~one, one & other], 1) * np.diff(edges)[:, None]
        until = np.concatenate([np.zeros((1, 3)), np.cumsum(passed, 0)])
        return until[np.searchsorted(edges, ends[stage])] - until[np.searchsorted(edges, starts[stage])]


class _Fit(NamedTuple):
    """Weights of the columns, the stage's row of slowdowns, and the duration of each work that both predict."""

    weights: np.ndarray
    lost: tuple[float, float, float]
    fitted_s: np.ndarray


def _fit(
    works: Sequence[_StageIntervals], stage: int, columns: np.ndarray, expected_s: np.ndarray | None = None
) -> _Fit:
    """Fit durations of a stage to `columns` (n, k), its unweighted work, and to the overlap with other stages.

    Errors are relative to `expected_s`, because a millisecond matters more to a short step. If `expected_s` is given,
    they are never relative to the measured durations: with a cache some steps take almost no time, and would dominate.
    """
    durations_s = np.concatenate([np.subtract(each.ends[stage], each.starts[stage]) for each in works])
    durations_s = np.maximum(durations_s, _EQUAL_S)
    beside_s = np.concatenate([each.beside(stage) for each in works])
    everything = np.hstack([columns, beside_s])
    if expected_s is None:
        found = nnls(everything / durations_s[:, None], np.ones(len(durations_s)))[0]
        typical_s = np.maximum(everything @ found, _EQUAL_S)
    else:
        typical_s = expected_s
    # A step during which the process was stopped is clipped, as it is where policies learn.
    counted_s = np.minimum(durations_s, LONGEST * typical_s)
    found = nnls(everything / typical_s[:, None], counted_s / typical_s)[0]
    weights, shares = found[: columns.shape[1]], np.minimum(found[-3:], MAX_SLOWDOWN / (1 + MAX_SLOWDOWN))
    lost_s = beside_s @ shares
    if lost_s.sum() >= durations_s.sum() or not (columns @ weights).sum():
        # The stage never worked without others beside it, so the time lost to them cannot be identified.
        shares, lost_s = np.zeros(3), np.zeros(len(durations_s))
        weights = nnls(columns / typical_s[:, None], counted_s / typical_s)[0]
    # Scaled, so that the fitted durations add up to the measured ones whatever the shares.
    weights = weights * max((counted_s - lost_s).sum() / (columns @ weights).sum(), _EQUAL_S)
    slowdowns = (shares[:2] / (1 - shares[:2])).clip(max=MAX_SLOWDOWN).tolist()
    slowdowns.insert(stage, 0.0)
    return _Fit(weights, tuple(slowdowns), columns @ weights + lost_s)


def _works_of(run: ServedRun, between_s: float | None) -> _StageIntervals:
    """Return when the stages worked, step after step and request after request.

    Decoding starts when the request is denoised and the previous image is done. Where the stages work between steps, it
    starts `between_s` after a request's last step, and after the requests that are prepared before the same step.
    """
    records = [record for record in run.records if record.prepare_end_s is not None]
    records.sort(key=lambda record: record.prepare_end_s or 0.0)
    done = [record for record in run.records if record.status == "completed"]
    done.sort(key=lambda record: record.finish_s or 0.0)
    prepare = [(record.prepare_start_s or 0.0, record.prepare_end_s or 0.0) for record in records]
    decode, free_s, ready_s = list[tuple[float, float]](), 0.0, [0.0, *(end_s for _, end_s in prepare)]
    for record in done:
        end_s, start_s = record.finish_s or 0.0, max(record.denoise_end_s or 0.0, free_s)
        if between_s is not None:
            before_s = ready_s[bisect_right(ready_s, end_s) - 1]
            start_s = min(max((record.denoise_end_s or 0.0) + between_s, free_s, before_s), end_s)
        decode.append((start_s, end_s))
        free_s = end_s
    step = [(row.start_s, row.start_s + row.duration_s) for row in run.steps]
    names = [[str(record.resolution) for record in each] for each in (records, done)]
    spans = prepare, step, decode
    starts, ends = ([[span[end] for span in each] for each in spans] for end in (0, 1))
    return _StageIntervals(starts, ends, [names[0], [], names[1]])


def _changed(run: ServedRun) -> list[set[Resolution]]:
    """Return, for each step, the resolutions of which a request has joined or left since the previous step."""
    changed: list[set[Resolution]] = [set() for _ in run.steps]
    starts_s = np.array([row.start_s for row in run.steps])
    for record in run.records:
        for time_s in (record.admitted_s, record.denoise_end_s):
            # A request that joined at the start of a step was in it, and so was one that left at its end.
            if time_s is not None and (place := int(np.searchsorted(starts_s, time_s - _EQUAL_S))) < len(changed):
                changed[place].add(record.resolution)
    return changed


def _between_s(runs: Sequence[ServedRun], is_inline: bool) -> float:
    """Return the mean seconds between steps, over gaps in which the batch was not empty and no inline stage worked."""
    gaps_s = []
    for run in runs:
        left_s = sorted(record.denoise_end_s for record in run.records if record.denoise_end_s is not None)
        ends = [time_s for record in run.records for time_s in (record.prepare_end_s, record.finish_s)]
        worked_s = sorted(time_s for time_s in ends if is_inline and time_s is not None)
        for row, following in pairwise(run.steps):
            end_s = row.start_s + row.duration_s
            num_left = bisect_right(left_s, end_s + _EQUAL_S) - bisect_left(left_s, end_s - _EQUAL_S)
            others = bisect_right(worked_s, following.start_s + _EQUAL_S) - bisect_right(worked_s, end_s)
            if num_left < row.active and not others:
                gaps_s.append(max(0.0, following.start_s - end_s))
    return fmean(gaps_s) if gaps_s else 0.0
