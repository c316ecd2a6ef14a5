"""Durations of simulated steps, worked out by hand, and their calibration, which recovers known parameters."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import pytest

from patchedserve.data.errors import RunError, UsageError
from patchedserve.data.parsing import parse
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.data.tables.latency import LatencyRow, LatencyTable, write_latencies
from patchedserve.data.traces.traces import TraceConfig, assign_slos, generate_trace
from patchedserve.serving.runs.simulated.calibration import Calibration, ServedRun, calibrate
from patchedserve.serving.runs.simulated.deployment import SimulatedDeployment, SimulatedEngine
from patchedserve.serving.runs.simulated.files import read_calibrations
from patchedserve.serving.runs.step_file import StepFile, load_step_file, step_sources
from patchedserve.serving.scheduling.policies import get_policy
from patchedserve.serving.scheduling.systems import get_system
from patchedserve.serving.simulator.simulator import SimulationResult, simulate
from patchedserve.serving.simulator.stage_times import StageTimes
from patchedserve.serving.simulator.step_durations import ProfiledSteps, Reuse, Slowdown, StepDurations
from patchedserve.training.latency.online_correction import OnlineCorrection

S, L = Resolution(128, 128), Resolution(256, 256)
TIMES = StageTimes({S: 0.004, L: 0.004}, {S: 0.03, L: 0.09})


class Steps:
    """Step latencies of a constant and a small cost for each image, multiplied by `scale`."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def step_latency_s(self, active: Sequence[Any]) -> float:
        return self.scale * (0.02 + sum(0.004 if size == S else 0.012 for size in active))


class Unit:
    def step_latency_s(self, active: Sequence[Any]) -> float:
        return 1.0


UNIT = ProfiledSteps(Unit())


def request(request_id: int, arrival_s: float = 0.0, steps: int = 2, size: Resolution = S) -> Request:
    return Request(request_id, "", size, steps, arrival_s=arrival_s)


def serve(
    durations: StepDurations, rate: float, count: int = 60, seed: int = 0, times: StageTimes = TIMES
) -> SimulationResult:
    config = TraceConfig(request_rate=rate, num_prompts=count, num_inference_steps=10, resolutions=(S, L), seed=seed)
    requests = generate_trace(config, ["a"])
    return simulate(requests, get_policy("continuous"), Steps(), times=times, durations=durations, keep_steps=True)


