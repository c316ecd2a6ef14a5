"""Recorded passes in the simulator: durations worked out by hand, buckets, and what each mode does under load."""

import json
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.data.traces.traces import TraceConfig, generate_trace
from patchedserve.data.work import Work
from patchedserve.serving.layout.bucket import Bucket
from patchedserve.serving.runs.simulated.files import read_graph_costs
from patchedserve.serving.runs.step_file import load_step_file
from patchedserve.serving.scheduling.policies import get_policy
from patchedserve.serving.simulator.graphs import GraphCosts, GraphModel, GraphsMode, RecordedPasses
from patchedserve.serving.simulator.simulator import SimulationResult, simulate
from patchedserve.serving.simulator.step_durations import ProfiledSteps, StepDurations

from ...support.docs_pages import REPOSITORY, blocks_of

S, M, L = Resolution(512, 512), Resolution(768, 768), Resolution(1024, 1024)
COSTS = GraphCosts(launches=2000, launch_us=1000.0, record_ms=500.0, launches_per_resolution=500, replay_ms=250.0)
H200 = REPOSITORY / "tests" / "benchmarks" / "results" / "gpu-h200" / "graph-costs.json"


class Unit:
    """Step latencies of 1 s for each image."""

    def step_latency_s(self, active: Any) -> float:
        return float(len(active))


def model(mode: GraphsMode, patch_side: int = 256, **costs: Any) -> GraphModel:
    return GraphModel(mode, replace(COSTS, **costs), patch_side)


def run(graphs: GraphModel, requests: list[Request], num_gpus: int = 1) -> SimulationResult:
    durations = StepDurations(ProfiledSteps(Unit()), graphs=graphs)
    return simulate(requests, get_policy("continuous"), Unit(), durations=durations, num_gpus=num_gpus, keep_steps=True)


def test_steps_match_manual_durations() -> None:
    alone = [Request(0, "", L, 4)]
    # A step of one image takes the GPU 1 s, and the host 2 s of launches.
    off = run(model("off"), alone)
    assert [row.duration_s for row in off.steps] == [2.0] * 4
    assert (off.num_keys, off.num_recordings, off.num_replays) == (1, 0, 0)
    exact = run(model("exact"), alone)
    assert [row.duration_s for row in exact.steps] == [1.75, 1.25, 1.25, 1.25]
    assert (exact.num_keys, exact.num_recordings, exact.num_replays) == (1, 1, 3)
    patient = run(model("exact", patience=2), alone)
    assert [row.duration_s for row in patient.steps] == [2.0, 2.0, 1.75, 1.25]
    # 16 patches in two rows are 32, a bucket without padding.
    bucketed = run(model("bucketed"), alone)
    assert [row.duration_s for row in bucketed.steps] == [1.75, 1.25, 1.25, 1.25]
    assert (bucketed.num_keys, bucketed.num_recordings, bucketed.num_replays) == (1, 1, 3)
    # 9 patches in two rows are 18, padded to 20.
    padded = run(model("bucketed"), [Request(0, "", M, 2)])
    assert [row.duration_s for row in padded.steps] == pytest.approx([20 / 18 + 0.75, 20 / 18 + 0.25])
    patient = run(model("bucketed", patience=2), alone)
    assert [row.duration_s for row in patient.steps] == [2.0, 2.0, 1.75, 1.25]


def test_launches_rise_with_resolutions_and_are_a_floor() -> None:
    passes = RecordedPasses(model("off"))
    assert passes.step_s(1.0, [S, S]) == 2.0
    assert passes.step_s(1.0, [S, M, L]) == 3.0
    assert passes.step_s(7.0, [S, M, L]) == 7.0
    assert passes.step_s(0.5, []) == 0.5, "no pass runs"
    assert len(passes.keys) == 2


def test_released_compositions_must_recur() -> None:
    passes = RecordedPasses(model("exact", patience=1, max_recorded=1))
    steps = [passes.step_s(1.0, [size]) for size in (S, S, S, L, L, S, S)]
    assert steps == [2.0, 1.75, 1.25, 2.0, 1.75, 2.0, 1.75]
    assert (len(passes.keys), passes.num_recordings) == (2, 3)


def test_a_bucket_serves_different_compositions() -> None:
    bucketed, exact = RecordedPasses(model("bucketed")), RecordedPasses(model("exact"))
    for passes in (bucketed, exact):
        for batch in ([S, L], [M, M], [S, L]):
            passes.step_s(1.0, batch)
    assert (bucketed.keys, bucketed.num_recordings) == ({Bucket(40, 5, 40)}, 1)
    assert (len(exact.keys), exact.num_recordings) == (2, 2)
    # A tenth of 16 patches, and 4, are at most 6, in two rows each.
    assert model("bucketed").bucket_of([Work(1024, 1024, 0.1), S]) == Bucket(12, 5, 12)
    assert model("bucketed", rows_per_request=1).bucket_of([M]) == Bucket(10, 3, 10)


def test_every_gpu_records_its_own_passes() -> None:
    requests = [Request(index, "", L, 4) for index in range(2)]
    both = run(model("bucketed"), requests, num_gpus=2)
    assert (both.num_keys, both.num_recordings, both.num_replays) == (1, 2, 6)


def test_buckets_replay_under_load_where_compositions_do_not(tmp_path: Path) -> None:
    """With the published costs, most passes are replayed from buckets; compositions rarely recur."""
    (tmp_path / "h200.csv").write_text(published_block("h200-sdxl.csv"))
    steps = load_step_file(tmp_path / "h200.csv", on_warning=lambda _: None).of("patched")
    config = TraceConfig(request_rate=1.3, num_prompts=150, num_inference_steps=30, resolutions=(S, M, L), seed=0)
    requests = generate_trace(config, ["a"])

    def simulated(mode: GraphsMode) -> tuple[SimulationResult, float]:
        durations = replace(StepDurations(steps), graphs=GraphModel(mode, read_graph_costs(H200), 256))
        result = simulate(requests, get_policy("continuous"), steps.policy_latency, durations=durations)
        return result, statistics.mean(record.latency_s or 0.0 for record in result.records)

    (off, off_s), (exact, exact_s), (bucketed, bucketed_s) = map(simulated, ("off", "exact", "bucketed"))
    assert off.num_recordings == 0
    assert exact.num_recordings > 3 * bucketed.num_recordings > 0
    assert exact.num_replays / exact.num_steps < 0.9 < bucketed.num_replays / bucketed.num_steps
    assert bucketed_s < min(off_s, exact_s)


def test_published_costs_are_those_of_the_page() -> None:
    assert published_block("h200-graphs.json") == H200.read_text()


def published_block(title: str) -> str:
    page = (REPOSITORY / "docs" / "simulator.md").read_text()
    return next(block.body for block in blocks_of(page) if block.title == title)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"launches": 0}, "launches is 0, but it must be finite and 1 or more"),
        ({"launch_us": -1}, "launch_us is -1, but it must be finite and 0 or more"),
        ({"max_recorded": 0}, "max_recorded is 0, but it must be finite and 1 or more"),
        ({"launch_us": "39"}, "launch_us is '39', but it must be a number"),
        ({"launch_ms": 39}, "unknown key 'launch_ms'; known: launches, launch_us"),
    ],
)
def test_bad_costs_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(asdict(COSTS) | change))
    with pytest.raises(UsageError, match=f"costs.json: {message}"):
        read_graph_costs(file)
    file.write_text("{")
    with pytest.raises(UsageError, match=r"costs.json: not valid JSON, perhaps half-written: Expecting"):
        read_graph_costs(file)
