"""Latency of one denoising step: the patch engine against plain diffusers, interleaved in one run.

Every side runs with every requested effort (eager, recorded, compiled, both). Plain diffusers runs one by one and in
batches of one resolution, in each of its memory formats. A time is the median over repeats. In every repeat the
contenders take their steps in turn, so that other load on the machine affects all of them alike. Each row has one
ratio, of the fastest plain contender to the fastest patched one: the median of the repeats' ratios. The steady state
is measured, a batch whose requests stay. `patched_repack_ms` is the patched step after a request has joined or left,
which repacks the batch (PatchedServe section 4.1).
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from ...data.resolution import Resolution
from ...data.statistics import Estimate, ratios_of
from ...data.workspace import ModelWorkspace
from ...serving.core.cuda_graphs import CudaRecorder
from ...serving.models.build import check_graphs
from ...serving.models.served import ServedModel
from ...serving.plain.formats import Format
from ...serving.runs.machine import run_facts
from ..experiment.experiment import Experiment, Result
from ..experiment.rows import Row, row_of
from ..report.table import Table
from ..report.tables import step_tables
from .combinations import Combination, letters_of
from .lanes import BenchSettings, Lane, operations_of, time_lanes
from .matrix_peak import matrix_peak
from .plots import plot_steps
from .sides import (
    EAGER,
    Effort,
    MakeRecorder,
    OneByOne,
    RequestPool,
    StepperSide,
    StepSide,
    patched_stepper,
    plain_models,
    plain_side,
    with_effort,
)

RUN_KIND = "bench-steps"
SideName = Literal["one_by_one", "same_resolution", "patched"]


@dataclass(frozen=True, slots=True)
class Contender:
    """One way of taking the steps of a combination.

    Attributes:
        side: how requests are batched, and which engine denoises them.
        effort: optimizations that are applied.
        format: memory format of the plain model; None for the patched model, and one by one, where tuning chooses it.
    """

    side: SideName
    effort: Effort = EAGER
    format: Format | None = None

    @property
    def name(self) -> str:
        """Name in tables and files."""
        return ", ".join(filter(None, (self.side.replace("_", " "), self.effort.name, self.format)))


class StepBench:
    """Measures combinations on one model, which the patch engine serves eagerly.

    Args:
        model: served model, whose weights all contenders share.
        settings: numbers of repeats and warm-up rounds, and the seed.
        efforts: efforts with which every side runs.
        make_recorder: returns the recorder of passes of a device.

    Raises:
        UsageError: an effort records passes, which the device does not support.
    """

    def __init__(
        self,
        model: ServedModel,
        settings: BenchSettings,
        *,
        efforts: Sequence[Effort] = (EAGER,),
        make_recorder: MakeRecorder = CudaRecorder,
    ) -> None:
        is_recorded = any(effort.is_recorded for effort in efforts)
        if is_recorded and make_recorder is CudaRecorder:
            check_graphs(model.device)
        recorder = make_recorder(model.device) if is_recorded else None
        self.model, self.settings, self.efforts = model, settings, tuple(efforts)
        self.pool = RequestPool(model, settings.seed)
        self.patched = {
            effort: model if effort == EAGER else with_effort(model, effort, recorder) for effort in self.efforts
        }
        self.plain = {effort: plain_models(model, effort, recorder) for effort in self.efforts}

    def tune(self, resolutions: Sequence[Resolution], folder: Path) -> None:
        """Tune every contender for these resolutions, as `ServedModel.tune` does."""
        for effort in self.efforts:
            self.patched[effort].tune(resolutions, folder)
            self.plain[effort][None].tune(self.model.tuning(resolutions, folder), self.model.family.conditions)

    def lanes(self, combination: Combination, sides: Sequence[SideName] = get_args(SideName)) -> dict[Contender, Lane]:
        """Return the lanes of these sides, with every effort and in every memory format."""
        requests, model, found = self.pool.take(combination), self.model, dict[Contender, StepSide]()
        for effort in self.efforts:
            plain = self.plain[effort]
            found[Contender("one_by_one", effort)] = OneByOne(model, plain[None], requests)
            for form, models in plain.items():
                if form is not None:
                    found[Contender("same_resolution", effort, form)] = plain_side(model, models, requests)
            found[Contender("patched", effort)] = StepperSide(self.patched[effort].stepper, requests)
        return {each: Lane(side, model.device) for each, side in found.items() if each.side in sides}

    def measure(self, combination: Combination) -> Row:
        """Measure one combination and return its row.

        A contender whose passes cannot be recorded has run eagerly instead; the row omits it.
        """
        timed = self.lanes(combination)
        time_lanes(timed.values(), self.settings)
        failures = {each: self._recording_failure(each) for each in timed}
        lanes = {each: lane for each, lane in timed.items() if failures[each] is None}
        best = {side: fastest(lanes, side) for side in get_args(SideName)}
        plain = min((best["one_by_one"], best["same_resolution"]), key=lambda each: lanes[each].median_ms)
        patched = best["patched"]
        ratio = Estimate.of_median(ratios_of(lanes[plain].samples_ms, lanes[patched].samples_ms))
        peak = matrix_peak(self.model.device, self.model.dtype)
        shares = {
            side: operations_of(lanes[best[side]].side) / (lanes[best[side]].median_ms / 1e3) / peak
            for side in ("same_resolution", "patched")
        }
        low, high = np.percentile(lanes[patched].samples_ms, [10, 90])
        return {
            **combination.columns,
            **{f"{side}_ms": lanes[each].median_ms for side, each in best.items()},
            **{f"{side}_effort": each.effort.name for side, each in best.items()},
            "same_resolution_format": best["same_resolution"].format,
            "patched_p10_ms": float(low),
            "patched_p90_ms": float(high),
            "patched_samples_ms": lanes[patched].samples_ms,
            "patched_repack_ms": statistics.median(lanes[patched].first_ms),
            "baseline": plain.side,
            **row_of({"ratio": ratio}),
            "patched_is_plain": self._is_plain(combination, patched.effort),
            **{f"{side}_share_of_peak": share for side, share in shares.items()},
            "times": [_times_of(each, lane) for each, lane in lanes.items()],
            "left_out": {each.name: failure for each, failure in failures.items() if failure is not None},
            "repeats": self.settings.repeats,
        }

    def _is_plain(self, combination: Combination, effort: Effort) -> bool:
        """Return whether the patch engine runs this batch through the unmodified model."""
        stepper = patched_stepper(self.patched[effort])
        side = StepperSide(stepper, self.pool.take(combination))
        side.begin()
        side.step()
        assert stepper.batch is not None, "requests of a benchmark do not finish in their first step"
        return stepper.batch.is_plain

    def _recording_failure(self, contender: Contender) -> str | None:
        """Return why a contender that should record its passes does not; None if it does or need not."""
        effort, form = contender.effort, contender.format
        patched, plain = patched_stepper(self.patched[effort]).model, self.plain[effort][form]
        captured = patched.captured if contender.side == "patched" else plain.captured
        return None if captured is None else captured.failure


def fastest(lanes: Mapping[Contender, Lane], side: SideName) -> Contender:
    """Return the contender of a side with the smallest median."""
    return min((each for each in lanes if each.side == side), key=lambda each: lanes[each].median_ms)


def _times_of(contender: Contender, lane: Lane) -> Row:
    low, high = np.percentile(lane.samples_ms, [10, 90])
    return {
        "side": contender.side,
        "effort": contender.effort.name,
        "format": contender.format,
        "ms": lane.median_ms,
        "p10_ms": float(low),
        "p90_ms": float(high),
        "first_ms": statistics.median(lane.first_ms),
    }


@dataclass(frozen=True, slots=True)
class BenchKind:
    """A kind of benchmark: the measurement of a combination, the summary of all rows, and the result's plot and tables.

    `name` is the stem of the `.json` and `.png` files.
    """

    name: str
    measure: Callable[[StepBench, Combination], Row]
    summarize: Callable[[Sequence[Row]], dict[str, Any]]
    plot: Callable[[Result], bytes]
    tables: Callable[[Result], list[Table]]


def step_experiment(
    kind: BenchKind,
    model: ServedModel,
    combinations: Sequence[Combination],
    workspace: ModelWorkspace,
    settings: BenchSettings,
    *,
    efforts: Sequence[Effort] = (EAGER,),
) -> Experiment[Combination]:
    """Return the experiment whose cells are combinations. Its measurements raise RunError if a request fails.

    Args:
        kind: `STEPS` or `breakdown.BREAKDOWN`.
        model: model on the eager patch engine; its strategies are measured now if the workspace has none.
        combinations: at least one, all of the same resolutions.
        workspace: workspace of the model.
        settings: numbers of repeats and warm-up rounds, and the seed.
        efforts: efforts with which every side runs.

    Raises:
        UsageError: if the model or the engine's options do not fit a resolution.
    """
    bench = StepBench(model, settings, efforts=efforts)
    resolutions = combinations[0].resolutions
    for resolution in resolutions:
        bench.pool.check(resolution)
    bench.tune(resolutions, workspace.tables)
    facts = run_facts(model).to_json() | {
        "patch_size": patched_stepper(model).model.patch_size,
        "resolutions": list(map(str, resolutions)),
        "letters": {letter: str(resolution) for resolution, letter in letters_of(resolutions).items()},
        "matrix_peak_gflops": matrix_peak(model.device, model.dtype) / 1e9,
        "efforts": [effort.name for effort in efforts],
        "seed": settings.seed,
        "warmup": settings.warmup,
    }
    return Experiment(
        RUN_KIND,
        kind.name,
        combinations,
        partial(kind.measure, bench),
        facts,
        kind.tables,
        {kind.name: kind.plot},
        kind.summarize,
        label=attrgetter("label"),
        products="Results and plot",
    )


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the summary of the rows: the geometric mean over mixed combinations, and the smallest ratio of all."""
    mixed = [row for row in rows if row["is_mixed"]]
    single = [row["patched_is_plain"] for row in rows if not row["is_mixed"]]
    return {
        "mean_ratio_mixed": statistics.geometric_mean(row["ratio"] for row in mixed) if mixed else None,
        "min_ratio": min(row["ratio"] for row in rows),
        "is_plain_for_one_resolution": all(single) if single else None,
    }


STEPS = BenchKind("steps", StepBench.measure, summarize, plot_steps, step_tables)