def test_scales_are_interpolated_linearly_between_batch_sizes() -> None:
    durations = StepDurations(UNIT, {2: 1.0, 6: 2.0})
    assert [durations.undisturbed_s((S,) * count) for count in (1, 2, 3, 6, 9)] == [1.0, 1.0, 1.25, 2.0, 2.0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scales": {1: 0.0}}, "scale of step durations is 0"),
        ({"scales": {}}, "rising batch sizes"),
        ({"scales": {4: 1.0, 2: 1.0}}, "rising batch sizes"),
        ({"first_scale": -1.0}, "first_scale is -1"),
        ({"between_s": -1.0}, "between_s is -1"),
        ({"slowdown": ((0, 99, 0), (0, 0, 0), (0, 0, 0))}, "slowdown is 99"),
    ],
)
def test_durations_are_validated(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        StepDurations(UNIT, **fields)


def test_first_steps_and_gaps_match_manual_values() -> None:
    # Alone, a first step takes 3 s, others 1 s. The second arrives at 0.5 and joins at 3.25: again a first step, with
    # which the first request ends. This changes the batch, so the second's last step is a first one, too.
    durations = StepDurations(ProfiledSteps(Unit(), _ConstantSteps()), between_s=0.25)
    result = simulate(
        [request(0), request(1, 0.5)], get_policy("continuous"), Unit(), durations=durations, keep_steps=True
    )
    assert [(row.start_s, row.duration_s) for row in result.steps] == [(0.0, 3.0), (3.25, 3.0), (6.5, 3.0)]
    assert [record.denoise_end_s for record in result.records] == [6.25, 9.5]
    # No request joins or leaves, so the second and third steps are steady ones; all steps take twice as long.
    slow = StepDurations(ProfiledSteps(Unit(), _ConstantSteps()), {1: 2.0}, first_scale=2.0)
    alone = simulate([request(0, steps=3)], get_policy("fcfs"), Unit(), durations=slow, keep_steps=True)
    assert [row.duration_s for row in alone.steps] == [6.0, 2.0, 2.0]


class _ConstantSteps:
    def step_latency_s(self, active: Sequence[Any]) -> float:
        return 3.0


def test_stages_sharing_the_processor_match_manual_values() -> None:
    requests = [request(0), request(1, 0.5, steps=3)]

    def ends(prepare_s: float, slowdown: Slowdown) -> tuple[list[float], list[float | None]]:
        durations, times = StepDurations(UNIT, slowdown=slowdown), StageTimes({S: prepare_s}, {S: 1.0})
        result = simulate(requests, get_policy("continuous"), Unit(), durations=durations, times=times, keep_steps=True)
        return [row.duration_s for row in result.steps], [record.finish_s for record in result.records]

    # The first image is decoded from 2 to 3 beside the third step, of which half is done by then; the rest runs alone.
    assert ends(0.0, ((0, 0, 0), (0, 0, 1), (0, 0, 0))) == ([1.0, 1.0, 1.5, 1.0], [3.0, 5.5])
    # Decoding is slowed as well, so that both take twice as long.
    assert ends(0.0, ((0, 0, 0), (0, 0, 1), (0, 1, 0))) == ([1.0, 1.0, 2.0, 1.0], [4.0, 6.0])
    # The second is prepared from 0.5 on, beside the first request's first step (from 0.4): 0.4 s take 0.8 s, until 1.3.
    # The step completes 0.1 before and 0.4 meanwhile, and ends at 1.8. Decoding, from 2.8 on, slows nothing down.
    steps, finished = ends(0.4, ((0, 1, 0), (1, 0, 0), (0, 0, 0)))
    assert steps == pytest.approx([1.4, 1.0, 1.0, 1.0])
    assert finished == pytest.approx([3.8, 5.8])
    # Slowdowns by several stages add up: a preparation and a step run until 2, then decoding joins them.
    slow = ((0.0, 0.5, 0.25), (1.0, 0.0, 2.0), (0.0, 0.0, 0.0))
    durations, times = StepDurations(UNIT, slowdown=slow), StageTimes({S: 0.0, L: 3.0}, {S: 1.0, L: 1.0})
    requests = [request(0, steps=1), request(1, steps=4), request(2, 0.0, size=L)]
    result = simulate(requests, get_policy("continuous"), Unit(), durations=durations, times=times, keep_steps=True)
    # The first step, beside preparation, lasts until 2, when 2 / 1.5 of the 3 s of preparation are done. During
    # decoding, until 3, a quarter of the second step and 1 / 1.75 of preparation are done. The step ends at 4.5 beside
    # preparation.
    assert [row.duration_s for row in result.steps][:2] == pytest.approx([2.0, 2.5])
    assert result.records[0].finish_s == pytest.approx(3.0)
    assert result.records[2].prepare_end_s == pytest.approx(3.0 + 1.5 * (3.0 - 2.0 / 1.5 - 1.0 / 1.75))


def test_deployments_include_first_steps(tmp_path: Path) -> None:
    rows = (LatencyRow({S: 1}, (10.0,), (30.0,)), LatencyRow({S: 2}, (14.0,), (40.0,)))
    write_latencies(tmp_path / "own.parquet", LatencyTable(rows))
    (tmp_path / "foreign.csv").write_text("combination,ms\n128x128,10\n2*128x128,14\n")
    assert load_step_file(tmp_path / "foreign.csv").first is None

    def latency_of(name: str, engine: Literal["patched", "plain"]) -> float | None:
        system = get_system("diffusers-fcfs").overridden(engine=engine)
        deployment = SimulatedDeployment(system, SimulatedEngine.of(load_step_file(tmp_path / name).of(engine)))
        return deployment.run([request(0, steps=4)])[1].records[0].latency_s

    assert latency_of("foreign.csv", "patched") == pytest.approx(0.040)
    assert latency_of("own.parquet", "patched") == pytest.approx(0.060)
    assert latency_of("own.parquet", "plain") == pytest.approx(0.060)


def check_means(truth: StepDurations, found: Calibration, rates: Sequence[float]) -> None:
    """Check that the calibration simulates like the truth: mean latencies are within 3 % at every rate."""
    for rate in rates:
        real, other = serve(truth, rate, seed=1), serve(found.durations(truth.steps), rate, seed=1, times=found.times)
        means = [fmean(record.latency_s or 0 for record in each.records) for each in (real, other)]
        assert means[1] == pytest.approx(means[0], rel=0.03)


@pytest.mark.parametrize("by_resolution", [False, True])
def test_calibration_recovers_known_parameters(by_resolution: bool) -> None:
    # The plain engine takes a pass for each resolution, and the constant counts for each pass.
    steps = ProfiledSteps(Steps(), Steps(1.5), by_resolution=by_resolution)
    slowdown: Slowdown = ((0.0, 0.6, 0.0), (0.5, 0.0, 0.8), (0.0, 0.7, 0.0))
    truth = StepDurations(steps, {1: 1.1, 16: 1.4}, 0.6, 0.002, slowdown)
    # The load ranges from nearly idle to all at once, as in real calibrations.
    results = [serve(truth, rate, count) for rate, count in ((0.7, 40), (2.0, 80), (20.0, 120))]
    found = calibrate([ServedRun(result.records, result.steps) for result in results], steps)
    assert found.between_s == pytest.approx(0.002, rel=1e-6)
    assert found.first_scale == pytest.approx(0.6, rel=0.02)
    durations = found.durations(steps)
    for size in (1, 4, 8, 16):
        assert durations.scale_of(size) == pytest.approx(truth.scale_of(size), rel=0.01)
    for row, expected in zip(found.slowdown, slowdown, strict=True):
        assert row == pytest.approx(expected, rel=0.05, abs=0.05)
    assert found.prepare_s == pytest.approx({"128x128": 0.004, "256x256": 0.004}, rel=0.02)
    assert found.postprocess_s == pytest.approx({"128x128": 0.03, "256x256": 0.09}, rel=0.02)
    assert found.error < 0.01
    assert found.ratios == pytest.approx([1.0] * 3, rel=0.01)
    assert parse(Calibration, json.loads(json.dumps(asdict(found))), "x") == found
    # Simulations with the calibration equal those with the truth at every rate.
    check_means(truth, found, (1.0, 3.0, 6.0))
    # A pause of the process for a minute counts as one slow step.
    rows = [*results[1].steps[:-1], replace(results[1].steps[-1], duration_s=60.0)]
    stopped = calibrate([ServedRun(results[1].records, rows)], steps).durations(steps)
    assert stopped.scale_of(4) == pytest.approx(truth.scale_of(4), rel=0.1)
    # Without latencies of first steps, the calibration attributes them to the scales.
    blind = calibrate(
        [ServedRun(result.records, result.steps) for result in results], ProfiledSteps(steps.policy_latency)
    )
    assert blind.durations(steps).scale_of(4) > 1.03 * truth.scale_of(4)


def test_calibration_recovers_known_stage_times_between_steps() -> None:
    steps = ProfiledSteps(Steps(), Steps(1.5))
    truth = StepDurations(steps, {1: 1.1, 16: 1.4}, 0.6, 0.002, is_inline=True)
    results = [serve(truth, rate, count) for rate, count in ((0.7, 40), (2.0, 80), (20.0, 120))]
    found = calibrate([ServedRun(result.records, result.steps) for result in results], steps, is_inline=True)
    assert found.is_inline
    assert found.between_s == pytest.approx(0.002, rel=0.01)
    assert found.prepare_s == pytest.approx({"128x128": 0.004, "256x256": 0.004}, rel=0.02)
    assert found.postprocess_s == pytest.approx({"128x128": 0.03, "256x256": 0.09}, rel=0.02)
    assert max(map(max, found.slowdown)) < 0.01
    assert parse(Calibration, json.loads(json.dumps(asdict(found))), "x") == found
    check_means(truth, found, (1.0, 3.0, 6.0))


def test_calibration_finds_the_computed_share_of_the_cache() -> None:
    steps = ProfiledSteps(Steps(), Steps(1.5))
    truth = StepDurations(steps, {1: 1.1, 8: 1.3}, 0.6, 0.001, reuse=Reuse(3, 3.0, 0.002))
    results = [serve(truth, rate, count) for rate, count in ((2.0, 40), (6.0, 80), (40.0, 120))]
    runs = [ServedRun(result.records, result.steps) for result in results]
    assert any(row.computed == {} for run in runs for row in run.steps), "a step of reuse alone"
    found = calibrate(runs, steps, warmup_steps=3)
    assert found.reuse is not None
    assert found.reuse.interval == pytest.approx(3.0, rel=0.01)
    assert found.reuse.aside_s == pytest.approx(0.002, rel=0.1)
    assert found.ratios == pytest.approx([1.0] * 3, rel=0.05)
    assert parse(Calibration, json.loads(json.dumps(asdict(found))), "x") == found
    check_means(truth, found, (2.0, 8.0, 16.0))


def test_computed_steps_are_identified() -> None:
    every = [Reuse(2, 3.0).is_computed(done, 12) for done in range(12)]
    assert every == [done in {0, 1, 4, 7, 10, 11} for done in range(12)]
    assert all(Reuse(0, 1.0).is_computed(done, 5) for done in range(5))
    for wrong in ({"warmup_steps": -1}, {"interval": 0.5}, {"aside_s": -1.0}):
        with pytest.raises(UsageError, match=f"{next(iter(wrong))} of reuse is"):
            replace(Reuse(1, 2.0), **wrong)


def test_only_changed_resolutions_take_a_first_pass() -> None:
    # When L joins the running S, only the pass of L is a first one. When S leaves, the pass of L stays a steady one.
    steps = ProfiledSteps(Steps(), Steps(1.5), by_resolution=True)
    small, large = Steps().step_latency_s((S,)), Steps().step_latency_s((L,))
    requests = [request(0, steps=3), request(1, 0.001, steps=4, size=L)]
    durations = StepDurations(steps)
    result = simulate(requests, get_policy("continuous"), Steps(), durations=durations, keep_steps=True)
    seconds = [1.5 * small, small + 1.5 * large, small + large, large, large]
    assert [row.duration_s for row in result.steps] == pytest.approx(seconds)
    # The patch engine packs the patches of all requests anew.
    mixed = Steps().step_latency_s((S, L))
    durations = StepDurations(ProfiledSteps(Steps(), Steps(1.5)))
    result = simulate(requests, get_policy("continuous"), Steps(), durations=durations, keep_steps=True)
    seconds = [1.5 * small, 1.5 * mixed, mixed, 1.5 * large, large]
    assert [row.duration_s for row in result.steps] == pytest.approx(seconds)


def test_calibration_with_stages_that_never_ran_alone() -> None:
    # Steps run without a pause, with little else: even if effects cannot be told apart, mean latencies stay.
    steps = ProfiledSteps(Steps(), Steps(1.5))
    truth = StepDurations(steps, slowdown=((0.0, 1.0, 0.0), (0.0, 0.0, 0.0), (0.0, 1.0, 0.0)))
    requests = [request(index, steps=30 if index == 0 else 1) for index in range(6)]
    result = simulate(requests, get_policy("continuous"), Steps(), times=TIMES, durations=truth, keep_steps=True)
    run = ServedRun(result.records, result.steps)
    found = calibrate([run], steps)
    again = simulate(
        requests,
        get_policy("continuous"),
        Steps(),
        times=found.times,
        durations=found.durations(steps),
        keep_steps=True,
    )
    means = [fmean(record.latency_s or 0 for record in each.records) for each in (result, again)]
    assert means[1] == pytest.approx(means[0], rel=0.05)


def test_calibration_with_very_few_measurements() -> None:
    result = simulate([request(0)], get_policy("fcfs"), Steps(), keep_steps=True)
    with pytest.raises(RunError, match="took 2 steps, but at least 20"):
        calibrate([ServedRun(result.records, result.steps)], ProfiledSteps(Steps()))
    with pytest.raises(RunError, match="no request was completed"):
        calibrate([], ProfiledSteps(Steps()))


def test_learning_predictor_observes_every_step() -> None:
    durations = StepDurations(ProfiledSteps(Steps()), {1: 2.0})
    config = TraceConfig(request_rate=2.0, num_prompts=80, num_inference_steps=10, resolutions=(S, L))
    requests = assign_slos(generate_trace(config, ["a"]), lambda request: 0.5, 3.0)
    correction = OnlineCorrection(Steps())
    result = simulate(requests, get_policy("slack"), correction, durations=durations)
    assert correction.drift().num_observations == result.num_steps
    assert correction.scale == pytest.approx(2.0, rel=1e-3)
    # A correction that starts where another has ended need not learn.
    known = OnlineCorrection(Steps(), scale=2.0)
    simulate(requests, get_policy("slack"), known, durations=durations)
    assert known.scale == pytest.approx(2.0, rel=1e-9)
    with pytest.raises(ValueError, match="scale is 9"):
        OnlineCorrection(Steps(), scale=9.0)


def test_plain_and_patch_engine_have_separate_latencies() -> None:
    table = LatencyTable(
        (
            LatencyRow({S: 1}, (10.0,), (30.0,)),
            LatencyRow({L: 1}, (20.0,), (30.0,)),
            LatencyRow({S: 1, L: 1}, (22.0,), (30.0,)),
        )
    )
    file = StepFile(*step_sources(table), None)
    patched, plain = (SimulatedEngine.of(file.of(name)) for name in ("patched", "plain"))
    assert patched.durations.undisturbed_s((S, L)) == 0.022
    assert patched.durations.undisturbed_s((S, L), {S}) == 0.03
    # There is a pass for each resolution, and only passes of changed resolutions take longer.
    assert plain.durations.undisturbed_s((S, L)) == pytest.approx(0.03)
    assert plain.durations.undisturbed_s((S, L), {S}) == pytest.approx(0.05)
    assert plain.durations.steps.policy_latency.step_latency_s((S, L)) == pytest.approx(0.03)
    # A foreign table has no latencies of first steps.
    assert step_sources(LatencyTable((LatencyRow({S: 1}, (10.0,)),)))[1] is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("{}", "names no engine"),
        ('{"plain": {"scales": {"1": 1.0}}}', "'plain.prepare_s' is missing"),
        (
            json.dumps({"plain": asdict(Calibration({}, {})) | {"prepare_s": {"128x128": -1.0}}}),
            "prepare_s of 128x128 is -1 s",
        ),
        (json.dumps({"plain": asdict(Calibration({}, {})) | {"prepare_s": {"wide": 1.0}}}), "resolution is 'wide'"),
        (json.dumps({"plain": asdict(Calibration({}, {})) | {"scales": {"1": 0.0}}}), "scale of step durations is 0"),
        (json.dumps({"plain": asdict(Calibration({}, {})) | {"error": "x"}}), "error is 'x', but it must be a number"),
    ],
)
def test_damaged_calibrations_give_a_one_line_error(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=message) as caught:
        read_calibrations(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
