"""Step latencies of many combinations: the data of the latency predictor (PatchedServe sections 3 and 6.1.2).

A timing is of the serving engine's step, including guidance and sampler, while the batch stays the same. Every round
visits all combinations in another random order, so that other load on the machine, and its drift, affect all of them
alike. Every visit takes two steps before the first timing. After three rounds the remaining visits go to the
combinations whose visits disagree most, again in rounds and in random order. Measurements are saved in the workspace
every few seconds, and the same profile continues from there.
"""

import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...data.errors import UsageError
from ...data.files import write_bytes
from ...data.resolution import Resolution
from ...data.run_facts import RunFacts
from ...data.tables.latency import TABLE_PATTERN, LatencyRow, LatencyTable, read_latencies, write_latencies
from ...data.workspace import ModelWorkspace
from ...serving.models.served import ServedModel
from ...serving.runs.machine import run_facts
from ...training.latency.predictor import LatencyPredictor, load_workspace_predictor
from ..experiment.turns import shuffled
from ..report.latency_plots import plot_latencies
from ..steps.combinations import Combination, single_combinations, stratified_combinations
from ..steps.lanes import Lane
from ..steps.sides import RequestPool, StepperSide

TIMINGS_PER_VISIT = 2
"""Timings per visit. A timing is one step, or several if they are short (`steps.lanes.Lane`). Latency varies between
minutes rather than between steps: on a shared machine, steps of one visit agree within 2 %, visits within 10 to 20 %.
"""
_EVEN_ROUNDS = 3
_UNSURE_SHARE = 1 / 3
"""Share of the combinations that every later round visits, after those that visit all."""
_SAVE_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class LatencySettings:
    """Settings of a latency profile.

    Attributes:
        combinations: number of combinations; if fewer exist, all are profiled.
        max_batch_size: number of requests in the largest batch.
        repeats: average number of visits of a combination.
        seed: seed of the draw, of the order of visits and of the first request's noise.
        one_resolution: whether only batches of one resolution are profiled, as in passes of the plain engine.
    """

    resolutions: tuple[Resolution, ...]
    combinations: int = 300
    max_batch_size: int = 16
    repeats: int = 5
    seed: int = 0
    one_resolution: bool = False

    def drawn(self) -> tuple[Combination, ...]:
        """Return the combinations."""
        if self.one_resolution:
            return single_combinations(self.resolutions, self.combinations, self.max_batch_size)
        return stratified_combinations(self.resolutions, self.combinations, self.max_batch_size, self.seed)

    def to_json(self) -> dict[str, Any]:
        timings = len(self.drawn()) * self.repeats * TIMINGS_PER_VISIT
        settings = asdict(self) | {"resolutions": list(map(str, self.resolutions)), "timings": timings}
        if not self.one_resolution:
            # Tables that were begun before this setting existed can still be continued.
            del settings["one_resolution"]
        return settings


@dataclass(frozen=True, slots=True)
class LatencyOutcome:
    """Outcome of a profile: the table of what this and earlier runs have measured, the files, the number of this run's
    visits (0 if everything was measured before), and whether Ctrl-C ended the run.
    """

    table: LatencyTable
    table_file: Path
    plot_file: Path
    num_visits: int
    was_interrupted: bool


def workspace_predictor(
    model: ServedModel, workspace: ModelWorkspace, *, on_warning: Callable[[str], None]
) -> LatencyPredictor:
    """Return the latency predictor of a loaded model's workspace. Raises UsageError as `load_workspace_predictor`."""
    return load_workspace_predictor(workspace, expect=run_facts(model), on_warning=on_warning)


