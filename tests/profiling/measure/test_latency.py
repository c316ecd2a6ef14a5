"""profiling/measure/latency.py: the visits of a profile, resuming, and its table."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from patchedserve.data.errors import UsageError
from patchedserve.data.resolution import parse_list
from patchedserve.data.tables.latency import read_latencies, write_latencies
from patchedserve.data.workspace import ModelWorkspace
from patchedserve.profiling.measure import latency
from patchedserve.profiling.measure.latency import LatencySettings, profile_latency
from patchedserve.profiling.steps.combinations import (
    Combination,
    single_combinations,
    stratified_combinations,
)
from patchedserve.profiling.steps.sides import RequestPool, StepperSide
from patchedserve.serving.models.build import build_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.runs.machine import run_facts

from ...support.bench_cases import latents_of, steps_by_diffusers
from ...support.tiny_models import largest_error, tiny_sd3, tiny_sdxl

SIZES = parse_list("32,48")
FEW = LatencySettings(SIZES, combinations=12, max_batch_size=4, repeats=2)


@pytest.fixture(scope="module")
def sdxl() -> ServedModel:
    return build_model(tiny_sdxl(), name="tiny")


def test_profile_of_one_resolution_has_uniform_batches() -> None:
    sizes = parse_list("32,48,64")
    settings = LatencySettings(sizes, 12, 16, one_resolution=True)
    assert settings.drawn() == single_combinations(sizes, 12, 16)
    assert settings.to_json()["one_resolution"] is True
    # Tables that were started before the option existed are found again.
    assert "one_resolution" not in LatencySettings(sizes, 9, 16).to_json()


def test_both_engines_take_the_same_steps(sdxl: ServedModel) -> None:
    plain_model = build_model(sdxl.pipe, name="tiny", options=EngineOptions(engine="plain"))
    combination = stratified_combinations(SIZES, 12, 4, seed=0)[-1]
    sides = []
    for model in (sdxl, plain_model):
        side = StepperSide(model.stepper, RequestPool(model).take(combination))
        for _ in range(2):  # the second round starts from the same state as the first
            side.begin()
            for _ in range(3):
                side.step()
        assert side.steps_left == 247
        sides.append(side)
    expected = [steps_by_diffusers(sdxl, prepared, 3) for prepared in RequestPool(sdxl).take(combination)]
    for side in sides:
        assert largest_error(latents_of(side), expected) < 1e-4


@pytest.mark.exhaustive
@pytest.mark.slow
def test_profile_measures_every_combination(sdxl: ServedModel, tmp_path: Path) -> None:
    workspace = ModelWorkspace(tmp_path)
    started: list[tuple[int, int]] = []
    visits: list[None] = []
    outcome = profile_latency(
        sdxl,
        FEW,
        workspace,
        on_start=lambda total, done: started.append((total, done)),
        on_visit=lambda: visits.append(None),
    )
    assert (started, len(visits), outcome.num_visits) == ([(24, 0)], 24, 24)
    assert not outcome.was_interrupted
    table = read_latencies(outcome.table_file)
    assert table == outcome.table
    assert table.share_done == 1
    assert table.circumstances == run_facts(sdxl)
    assert table.circumstances is not None
    assert (table.circumstances.engine, table.circumstances.order) == ("patched", "image")
    drawn = FEW.drawn()
    assert [row.counts for row in table.rows] == [
        {size: count for size, count in zip(SIZES, each.counts, strict=True) if count} for each in drawn
    ]
    for row in table.rows:
        assert (len(row.samples_ms), len(row.first_step_ms)) == (2 * latency.TIMINGS_PER_VISIT, 2)
    assert Image.open(outcome.plot_file).width > 800
    assert workspace.newest_table("latency-*.parquet") == outcome.table_file
    # Everything is measured: nothing is measured again unless requested.
    again = profile_latency(sdxl, FEW, workspace)
    assert (again.num_visits, again.table) == (0, table)
    anew = profile_latency(sdxl, FEW, workspace, remeasure=True)
    assert (anew.num_visits, anew.table_file) == (24, outcome.table_file)
    assert anew.table != table
    # Another profile has another table.
    other = profile_latency(sdxl, replace(FEW, repeats=1), workspace)
    assert other.table_file != outcome.table_file
    assert read_latencies(outcome.table_file) == anew.table


@pytest.mark.slow
def test_interrupted_profile_resumes(sdxl: ServedModel, tmp_path: Path) -> None:
    def interrupt_after(number: int) -> Any:
        left = iter(range(number - 1))

        def on_visit() -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt

        return on_visit

    workspace = ModelWorkspace(tmp_path)
    first = profile_latency(sdxl, FEW, workspace, on_visit=interrupt_after(5))
    assert (first.was_interrupted, first.num_visits, len(first.table.rows)) == (True, 5, 5)
    assert first.table.share_done == 5 / 24
    assert read_latencies(first.table_file) == first.table
    second = profile_latency(sdxl, FEW, workspace, on_visit=interrupt_after(10))
    assert (second.was_interrupted, second.num_visits, len(second.table.rows)) == (True, 10, 12)
    started: list[tuple[int, int]] = []
    third = profile_latency(sdxl, FEW, workspace, on_start=lambda total, done: started.append((total, done)))
    assert (started, third.was_interrupted, third.num_visits) == ([(24, 15)], False, 9)
    assert third.table.share_done == 1
    assert third.table_file == first.table_file
    # The first measurements are kept.
    whole = {row.label: row for row in third.table.rows}
    for row in first.table.rows:
        assert whole[row.label].samples_ms[: len(row.samples_ms)] == row.samples_ms
    assert all(len(row.samples_ms) == 2 * latency.TIMINGS_PER_VISIT for row in third.table.rows)
    # A repeated command after another profile uses its own table, and so does the next command.
    other = profile_latency(sdxl, replace(FEW, combinations=1, repeats=1), workspace)
    assert workspace.newest_table(latency.TABLE_PATTERN) == other.table_file != first.table_file
    assert profile_latency(sdxl, FEW, workspace).num_visits == 0
    assert workspace.newest_table(latency.TABLE_PATTERN) == first.table_file


def visited(settings: LatencySettings, visit_ms: Callable[[Combination], float], stop: int = 10_000) -> Any:
    """Return the visits of a profile in which each takes `visit_ms`, interrupted and resumed after every `stop`."""
    samples: Any = {}
    visits: list[Combination] = []
    while True:
        before = len(visits)
        for combination in itertools.islice(latency._visits(settings.drawn(), settings, samples), stop):
            steady_ms, first_ms = samples.get(combination.counts, ((), ()))
            timings = (visit_ms(combination),) * latency.TIMINGS_PER_VISIT
            samples[combination.counts] = (steady_ms + timings, (*first_ms, 1.0))
            visits.append(combination)
        if len(visits) == before:
            return visits


def test_rounds_visit_all_in_different_orders() -> None:
    visits = visited(FEW, lambda combination: 5.0)
    assert visits[:12] != visits[12:]
    assert set(visits[:12]) == set(visits[12:]) == set(FEW.drawn())
    assert visits == visited(FEW, lambda combination: 5.0)


@pytest.mark.parametrize("stop", [20, 45, 10_000])
def test_noisy_combinations_are_visited_more_often(stop: int) -> None:
    settings, generator = replace(FEW, repeats=6), random.Random(0)

    def visit_ms(combination: Combination) -> float:
        return 10.0 * math.exp(generator.gauss(0, 0.2 if combination.is_mixed else 0.01))

    visits = visited(settings, visit_ms, stop)
    assert len(visits) == 12 * 6
    counts = Counter(visits)
    assert min(counts.values()) == 3  # combinations that agree are not visited again
    assert all(counts[each] == 3 for each in counts if not each.is_mixed)
    # Visits go in rounds of four, so that a slow minute affects different combinations.
    assert all(len(set(visits[start : start + 4])) == 4 for start in range(36, 72, 4)) or stop % 4


def test_interrupt_before_the_first_visit_propagates(sdxl: ServedModel, tmp_path: Path) -> None:
    def interrupt(total: int, done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile_latency(sdxl, FEW, ModelWorkspace(tmp_path), on_start=interrupt)
    assert ModelWorkspace(tmp_path).newest_table("latency-*") is None


@pytest.mark.exhaustive
@pytest.mark.slow
def test_table_of_a_different_profile_is_not_resumed(sdxl: ServedModel, tmp_path: Path) -> None:
    settings = LatencySettings(SIZES, combinations=4, max_batch_size=2, repeats=1)
    # Besides the batches of one size there is one of both.
    outcome = profile_latency(sdxl, settings, ModelWorkspace(tmp_path))
    assert outcome.table.circumstances is not None
    changed = replace(outcome.table, circumstances=replace(outcome.table.circumstances, threads=77))
    write_latencies(outcome.table_file, changed)
    with pytest.raises(UsageError, match="is the table of another profile; delete it or use --remeasure"):
        profile_latency(sdxl, settings, ModelWorkspace(tmp_path))
    outcome.table_file.write_bytes(b"PAR1")
    with pytest.raises(UsageError, match="damaged"):
        profile_latency(sdxl, settings, ModelWorkspace(tmp_path))
    assert profile_latency(sdxl, settings, ModelWorkspace(tmp_path), remeasure=True).num_visits == 5


def test_plain_engine_is_profiled_and_unsupported_sizes_are_refused(tmp_path: Path) -> None:
    workspace = ModelWorkspace(tmp_path)
    model = build_model(tiny_sd3(), name="tiny", options=EngineOptions(engine="plain"))
    outcome = profile_latency(model, LatencySettings(SIZES, 4, 2, 1), workspace)
    assert outcome.table.circumstances is not None
    assert outcome.table.circumstances.engine == "plain"
    with pytest.raises(UsageError, match="24x24: width and height must be multiples of 16"):
        profile_latency(model, LatencySettings(parse_list("32,24"), 4, 2, 1), workspace)
