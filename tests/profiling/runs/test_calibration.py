"""How long simulated steps last, and what a served run tells of it: by hand, and back from what was put in."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import pytest

from patchedserve.data.errors import RunError, UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.data.tables.latency import LatencyRow, LatencyTable, write_latencies
from patchedserve.data.traces.traces import TraceConfig, assign_slos, generate_trace
from patchedserve.profiling.runs.calibration import Calibration, calibrate, step_sources
from patchedserve.profiling.runs.simulate import Deployment, SimulatedEngine, load_step_file
from patchedserve.profiling.sweep.simulator_side import read_calibrations
from patchedserve.serving.scheduling.policies import get_policy
from patchedserve.serving.scheduling.systems import get_system
from patchedserve.serving.simulator.simulator import SimulationResult, simulate
from patchedserve.serving.simulator.stage_times import StageTimes
from patchedserve.serving.simulator.step_durations import StepDurations
from patchedserve.training.latency.online_correction import OnlineCorrection

S, L = Resolution(128, 128), Resolution(256, 256)
TIMES = StageTimes({S: 0.004, L: 0.004}, {S: 0.03, L: 0.09})


class Steps:
    """A constant and a bit for every image; times `scale`."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def step_latency_s(self, active: Sequence[Resolution]) -> float:
        return self.scale * (0.02 + sum(0.004 if size == S else 0.012 for size in active))


class Unit:
    def step_latency_s(self, active: Sequence[Resolution]) -> float:
        return 1.0


def request(request_id: int, arrival_s: float = 0.0, steps: int = 2, size: Resolution = S) -> Request:
    return Request(request_id, "", size, steps, arrival_s=arrival_s)


def serve(durations: StepDurations, rate: float = 2.0, count: int = 60, policy: str = "continuous") -> SimulationResult:
    config = TraceConfig(request_rate=rate, num_prompts=count, num_inference_steps=10, resolutions=(S, L))
    requests = assign_slos(generate_trace(config, ["a"]), lambda request: 0.5, 5.0)
    return simulate(requests, get_policy(policy), Steps(), times=TIMES, durations=durations, keep_steps=True)


