"""`psctl profile latency` and `psctl train-predictor latency` on tiny models: tables, resuming, fits, bad input."""

import itertools
import json
import math
import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from patchedserve.data.errors import UsageError
from patchedserve.data.resolution import Resolution, parse_list
from patchedserve.data.tables.latency import LatencyRow, LatencyTable, read_latencies, write_latencies
from patchedserve.data.workspace import ModelWorkspace, Workspace
from patchedserve.profiling.machine import run_facts
from patchedserve.profiling.measure import latency
from patchedserve.profiling.measure.latency import LatencySettings, profile_latency
from patchedserve.profiling.steps.combinations import (
    Combination,
    count_combinations,
    single_combinations,
    stratified_combinations,
)
from patchedserve.profiling.steps.sides import EngineSide, RequestPool
from patchedserve.serving.models.build import build_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions
from patchedserve.training.latency.predictor import LatencyPredictor, load_workspace_predictor

from ..conftest import RunPsctl
from ..support.bench_cases import latents_of, steps_by_diffusers
from ..support.latency_tables import CIRCUMSTANCES, law_rows
from ..support.psctl_process import start_psctl
from ..support.tiny_models import largest_error, save_tiny, tiny_sd3, tiny_sdxl
from ..support.waits import interrupted_when

SIZES = parse_list("32,48")
FEW = LatencySettings(SIZES, combinations=12, max_batch_size=4, repeats=2)


@pytest.fixture(scope="module")
def sdxl() -> ServedModel:
    return build_model(tiny_sdxl(), name="tiny")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("latency")
    save_tiny(folder / "sdxl", tiny_sdxl(), guidance_scale=3.0, resolutions=["32", "48"])
    return {
        "PSCTL_MODEL": str(folder / "sdxl"),
        "PSCTL_WORKSPACE": str(folder / "workspace"),
        "PSCTL_DTYPE": "float32",
        "PSCTL_DEVICE": "cpu",
    }


def part_of(environment: dict[str, str]) -> ModelWorkspace:
    return Workspace(environment["PSCTL_WORKSPACE"]).for_model(environment["PSCTL_MODEL"], "cpu")


def test_combinations_are_stratified() -> None:
    sizes = parse_list("128,192,256")
    drawn = stratified_combinations(sizes, 300, 16, seed=0)
    assert drawn == stratified_combinations(sizes, 300, 16, seed=0)
    assert drawn != stratified_combinations(sizes, 300, 16, seed=1)
    assert len(set(drawn)) == 300
    assert {each.counts for each in drawn[:6]} == {
        *((1, 0, 0), (0, 1, 0), (0, 0, 1)),
        *((16, 0, 0), (0, 16, 0), (0, 0, 16)),
    }
    by_size = Counter(each.num_requests for each in drawn)
    # All that there are of the smallest, and as many as of any other of the larger ones.
    assert [by_size[size] for size in (1, 2, 3, 4)] == [3, 6, 10, 15]
    assert set(by_size) == set(range(1, 17))
    assert all(20 <= by_size[size] <= 26 for size in range(6, 17))
    # Every batch of a single resolution is among them; an even draw would hold about 15 of the 48.
    assert sum(not each.is_mixed for each in drawn) == 48


@pytest.mark.parametrize(("num_sizes", "largest"), [(1, 16), (2, 5), (3, 4), (5, 1)])
def test_stratified_combinations_end_with_all_that_there_are(num_sizes: int, largest: int) -> None:
    sizes = tuple(Resolution(8 * side, 8) for side in range(1, num_sizes + 1))
    drawn = stratified_combinations(sizes, 10_000, largest, seed=0)
    assert len(drawn) == len(set(drawn)) == count_combinations(num_sizes, largest)
    assert {each.num_requests for each in drawn} == set(range(1, largest + 1))


