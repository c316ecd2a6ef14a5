"""What the simulator needs to know of a machine besides its latency table: measured in one served run.

The durations of the run's steps,

    duration = scale * (steady or first step of the table) + share lost * (seconds of stages beside it),

give `scale` and the share by non-negative least squares of relative errors; the gaps between steps and the times of the
stages are means. The run is one of its own, never one that is then simulated. This module imports no torch.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from scipy.optimize import nnls

from ...data.errors import RunError, UsageError
from ...data.resolution import Resolution, parse
from ...data.tables.latency import LatencyTable
from ...serving.core.request_state import RequestRecord
from ...serving.core.step_row import StepRow
from ...serving.scheduling.policies import StepLatencyPredictor
from ...serving.scheduling.step_latency import TableLatency
from ...serving.simulator.stage_times import StageTimes
from ...serving.simulator.step_durations import MAX_SLOWDOWN, StepDurations

_MIN_STEPS = 20
_EQUAL_S = 1e-9


@dataclass(frozen=True, slots=True)
class Calibration:
    """One engine on one machine.

    Attributes:
        prepare_s, postprocess_s: mean seconds of the stages by resolution, as in "128x128".
        scale, between_s, slowdown: of `StepDurations`.
        told_scale: time of all measured steps over what was profiled for steady ones: what a policy's predictor that
            learns on line (`OnlineCorrection`) comes to multiply by.
        num_steps: steps that it was fitted to.
        error: mean of |fitted / measured - 1| over them.
    """

    prepare_s: Mapping[str, float]
    postprocess_s: Mapping[str, float]
    scale: float = 1.0
    between_s: float = 0.0
    slowdown: float = 0.0
    told_scale: float = 1.0
    num_steps: int = 0
    error: float = 0.0

    @property
    def times(self) -> StageTimes:
        """Seconds of the stages beside the steps."""
        stages = self.prepare_s, self.postprocess_s
        return StageTimes(*({parse(name): time_s for name, time_s in each.items()} for each in stages))

    def durations(self, steady: StepLatencyPredictor, first: StepLatencyPredictor | None) -> StepDurations:
        """How long steps last where the table says `steady` and `first`."""
        return StepDurations(steady, first, self.scale, self.between_s, self.slowdown)

    @classmethod
    def from_json(cls, data: Any, source: str) -> Self:
        """Raises UsageError, which names `source`, if it is not what `asdict` gives."""
        names = {field.name for field in fields(cls)}
        if not isinstance(data, dict) or set(data) != names:
            raise UsageError(f"{source}: a calibration must have {', '.join(sorted(names))}")
        try:
            made = cls(**data)
            numbers = [made.scale, made.between_s, made.slowdown, made.told_scale, made.error]
            numbers += [*made.prepare_s.values(), *made.postprocess_s.values()]
            if not all(math.isfinite(number) for number in numbers) or made.told_scale <= 0:
                raise ValueError("a number is not finite")
            _ = made.times, made.durations(_Nothing(), None)
        except (ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"{source}: the calibration is damaged: {error}") from error
        return made


class _Nothing:
    def step_latency_s(self, active: Sequence[Resolution]) -> float:
        return 0.0


def step_sources(table: LatencyTable) -> tuple[TableLatency, TableLatency | None]:
    """Steady and first steps of a measured table; without first steps (a table of another program) None."""

    def source(times: Mapping[tuple[Resolution, ...], float | None]) -> TableLatency:
        return TableLatency({batch: ms / 1e3 for batch, ms in times.items() if ms is not None})

    batches = {tuple(size for size, count in row.counts.items() for _ in range(count)): row for row in table.rows}
    firsts = {batch: row.first_step_median_ms for batch, row in batches.items()}
    steady = source({batch: row.median_ms for batch, row in batches.items()})
    return steady, source(firsts) if all(ms is not None for ms in firsts.values()) else None


def calibrate(
    records: Sequence[RequestRecord],
    steps: Sequence[StepRow],
    steady: StepLatencyPredictor,
    first: StepLatencyPredictor | None,
) -> Calibration:
    """Work out what a served run with one denoise loop tells beyond the step latencies that were profiled.

    Raises:
        RunError: no request was completed, or there are fewer than 20 steps.
        UsageError: the latencies do not know a resolution.
    """
    times = StageTimes.measured(records)
    if len(steps) < _MIN_STEPS:
        raise RunError(
            f"the calibration run took {len(steps)} steps, but at least {_MIN_STEPS} are needed: give more requests"
        )
    batches = [tuple(parse(name) for name, count in row.resolutions.items() for _ in range(count)) for row in steps]
    start_s = np.array([row.start_s for row in steps])
    end_s = start_s + np.array([row.duration_s for row in steps])
    joined_s = _sorted(record.admitted_s for record in records)
    left_s = _sorted(record.denoise_end_s for record in records)
    steady_s = np.array([steady.step_latency_s(batch) for batch in batches])
    profiled_s = steady_s.copy()
    if first is not None:
        # Who joined at the start of the step before was in it.
        is_new = _num_within(joined_s, start_s[:-1] + 2 * _EQUAL_S, start_s[1:]) > 0
        is_new |= _num_within(left_s, end_s[:-1], start_s[1:]) > 0
        for index in (0, *(np.flatnonzero(is_new) + 1)):
            profiled_s[index] = first.step_latency_s(batches[index])
    beside_s = _beside(records, start_s, end_s)
    measured_s = end_s - start_s
    # Divided by what was measured: a millisecond matters more to a short step.
    _, lost = nnls(np.stack([profiled_s, beside_s], 1) / measured_s[:, None], np.ones(len(steps)))[0]
    lost = min(float(lost), MAX_SLOWDOWN / (1 + MAX_SLOWDOWN))
    # Whatever the share, the whole run is to last as long as it did.
    scale = float((measured_s - lost * beside_s).sum() / profiled_s.sum())
    if scale <= 0:
        lost, scale = 0.0, float(measured_s.sum() / profiled_s.sum())
    fitted_s = scale * profiled_s + lost * beside_s
    # Gaps count where the batch did not run empty.
    active = np.array([row.active for row in steps[:-1]])
    goes_on = _num_within(left_s, end_s[:-1], end_s[:-1]) < active
    gaps_s = np.maximum(0.0, start_s[1:] - end_s[:-1])[goes_on]
    return Calibration(
        {str(size): time_s for size, time_s in times.prepare_s.items()},
        {str(size): time_s for size, time_s in times.postprocess_s.items()},
        scale,
        float(gaps_s.mean()) if len(gaps_s) else 0.0,
        min(lost / (1 - lost), MAX_SLOWDOWN),  # the quotient may exceed it by a rounding error
        float(measured_s.sum() / steady_s.sum()),
        len(steps),
        float(np.abs(fitted_s / measured_s - 1).mean()),
    )


def _sorted(times_s: Iterable[float | None]) -> np.ndarray:
    return np.sort([time_s for time_s in times_s if time_s is not None])


def _num_within(times_s: np.ndarray, low_s: np.ndarray, high_s: np.ndarray) -> np.ndarray:
    """How many of the sorted times are within each pair of bounds, give or take a rounding error."""
    below = np.searchsorted(times_s, low_s - _EQUAL_S, side="left")
    return np.searchsorted(times_s, high_s + _EQUAL_S, side="right") - below


def _beside(records: Sequence[RequestRecord], start_s: np.ndarray, end_s: np.ndarray) -> np.ndarray:
    """Seconds that the stages worked beside each step (from `start_s` to `end_s`, (n,) each, rising), both added up."""
    starts: list[float] = []
    ends: list[float] = []
    free_s = 0.0
    for record in sorted(records, key=lambda record: record.finish_s or 0.0):
        if record.prepare_start_s is not None and record.prepare_end_s is not None:
            starts.append(record.prepare_start_s)
            ends.append(record.prepare_end_s)
        if record.status == "completed" and record.denoise_end_s is not None and record.finish_s is not None:
            # Decoding starts when the image before is done.
            starts.append(max(record.denoise_end_s, free_s))
            ends.append(record.finish_s)
            free_s = record.finish_s

    def worked_until(times_s: np.ndarray) -> np.ndarray:
        """Seconds of all stages up to a time: what has passed since the starts less what has since the ends."""
        worked_s = np.zeros(len(times_s))
        for sign, edges in ((1, np.sort(starts)), (-1, np.sort(ends))):
            num = np.searchsorted(edges, times_s)
            worked_s += sign * (times_s * num - np.concatenate([[0.0], np.cumsum(edges)])[num])
        return worked_s

    return worked_until(end_s) - worked_until(start_s)
