"""What the simulator needs to know of a machine besides its latency table: measured in one served run.

A table holds steps of a batch that stays the same, with nothing beside them. In a served run requests join and leave,
their texts are encoded and images decoded meanwhile, and the policy is asked. The durations of the run's steps,

    duration = scale * (steady or first step of the table) + share lost * (seconds of stages beside it),

give `scale` and the share by non-negative least squares of relative errors; the gaps between steps and the times of the
stages are means. The run is one of its own, never one that is then simulated. This module imports no torch.
"""

import math
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
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
        return StageTimes(*({parse(name): time_s for name, time_s in each.items()} for each in self._stages))

    @property
    def _stages(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        return self.prepare_s, self.postprocess_s

    def durations(self, steady: StepLatencyPredictor, first: StepLatencyPredictor | None) -> StepDurations:
        """How long steps last where the table says `steady` and `first`."""
        return StepDurations(steady, first, self.scale, self.between_s, self.slowdown)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any, source: str) -> Self:
        """Raises UsageError, which names `source`, if it is not what `to_json` gives."""
        names = {field.name for field in fields(cls)}
        if not isinstance(data, dict) or set(data) != names:
            raise UsageError(f"{source}: a calibration must have {', '.join(sorted(names))}")
        try:
            made = cls(**data)
            numbers = [made.scale, made.between_s, made.slowdown, made.told_scale, made.error]
            numbers += [time_s for each in made._stages for time_s in each.values()]
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
    """Work out what a served run tells.

    Args:
        records, steps: of the run, with one denoise loop.
        steady, first: step latencies as they were profiled.

    Raises:
        RunError: no request was completed, or there are fewer than 20 steps.
        UsageError: the latencies do not know a resolution.
    """
    times = StageTimes.measured(records)
    if len(steps) < _MIN_STEPS:
        raise RunError(
            f"the calibration run took {len(steps)} steps, but at least {_MIN_STEPS} are needed: give more requests"
        )
    batches = [_batch(row) for row in steps]
    changed = _changed(records, steps)
    steady_s = np.array([steady.step_latency_s(batch) for batch in batches])
    known = steady if first is None else first
    profiled_s = np.array(
        [
            known.step_latency_s(batch) if is_new else usual
            for batch, is_new, usual in zip(batches, changed, steady_s, strict=True)
        ]
    )
    beside_s = np.array(_beside(records, steps))
    measured_s = np.array([row.duration_s for row in steps])
    # Divided by what was measured: a millisecond matters more to a short step.
    _, lost = nnls(np.stack([profiled_s, beside_s], 1) / measured_s[:, None], np.ones(len(steps)))[0]
    lost = min(float(lost), MAX_SLOWDOWN / (1 + MAX_SLOWDOWN))
    # Whatever the share, the whole run is to last as long as it did.
    scale = float((measured_s - lost * beside_s).sum() / profiled_s.sum())
    if scale <= 0:
        lost, scale = 0.0, float(measured_s.sum() / profiled_s.sum())
    fitted_s = scale * profiled_s + lost * beside_s
    gaps = _gaps(records, steps)
    return Calibration(
        {str(size): time_s for size, time_s in times.prepare_s.items()},
        {str(size): time_s for size, time_s in times.postprocess_s.items()},
        scale,
        statistics.fmean(gaps) if gaps else 0.0,
        lost / (1 - lost),
        float(measured_s.sum() / steady_s.sum()),
        len(steps),
        float(np.abs(fitted_s / measured_s - 1).mean()),
    )


def _batch(row: StepRow) -> tuple[Resolution, ...]:
    return tuple(parse(name) for name, count in row.resolutions.items() for _ in range(count))


def _changed(records: Sequence[RequestRecord], steps: Sequence[StepRow]) -> list[bool]:
    """Whether the batch of each step is another than that of the step before."""
    joined = sorted(record.admitted_s for record in records if record.admitted_s is not None)
    left = sorted(record.denoise_end_s for record in records if record.denoise_end_s is not None)
    found = [True]
    for before, row in pairwise(steps):
        end_s = before.start_s + before.duration_s
        # Who joined at the start of the step before was in it.
        found.append(
            _any_within(joined, before.start_s + 2 * _EQUAL_S, row.start_s) or _any_within(left, end_s, row.start_s)
        )
    return found


def _any_within(times_s: Sequence[float], low_s: float, high_s: float) -> bool:
    """Whether one of the sorted times is there, give or take a rounding error."""
    place = bisect_left(times_s, low_s - _EQUAL_S)
    return place < len(times_s) and times_s[place] <= high_s + _EQUAL_S


def _beside(records: Sequence[RequestRecord], steps: Sequence[StepRow]) -> list[float]:
    """Seconds that the stages worked beside each step, both added up."""
    spans: list[tuple[float, float]] = []
    free_s = 0.0
    for record in sorted(records, key=lambda record: record.finish_s or 0.0):
        if record.prepare_start_s is not None and record.prepare_end_s is not None:
            spans.append((record.prepare_start_s, record.prepare_end_s))
        if record.status == "completed" and record.denoise_end_s is not None and record.finish_s is not None:
            # Decoding starts when the image before is done.
            spans.append((max(record.denoise_end_s, free_s), record.finish_s))
            free_s = record.finish_s
    spans.sort()
    starts = [start_s for start_s, _ in spans]
    longest_s = max((end_s - start_s for start_s, end_s in spans), default=0.0)
    found = []
    for row in steps:
        end_s = row.start_s + row.duration_s
        near = spans[bisect_left(starts, row.start_s - longest_s) : bisect_left(starts, end_s)]
        found.append(sum(max(0.0, min(end_s, high_s) - max(row.start_s, low_s)) for low_s, high_s in near))
    return found


def _gaps(records: Sequence[RequestRecord], steps: Sequence[StepRow]) -> list[float]:
    """Seconds between steps of a batch that did not run empty."""
    left = sorted(record.denoise_end_s for record in records if record.denoise_end_s is not None)
    gaps = []
    for before, row in pairwise(steps):
        end_s = before.start_s + before.duration_s
        num_left = bisect_left(left, end_s + _EQUAL_S) - bisect_left(left, end_s - _EQUAL_S)
        if num_left < before.active:
            gaps.append(max(0.0, row.start_s - end_s))
    return gaps