@pytest.mark.parametrize(
    ("count", "largest", "numbers"),
    [
        (2, 16, [1, 16]),
        (12, 16, [1, 3, 6, 16]),
        (24, 16, [1, 2, 3, 4, 5, 7, 11, 16]),
        (99, 16, list(range(1, 17))),
        (9, 1, [1]),
        (6, 2, [1, 2]),
    ],
)
def test_combinations_of_one_resolution(count: int, largest: int, numbers: list[int]) -> None:
    sizes = parse_list("32,48,64")
    drawn = single_combinations(sizes, count, largest)
    assert [max(combination.counts) for combination in drawn] == [number for number in numbers for _ in sizes]
    assert not any(combination.is_mixed for combination in drawn)
    assert len(set(drawn)) == len(drawn)
    settings = LatencySettings(sizes, count, largest, one_resolution=True)
    assert settings.drawn() == drawn
    assert settings.to_json()["one_resolution"] is True
    # Tables that were begun without the choice are found again.
    assert "one_resolution" not in LatencySettings(sizes, 9, largest).to_json()


def test_both_engines_take_the_same_steps(sdxl: ServedModel) -> None:
    plain_model = build_model(sdxl.pipe, name="tiny", options=EngineOptions(engine="plain"))
    combination = stratified_combinations(SIZES, 12, 4, seed=0)[-1]
    sides = []
    for model in (sdxl, plain_model):
        side = EngineSide(model.stepper, RequestPool(model).take(combination))
        for _ in range(2):  # the second time, all start from where they did the first time
            side.begin()
            for _ in range(3):
                side.step()
        assert side.steps_left == 247
        sides.append(side)
    expected = [steps_by_diffusers(sdxl, prepared, 3) for prepared in RequestPool(sdxl).take(combination)]
    for side in sides:
        assert largest_error(latents_of(side), expected) < 1e-4


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
    # All is measured: nothing is done again, unless it is asked for.
    again = profile_latency(sdxl, FEW, workspace)
    assert (again.num_visits, again.table) == (0, table)
    anew = profile_latency(sdxl, FEW, workspace, remeasure=True)
    assert (anew.num_visits, anew.table_file) == (24, outcome.table_file)
    assert anew.table != table
    # Another profile is another table.
    other = profile_latency(sdxl, replace(FEW, repeats=1), workspace)
    assert other.table_file != outcome.table_file
    assert read_latencies(outcome.table_file) == anew.table


@pytest.mark.slow
def test_interrupted_profile_goes_on(sdxl: ServedModel, tmp_path: Path) -> None:
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
    # What was measured first is still there.
    whole = {row.label: row for row in third.table.rows}
    for row in first.table.rows:
        assert whole[row.label].samples_ms[: len(row.samples_ms)] == row.samples_ms
    assert all(len(row.samples_ms) == 2 * latency.TIMINGS_PER_VISIT for row in third.table.rows)


def visited(settings: LatencySettings, visit_ms: Callable[[Combination], float], stop: int = 10_000) -> Any:
    """The visits that a profile makes if each takes so long; it is interrupted after every `stop`, and goes on."""
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


def test_rounds_visit_all_in_another_order() -> None:
    visits = visited(FEW, lambda combination: 5.0)
    assert visits[:12] != visits[12:]
    assert set(visits[:12]) == set(visits[12:]) == set(FEW.drawn())
    assert visits == visited(FEW, lambda combination: 5.0)


@pytest.mark.parametrize("stop", [20, 45, 10_000])
def test_more_visits_go_to_those_that_disagree(stop: int) -> None:
    settings, generator = replace(FEW, repeats=6), random.Random(0)

    def visit_ms(combination: Combination) -> float:
        return 10.0 * math.exp(generator.gauss(0, 0.2 if combination.is_mixed else 0.01))

    visits = visited(settings, visit_ms, stop)
    assert len(visits) == 12 * 6
    counts = Counter(visits)
    assert min(counts.values()) == 3  # what agrees is not visited again
    assert all(counts[each] == 3 for each in counts if not each.is_mixed)
    # In rounds of four, so that a slow minute meets different ones.
    assert all(len(set(visits[start : start + 4])) == 4 for start in range(36, 72, 4)) or stop % 4