def test_a_step_beside_busy_stages() -> None:
    durations = StepDurations(Unit(), slowdown=1.0)
    assert durations.stretched_s(1.0) == 1.0
    assert durations.stretched_s(1.0, -5.0, 0.0) == 1.0
    # Half speed all the time.
    assert durations.stretched_s(1.0, 10.0) == 2.0
    # Half speed for 0.5 s, which does 0.25 of it.
    assert durations.stretched_s(1.0, 0.5) == pytest.approx(1.25)
    # A third of the speed for 0.6 s (0.2 done), half of it until 1 s (0.2 done), then 0.6 s alone.
    assert durations.stretched_s(1.0, 1.0, 0.6) == pytest.approx(1.6)
    assert durations.lost_s(0.5) == 0.25
    assert StepDurations(Unit()).stretched_s(1.0, 10.0) == 1.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"scale": 0.0}, "scale"), ({"between_s": -1.0}, "between"), ({"slowdown": 99.0}, "slowdown is 99")],
)
def test_durations_are_checked(fields: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        StepDurations(Unit(), **fields)  # type: ignore[arg-type]


def test_first_steps_and_gaps_by_hand() -> None:
    # Alone: a first step of 3 s, one of 1 s. The second arrives at 0.5 and joins at 3.25: again a first step, in which
    # the first request ends; the batch has changed, so that the second's last step is a first one, too.
    durations = StepDurations(Unit(), first=_Three(), between_s=0.25)
    result = simulate(
        [request(0), request(1, 0.5)], get_policy("continuous"), Unit(), durations=durations, keep_steps=True
    )
    assert [(row.start_s, row.duration_s) for row in result.steps] == [(0.0, 3.0), (3.25, 3.0), (6.5, 3.0)]
    assert [record.denoise_end_s for record in result.records] == [6.25, 9.5]
    # Nobody joins or leaves: the second and third are steady ones; all of it twice as long.
    slow = StepDurations(Unit(), first=_Three(), scale=2.0)
    alone = simulate([request(0, steps=3)], get_policy("fcfs"), Unit(), durations=slow, keep_steps=True)
    assert [row.duration_s for row in alone.steps] == [6.0, 2.0, 2.0]


class _Three:
    def step_latency_s(self, active: Sequence[Resolution]) -> float:
        return 3.0


def test_stages_slow_the_steps_by_hand() -> None:
    # The second request is prepared from 0.5 to 0.9 beside the first's first step, which began before and cannot know:
    # the 0.2 s that it costs are made up for by the next step. From 2.2 to 3.2 the first image is decoded: 0.5 of the
    # second's step are done in it, the other half alone.
    durations = StepDurations(Unit(), slowdown=1.0)
    times = StageTimes({S: 0.0}, {S: 1.0})
    requests = [request(0), request(1, 0.5, steps=3)]
    plain = simulate(requests, get_policy("continuous"), Unit(), durations=durations, times=times, keep_steps=True)
    assert [row.duration_s for row in plain.steps] == pytest.approx([1.0, 1.0, 1.5, 1.0])
    times = StageTimes({S: 0.4}, {S: 1.0})
    late = simulate(requests, get_policy("continuous"), Unit(), durations=durations, times=times, keep_steps=True)
    assert [row.start_s for row in late.steps][:2] == pytest.approx([0.4, 1.4])
    assert [row.duration_s for row in late.steps] == pytest.approx([1.0, 1.2, 1.5, 1.0])


def test_deployments_know_first_steps(tmp_path: Path) -> None:
    rows = (LatencyRow({S: 1}, (10.0,), (30.0,)), LatencyRow({S: 2}, (14.0,), (40.0,)))
    write_latencies(tmp_path / "own.parquet", LatencyTable(rows))
    (tmp_path / "foreign.csv").write_text("combination,ms\n128x128,10\n2*128x128,14\n")
    assert load_step_file(tmp_path / "foreign.csv").first is None

    def latency_of(name: str, engine: Literal["patched", "plain"]) -> float | None:
        steady, first, _ = load_step_file(tmp_path / name)
        system = get_system("diffusers-fcfs").overridden(engine=engine)
        deployment = Deployment(system, steady, StageTimes(), first=first)
        return deployment.run([request(0, steps=4)])[1].records[0].latency_s

    assert latency_of("foreign.csv", "patched") == pytest.approx(0.040)
    assert latency_of("own.parquet", "patched") == pytest.approx(0.060)
    assert latency_of("own.parquet", "plain") == pytest.approx(0.040)


def test_calibration_finds_what_was_put_in() -> None:
    table, first = Steps(), Steps(1.5)
    truth = StepDurations(table, first, scale=1.2, between_s=0.002, slowdown=0.8)
    result = serve(truth)
    found = calibrate(result.records, result.steps, table, first)
    assert found.between_s == pytest.approx(0.002, rel=0.02)
    assert found.scale == pytest.approx(1.2, rel=0.02)
    # Preparing that begins in the middle of a step is paid for by the next one, which blurs it a little.
    assert found.slowdown == pytest.approx(0.8, rel=0.15)
    assert found.prepare_s == pytest.approx({"128x128": 0.004, "256x256": 0.004})
    assert found.postprocess_s == pytest.approx({"128x128": 0.03, "256x256": 0.09})
    assert found.error < 0.05
    assert 1.2 - 1e-9 < found.told_scale < 1.9
    # Without knowing of first steps and stages it must blame the scale.
    assert calibrate(result.records, result.steps, table, None).scale > 1.25
    again = Calibration.from_json(json.loads(json.dumps(asdict(found))), "x")
    assert again == found
    # What follows simulates as the truth did.
    other = serve(again.durations(table, first), rate=3.0)
    real = serve(truth, rate=3.0)
    means = [sum(record.latency_s or 0 for record in each.records) for each in (real, other)]
    assert means[1] == pytest.approx(means[0], rel=0.03)


def test_calibration_of_next_to_nothing() -> None:
    result = simulate([request(0)], get_policy("fcfs"), Steps(), keep_steps=True)
    with pytest.raises(RunError, match="took 2 steps, but at least 20"):
        calibrate(result.records, result.steps, Steps(), None)
    with pytest.raises(RunError, match="no request was completed"):
        calibrate([], [], Steps(), None)


def test_a_learning_predictor_is_told_every_step() -> None:
    durations = StepDurations(Steps(), scale=2.0)
    config = TraceConfig(request_rate=2.0, num_prompts=80, num_inference_steps=10, resolutions=(S, L))
    requests = assign_slos(generate_trace(config, ["a"]), lambda request: 0.5, 3.0)
    correction = OnlineCorrection(Steps())
    result = simulate(requests, get_policy("slack"), correction, durations=durations)
    assert correction.drift().num_observations == result.num_steps
    assert correction.scale == pytest.approx(2.0, rel=1e-3)
    # One that goes on where another has ended needs not learn.
    known = OnlineCorrection(Steps(), scale=2.0)
    simulate(requests, get_policy("slack"), known, durations=durations)
    assert known.scale == pytest.approx(2.0, rel=1e-9)
    with pytest.raises(ValueError, match="scale is 9"):
        OnlineCorrection(Steps(), scale=9.0)


def test_plain_and_patch_engine_have_latencies_of_their_own() -> None:
    table = LatencyTable(
        (
            LatencyRow({S: 1}, (10.0,), (30.0,)),
            LatencyRow({L: 1}, (20.0,), (30.0,)),
            LatencyRow({S: 1, L: 1}, (22.0,), (30.0,)),
        )
    )
    patched, plain = (SimulatedEngine.of(name, *step_sources(table)) for name in ("patched", "plain"))
    assert patched.durations.undisturbed_s((S, L), is_first=False) == 0.022
    assert patched.durations.undisturbed_s((S, L), is_first=True) == 0.03
    # A pass for each resolution; nothing is packed.
    assert plain.durations.undisturbed_s((S, L), is_first=True) == pytest.approx(0.03)
    assert plain.told.step_latency_s((S, L)) == pytest.approx(0.03)
    # A foreign table knows no first steps.
    assert step_sources(LatencyTable((LatencyRow({S: 1}, (10.0,)),)))[1] is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is damaged"),
        ("{}", "names no engine"),
        ('{"plain": {"scale": 1}}', "a calibration must have"),
        (json.dumps({"plain": asdict(Calibration({"128x128": -1.0}, {}))}), "prepare_s of 128x128 is -1 s"),
        (json.dumps({"plain": asdict(Calibration({"wide": 1.0}, {}))}), "resolution is 'wide'"),
        (json.dumps({"plain": asdict(Calibration({}, {}, scale=0.0))}), "scale of step durations is 0"),
        (json.dumps({"plain": asdict(Calibration({}, {})) | {"error": "x"}}), "is damaged"),
    ],
)
def test_damaged_calibrations_are_one_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=message) as caught:
        read_calibrations(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
