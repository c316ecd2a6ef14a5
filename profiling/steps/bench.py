"""How long one denoising step takes: the patch engine against plain diffusers, interleaved in one run.

A time is the median over repeats; in every repeat each side takes its steps in turn, so that whatever else the machine
does meets all of them. A ratio is the median of the repeats' ratios. What is measured is the steady state, a batch
whose requests stay; `patched_repack_ms` is the patched step after a request has joined or left, which packs the batch
anew (PatchedServe section 4.1).
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from ...data.files import write_bytes
from ...data.workspace import ModelWorkspace
from ...serving.core.timing import synchronize
from ...serving.models.served import ServedModel
from ...serving.plain.formats import Format
from ..machine import run_facts
from .combinations import Combination, letters_of
from .matrix_peak import count_operations, matrix_peak
from .plots import plot_steps
from .rows import BenchOutcome, Row, measure_rows, median_interval, name_of
from .sides import EngineSide, OneByOne, RequestPool, Side, patched_stepper, plain_models, plain_side

RUN_KIND = "bench-steps"
SHORTEST_TIMING_S = 0.005
"""Steps that are shorter are repeated within one timing until it takes this long."""
_MOST_STEPS = 100


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """How much is measured: timings of every side, rounds before them (each of a step of a new batch and one of the
    same batch), and the seed of the first request's noise.
    """

    repeats: int = 15
    warmup: int = 3
    seed: int = 0


@dataclass(slots=True)
class Lane:
    """One side and what was measured of it: the steps that start anew (in the warm-up), and the repeats, each of so
    many steps that it is not too short for the clock.
    """

    side: Side
    device: torch.device
    first_ms: list[float] = field(default_factory=list)
    samples_ms: list[float] = field(default_factory=list)
    steps_per_timing: int = 1

    def warm_up(self) -> None:
        self.side.begin()
        self.first_ms.append(self._time(1))
        steady_ms = self._time(1)
        wanted = math.ceil(SHORTEST_TIMING_S * 1e3 / steady_ms)
        self.steps_per_timing = max(1, min(wanted, _MOST_STEPS, self.side.steps_left - 1))

    def measure(self) -> None:
        self.make_room()
        self.samples_ms.append(self._time(self.steps_per_timing))

    def make_room(self) -> None:
        """Start anew if the next timing would reach the end of the schedule; the first step then is not counted."""
        if self.side.steps_left <= self.steps_per_timing:
            self.side.begin()
            self.side.step()

    @property
    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)

    def _time(self, num_steps: int) -> float:
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(num_steps):
            self.side.step()
        synchronize(self.device)
        return (time.perf_counter() - start) / num_steps * 1e3


def ratios_of(base_ms: Sequence[float], patched_ms: Sequence[float]) -> list[float]:
    """How many times as long a side takes, in every repeat: what slows the machine down meets both sides of one alike,
    so that their ratios are as good as independent. Times are not.
    """
    return [own / ours for own, ours in zip(base_ms, patched_ms, strict=True)]


def operations_of(side: Side) -> int:
    """Operations of one step of a batch that stays the same."""
    side.begin()
    side.step()
    operations = count_operations(side.step)
    if operations:
        return operations
    # A recorded pass was played back. The first of a batch is not; it works out what the batch keeps besides.
    side.begin()
    return count_operations(side.step)


def time_lanes(lanes: Iterable[Lane], settings: BenchSettings) -> None:
    """Warm up all lanes, then measure them in turn."""
    lanes = list(lanes)
    for _ in range(settings.warmup):
        for lane in lanes:
            lane.warm_up()
    for _ in range(settings.repeats):
        for lane in lanes:
            lane.measure()


class StepBench:
    """Measures combinations on one model, which the patch engine serves."""

    def __init__(self, model: ServedModel, settings: BenchSettings) -> None:
        self.model, self.settings = model, settings
        self.pool = RequestPool(model, settings.seed)
        self.plain = plain_models(model)

    def lanes(self, combination: Combination) -> tuple[dict[Format, Lane], Lane]:
        """Return the same-resolution lane of every memory format, and the patched lane."""
        requests, device = self.pool.take(combination), self.model.device
        plain: dict[Format, Lane] = {
            name: Lane(plain_side(self.model, models, requests), device) for name, models in self.plain.items()
        }
        return plain, Lane(EngineSide(self.model.stepper, requests), device)

    def measure(self, combination: Combination) -> Row:
        """Measure one combination; returns its row."""
        plain, patched = self.lanes(combination)
        alone = Lane(OneByOne(self.model, self.plain["default"], self.pool.take(combination)), self.model.device)
        # Whether the patch engine hands this batch to the unmodified model.
        patched.side.begin()
        patched.side.step()
        batch = patched_stepper(self.model).batch
        assert batch is not None, "requests of a benchmark do not finish in their first step"
        is_plain = batch.is_plain
        time_lanes([alone, *plain.values(), patched], self.settings)
        best: Format = min(plain, key=lambda name: plain[name].median_ms)
        ratios = {
            "ratio_one_by_one": ratios_of(alone.samples_ms, patched.samples_ms),
            "ratio_same_resolution": ratios_of(plain[best].samples_ms, patched.samples_ms),
        }
        low, high = np.percentile(patched.samples_ms, [10, 90])
        peak = matrix_peak(self.model.device, self.model.dtype)
        shares = {
            name: operations_of(lane.side) / (lane.median_ms / 1e3) / peak
            for name, lane in (("same_resolution", plain[best]), ("patched", patched))
        }
        return {
            **name_of(combination),
            "one_by_one_ms": alone.median_ms,
            "same_resolution_ms": plain[best].median_ms,
            "same_resolution_format": best,
            "patched_ms": patched.median_ms,
            "patched_p10_ms": float(low),
            "patched_p90_ms": float(high),
            "patched_repack_ms": statistics.median(patched.first_ms),
            **{name: statistics.median(values) for name, values in ratios.items()},
            "patched_is_plain": is_plain,
            **{f"{name}_share_of_peak": share for name, share in shares.items()},
            "intervals": {name: median_interval(values) for name, values in ratios.items()},
            "repeats": self.settings.repeats,
        }


@dataclass(frozen=True, slots=True)
class BenchKind:
    """What is measured of every combination, what its rows say together, and a PNG of the result; `name` is that of
    the files, which get `.json` and `.png`.
    """

    name: str
    measure: Callable[[StepBench, Combination], Row]
    summarize: Callable[[Sequence[Row]], dict[str, Any]]
    plot: Callable[[dict[str, Any]], bytes]


def run_bench(
    kind: BenchKind,
    model: ServedModel,
    combinations: Sequence[Combination],
    workspace: ModelWorkspace,
    settings: BenchSettings,
    *,
    on_start: Callable[[Combination], None] | None = None,
    on_row: Callable[[], None] | None = None,
) -> BenchOutcome:
    """Measure every combination; the run's folder gets the rows, after each of them, and a plot.

    Args:
        kind: `STEPS`, or `breakdown.BREAKDOWN`.
        model: on the patch engine; its strategies are measured first where the workspace has none.
        combinations: at least one, all of the same resolutions.
        workspace: of the model.
        settings: how much is measured.
        on_start, on_row: called before each combination, and after it.

    Raises:
        UsageError: if the model or the engine's options do not fit a resolution; nothing has run then.
        RunError: if a request fails.
        KeyboardInterrupt: on Ctrl-C before the first row is finished; later the outcome says so.
        OSError: if results cannot be written.
    """
    bench = StepBench(model, settings)
    resolutions = combinations[0].resolutions
    for resolution in resolutions:
        bench.pool.check(resolution)
    model.tune(resolutions, workspace.tables)
    run_dir = workspace.new_run(RUN_KIND)
    patched = patched_stepper(model).model
    head = run_facts(model).to_json() | {
        "patch_size": patched.patch_size,
        "resolutions": list(map(str, resolutions)),
        "letters": {letter: str(resolution) for resolution, letter in letters_of(resolutions).items()},
        "matrix_peak_gflops": matrix_peak(model.device, model.dtype) / 1e9,
        "seed": settings.seed,
        "warmup": settings.warmup,
        "run_dir": str(run_dir),
    }
    result = measure_rows(
        combinations,
        partial(kind.measure, bench),
        run_dir / f"{kind.name}.json",
        lambda rows: head | kind.summarize(rows),
        on_start=on_start,
        on_row=on_row,
    )
    write_bytes(run_dir / f"{kind.name}.png", kind.plot(result))
    return BenchOutcome(result, run_dir)


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Return what the rows say together: geometric means over mixed combinations, and the smallest ratio of all."""
    mixed = [row for row in rows if row["is_mixed"]]
    single = [row["patched_is_plain"] for row in rows if not row["is_mixed"]]
    summary: dict[str, Any] = {}
    for side in ("one_by_one", "same_resolution"):
        key = f"ratio_{side}"
        summary[f"mean_{key}_mixed"] = statistics.geometric_mean(row[key] for row in mixed) if mixed else None
        summary[f"min_{key}"] = min(row[key] for row in rows)
    summary["is_plain_for_one_resolution"] = all(single) if single else None
    return summary


STEPS = BenchKind("steps", StepBench.measure, summarize, plot_steps)