def profile_latency(
    model: ServedModel,
    settings: LatencySettings,
    workspace: ModelWorkspace,
    *,
    remeasure: bool = False,
    budget_s: float | None = None,
    folder: Path | None = None,
    on_start: Callable[[int, int], None] = lambda num_all, num_done: None,
    on_visit: Callable[[], None] = lambda: None,
) -> LatencyOutcome:
    """Measure the combinations, or those that an interrupted run of the same profile has not measured.

    Args:
        model: model with the serving engine; its strategies are measured first if the workspace has none.
        settings: combinations and repeats to measure.
        workspace: workspace of the model; `latency-<key of the profile>.parquet` and `.png` are written to its tables.
        remeasure: discard the measurements in the table.
        budget_s: seconds after which no further visit begins; None measures everything. With a budget, each combination
            is visited once, in the order of the draw (corners first), and the largest batch does not warm up the
            machine.
        folder: folder for the table and the plot in place of the workspace's tables.
        on_start: called with the total number of visits, and the number made by earlier runs.
        on_visit: called after each visit.

    Raises:
        UsageError: if the model or the engine's options do not fit a resolution, or the table is damaged or of another
            profile; nothing has run then.
        RunError: if a request fails.
        KeyboardInterrupt: on Ctrl-C before anything is measured; later, the outcome records the interruption.
        OSError: if results cannot be written.
    """
    pool = RequestPool(model, settings.seed)
    for resolution in settings.resolutions:
        pool.check(resolution)
    about, combinations = run_facts(model), settings.drawn()
    key = json.dumps([about.key(), settings.to_json()], sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()[:8]
    table_file = (folder or workspace.tables) / TABLE_PATTERN.replace("*", digest)
    samples = {} if remeasure else _resume(table_file, about, settings)
    num_all = len(combinations) * settings.repeats
    num_done = sum(len(first_ms) for _, first_ms in samples.values())
    on_start(num_all, num_done)
    was_interrupted, num_visits = False, 0

    def measured() -> LatencyTable:
        rows = (LatencyRow(each.present, *samples[each.counts]) for each in combinations if each.counts in samples)
        return LatencyTable(tuple(rows), about, settings.to_json())

    try:
        visits: Iterable[Combination] = ()
        if num_done < num_all:
            model.tune(settings.resolutions, workspace.tables)
            if budget_s is None:
                # The batch that needs most memory warms up the machine.
                _visit(model, pool, max(combinations, key=lambda each: each.num_pixels))
                visits = _visits(combinations, settings, samples)
            else:
                visits = [each for each in combinations if each.counts not in samples]
        start_s = saved_s = time.monotonic()
        for combination in visits:
            # Interpolation needs at least each resolution alone and one larger batch.
            has_least = num_visits > len(settings.resolutions)
            if budget_s is not None and has_least and time.monotonic() - start_s > budget_s:
                break
            steady_ms, first_ms = _visit(model, pool, combination)
            before = samples.get(combination.counts, ((), ()))
            samples[combination.counts] = (before[0] + steady_ms, before[1] + first_ms)
            num_visits += 1
            on_visit()
            if time.monotonic() - saved_s > _SAVE_EVERY_S:
                write_latencies(table_file, measured())
                saved_s = time.monotonic()
    except KeyboardInterrupt:
        if not samples:
            raise
        was_interrupted = True
    finally:
        if num_visits:
            write_latencies(table_file, measured())
    # Commands use the newest table of a workspace; this makes it the one requested last.
    table_file.touch()
    table = measured()
    plot_file = table_file.with_suffix(".png")
    write_bytes(plot_file, plot_latencies(table))
    return LatencyOutcome(table, table_file, plot_file, num_visits, was_interrupted)


_Samples = dict[tuple[int, ...], tuple[tuple[float, ...], tuple[float, ...]]]
"""Timings of steady and of first steps in milliseconds, by the counts of a combination."""


def _resume(path: Path, about: RunFacts, settings: LatencySettings) -> _Samples:
    """Return the measurements of the table; empty without one. Raises UsageError for the table of another profile."""
    if not path.exists():
        return {}
    table = read_latencies(path)
    if table.circumstances != about or table.settings != settings.to_json():
        raise UsageError(f"{path} is the table of another profile; delete it or use --remeasure")
    return {
        tuple(row.counts.get(resolution, 0) for resolution in settings.resolutions): (row.samples_ms, row.first_step_ms)
        for row in table.rows
    }


def _visits(
    combinations: tuple[Combination, ...], settings: LatencySettings, samples: _Samples
) -> Iterator[Combination]:
    """Yield the remaining visits, round after round. `samples` grows meanwhile; after the even rounds it determines
    which combinations are visited.
    """

    def num_visits(each: Combination) -> int:
        return len(samples[each.counts][1]) if each.counts in samples else 0

    def doubt(each: Combination) -> float:
        """Return the standard error of the logarithms of the visits' latencies."""
        visits_ms = LatencyRow(each.present, *samples[each.counts]).visits_ms
        return statistics.stdev(map(math.log, visits_ms)) / math.sqrt(len(visits_ms))

    for number in range(min(settings.repeats, _EVEN_ROUNDS)):
        yield from (each for each in shuffled(combinations, settings.seed, number) if num_visits(each) <= number)
    left = len(combinations) * settings.repeats - sum(map(num_visits, combinations))
    while left > 0:
        most = min(left, math.ceil(len(combinations) * _UNSURE_SHARE))
        yield from shuffled(sorted(combinations, key=doubt, reverse=True)[:most], settings.seed, left)
        left -= most


def _visit(model: ServedModel, pool: RequestPool, combination: Combination) -> tuple[tuple[float, ...], ...]:
    """Time steps of a combination. Returns steady and first steps in ms."""
    lane = Lane(StepperSide(model.stepper, pool.take(combination)), model.device)
    lane.warm_up()
    for _ in range(TIMINGS_PER_VISIT):
        lane.measure()
    return tuple(lane.samples_ms), tuple(lane.first_ms)