def test_interrupt_before_the_first_visit_is_passed_on(sdxl: ServedModel, tmp_path: Path) -> None:
    def interrupt(total: int, done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile_latency(sdxl, FEW, ModelWorkspace(tmp_path), on_start=interrupt)
    assert ModelWorkspace(tmp_path).newest_table("latency-*") is None


@pytest.mark.slow
def test_table_of_another_profile_is_not_gone_on_with(sdxl: ServedModel, tmp_path: Path) -> None:
    settings = LatencySettings(SIZES, combinations=4, max_batch_size=2, repeats=1)
    outcome = profile_latency(sdxl, settings, ModelWorkspace(tmp_path))
    assert outcome.table.circumstances is not None
    changed = replace(outcome.table, circumstances=replace(outcome.table.circumstances, threads=77))
    write_latencies(outcome.table_file, changed)
    with pytest.raises(UsageError, match="is the table of another profile; delete it or use --remeasure"):
        profile_latency(sdxl, settings, ModelWorkspace(tmp_path))
    outcome.table_file.write_bytes(b"PAR1")
    with pytest.raises(UsageError, match="damaged"):
        profile_latency(sdxl, settings, ModelWorkspace(tmp_path))
    assert profile_latency(sdxl, settings, ModelWorkspace(tmp_path), remeasure=True).num_visits == 4


def test_plain_engine_and_what_does_not_fit(tmp_path: Path) -> None:
    workspace = ModelWorkspace(tmp_path)
    model = build_model(tiny_sd3(), name="tiny", options=EngineOptions(engine="plain"))
    outcome = profile_latency(model, LatencySettings(SIZES, 4, 2, 1), workspace)
    assert outcome.table.circumstances is not None
    assert outcome.table.circumstances.engine == "plain"
    with pytest.raises(UsageError, match="24x24: width and height must be multiples of 16"):
        profile_latency(model, LatencySettings(parse_list("32,24"), 4, 2, 1), workspace)


@pytest.mark.slow
def test_from_profile_to_predictor(run_psctl: RunPsctl, environment: dict[str, str], tmp_path: Path) -> None:
    missing = run_psctl("train-predictor", "latency", **environment)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "no table of step latencies for" in missing.stderr
    assert f"measure one: psctl profile latency --model {environment['PSCTL_MODEL']}" in missing.stderr
    assert not Path(environment["PSCTL_WORKSPACE"]).exists()

    options = ("--combinations", "20", "--max-batch-size", "5", "--repeats", "2")
    done = run_psctl("profile", "latency", *options, "--json", "--quiet", **environment)
    assert (done.returncode, done.stderr) == (0, "")
    profiled = json.loads(done.stdout)
    # There are 20 combinations of two resolutions and up to five requests.
    assert len(profiled["rows"]) == 20
    assert {row["combination"] for row in profiled["rows"]} >= {"32x32", "48x48", "5*48x48", "2*32x32 + 3*48x48"}
    assert (profiled["is_complete"], profiled["was_interrupted"], profiled["dtype"]) == (True, False, "float32")
    assert (profiled["guidance_scale"], profiled["is_guided"]) == (3.0, True)
    for row in profiled["rows"]:
        assert 0 < row["min_ms"] <= row["median_ms"] <= row["p95_ms"]
    again = run_psctl("profile", "latency", *options, **environment)
    assert again.returncode == 0
    assert "Everything was measured before" in again.stderr
    assert "slowest / fastest" in again.stdout

    done = run_psctl("train-predictor", "latency", "--json", "--quiet", **environment)
    assert (done.returncode, done.stderr) == (0, "")
    trained = json.loads(done.stdout)
    assert trained["table"] == profiled["table"]
    assert (trained["fit"]["num_train"], len(trained["fit"]["held_out"])) == (16, 4)
    assert set(trained["fit"]["errors"]) == {"svr", "linear", "pixels"}
    assert (trained["kind"], trained["fit"]["noise_floor"]) == (trained["fit"]["kept"], profiled["noise_floor"])
    assert trained["prediction_us"] > 0
    part = part_of(environment)
    assert Path(trained["predictor"]) == part.root / "predictors" / "latency.safetensors"
    assert Image.open(trained["plot"]).width > 800
    table = read_latencies(profiled["table"])
    assert table.circumstances is not None
    predictor = load_workspace_predictor(part, expect=table.circumstances)
    assert predictor.step_latency_s([SIZES[0], SIZES[1]]) > 0
    with pytest.raises(UsageError, match="is for dtype float32, but bfloat16 is served"):
        load_workspace_predictor(part, expect=replace(table.circumstances, dtype="bfloat16"))


@pytest.mark.slow
def test_table_of_another_program(run_psctl: RunPsctl, tmp_path: Path) -> None:
    lines = [f"{row.label},{row.median_ms}" for row in law_rows(30)]
    (tmp_path / "h100.csv").write_text("\n".join(["combination,ms", *lines]))
    refused = run_psctl("train-predictor", "latency", "--table", "h100.csv", "--device", "cpu")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "h100.csv does not say which model and device it is of; give --output-file" in refused.stderr
    # Its device need not be here.
    options = ("--table", "h100.csv", "--output-file", "new/h100.safetensors", "--device", "cuda:7")
    done = run_psctl("train-predictor", "latency", *options)
    assert done.returncode == 0, done.stderr
    for word in (
        "imported table",
        "noise floor",
        "(kept)",
        "MAPE",
        "R2",
        "MSE",
        "SVR",
        "linear baseline",
        "look-up by pixels",
        "held out",
    ):
        assert word in done.stdout
    assert LatencyPredictor.load(tmp_path / "new" / "h100.safetensors").step_latency_s([Resolution(128, 128)]) > 0
    assert (tmp_path / "new" / "h100.png").exists()
    assert not (tmp_path / "psctl-workspace").exists()


def test_table_of_another_model_or_one_that_is_not_finished(run_psctl: RunPsctl, tmp_path: Path) -> None:
    table = LatencyTable(tuple(law_rows(20)), CIRCUMSTANCES, {"timings": 600})
    write_latencies(tmp_path / "t.parquet", table)
    done = run_psctl("train-predictor", "latency", "--table", "t.parquet", "--model", "emoji-3", "--device", "cpu")
    assert done.returncode == 2
    assert "t.parquet is of emoji-xl on cpu, not of emoji-3 on cpu; give --model emoji-xl --device cpu" in done.stderr
    done = run_psctl("train-predictor", "latency", "--table", "t.parquet", "--device", "cpu", "--quiet")
    assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr
    assert done.stderr.startswith("Warning: t.parquet is 10% measured; ")
    assert (tmp_path / "psctl-workspace" / "emoji-xl" / "cpu" / "predictors" / "latency.safetensors").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("combination,ms\n128,nan\n", "t.csv, row 1: a time is nan ms"),
        ("combination,ms\n128,5\n", "the table holds one combination, but a latency predictor needs at least 10"),
        ("combination,ms\n128,5\n192,6\n", "the table holds 2 combinations"),
        ("size,ms\n128,5\n", "t.csv: has the columns size, ms"),
    ],
)
def test_bad_tables_are_one_line(run_psctl: RunPsctl, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(content)
    done = run_psctl("train-predictor", "latency", "--table", "t.csv", "--output-file", "p.safetensors", "--quiet")
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "p.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--combinations", "3"], "3 combinations were asked for, but one request and the largest batch of each of 2"),
        (["--max-batch-size", "0"], "--max-batch-size"),
        (["--max-batch-size", "257"], "--max-batch-size"),
        (["--repeats", "0"], "--repeats"),
        (["--resolutions", "32,huge"], "'huge'"),
        (
            ["--engine", "plain", "--order", "patch"],
            "--order: only for --engine patched",
        ),
        (["--model", "emoji-xxl"], "emoji-xl, emoji-3"),
    ],
)
def test_bad_usage_is_one_line(
    run_psctl: RunPsctl, environment: dict[str, str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    options = ("--workspace", tmp_path / "own", "--quiet", "--json")
    done = run_psctl("profile", "latency", *arguments, *options, **environment)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list((tmp_path / "own").glob("**/*.parquet"))


@pytest.mark.slow
def test_ctrl_c_and_the_same_command_again(run_psctl: RunPsctl, environment: dict[str, str], tmp_path: Path) -> None:
    options = ["--combinations", "14", "--max-batch-size", "4", "--workspace", str(tmp_path / "own")]
    command = ["profile", "latency", *options, "--repeats", "500"]
    process = start_psctl(*command, cwd=tmp_path, env=environment)
    stdout, stderr = interrupted_when(process, lambda: any(tmp_path.glob("own/*/cpu/tables/latency-*.parquet")))
    assert process.returncode == 130, stderr
    assert stderr.endswith("The same command continues from here.\nError: interrupted\n")
    assert "slowest / fastest" in stdout
    (path,) = tmp_path.glob("own/*/cpu/tables/latency-*.parquet")
    table = read_latencies(path)
    assert 0 < table.share_done < 1
    assert Image.open(path.with_suffix(".png")).width > 800
    # One more round would take too long here; the number of visits made before is what the same command says first.
    process = start_psctl(*command, cwd=tmp_path, env=environment)
    assert process.stderr is not None
    lines = [process.stderr.readline() for _ in range(2)]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    num_visits = sum(len(row.samples_ms) for row in table.rows) // latency.TIMINGS_PER_VISIT
    assert lines[1].startswith(f"visits: {7000 - num_visits:,} to do, ")
    assert process.returncode == 130


def test_rows_of_equal_combinations_are_one(tmp_path: Path) -> None:
    row = LatencyRow({SIZES[0]: 1}, (1.0,))
    write_latencies(tmp_path / "t.parquet", LatencyTable((row, row), CIRCUMSTANCES, {}))
    with pytest.raises(UsageError, match="occurs twice"):
        read_latencies(tmp_path / "t.parquet")


@pytest.mark.slow
def test_quick_profile_and_what_its_predictors_are_worth(run_psctl: RunPsctl, environment: dict[str, str]) -> None:
    folder = Path(environment["PSCTL_MODEL"]).with_name("even")  # its latents can be cut into the cache's patches
    save_tiny(folder, tiny_sdxl(), guidance_scale=3.0, resolutions=["32", "64"])
    environment = environment | {"PSCTL_MODEL": str(folder), "PSCTL_CACHE_PATCH_SIZE": "4"}
    done = run_psctl("profile", "--quick", "--json", **environment)
    assert done.returncode == 0, done.stderr
    latency, end = json.JSONDecoder().raw_decode(done.stdout)
    blocks = json.loads(done.stdout[end:])
    # Every number of steps and requests is the smaller one.
    assert (latency["settings"]["combinations"], latency["settings"]["repeats"], len(latency["rows"])) == (60, 2, 60)
    assert latency["is_complete"]
    told = [line for line in done.stderr.splitlines() if " to do, " in line or " done in " in line]
    assert [line.rpartition(",")[0] if "to do" in line else line.partition(" done")[0] for line in told] == [
        "visits: 120 to do",
        "visits: 120",
        "denoising steps: 40 to do",
        "denoising steps: 40",
    ]
    assert blocks["num_rows"] > 0
    done = run_psctl("train-predictor", "latency", "--json", **environment)
    fit = json.loads(done.stdout)["fit"]
    assert (fit["num_train"] + len(fit["held_out"]), fit["errors"]["svr"]["mape"] > 0) == (60, True)
