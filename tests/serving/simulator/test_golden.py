"""Results of the simulator on 20 seeded traces stay equal to recorded ones.

`golden.json` was written by the simulator when it still had a state machine of its own, before it shared the engine's
scheduler. The order of ends and the disturbed cases were recorded again when stages began to share the processor,
which changes when decoding ends. Times are compared bit for bit: arrivals are multiples of 1/4096 s and everything else
is sums and products, so no mathematical library is involved.
To rewrite the file when results are meant to change, run `python tests/serving/simulator/test_golden.py`.
"""

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.core.request_state import RequestRecord
from patchedserve.serving.scheduling.policies import get_policy
from patchedserve.serving.scheduling.systems import get_system
from patchedserve.serving.simulator.distrifusion import PUBLISHED
from patchedserve.serving.simulator.simulator import SimulationResult, simulate
from patchedserve.serving.simulator.stage_times import StageTimes, standalone_latency_s
from patchedserve.serving.simulator.step_durations import ProfiledSteps, StepDurations

FILE = Path(__file__).with_name("golden.json")
SIZES = (Resolution(128, 128), Resolution(192, 192), Resolution(256, 256), Resolution(128, 256))
IMAGE_S = dict(zip(SIZES, (0.0032, 0.006, 0.0095, 0.0061), strict=True))
TICKS_PER_S = 4096


class Steps:
    """Step latencies with a large overhead and a small cost for each image."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def step_latency_s(self, active: Sequence[Any]) -> float:
        latency_s = 0.015 + 0.002 * len(set(active))
        for size in active:  # not `sum`, which rounds differently since Python 3.12
            latency_s += IMAGE_S[size]
        return latency_s * self.scale


class Learning(Steps):
    """Predictor that moves its scale a tenth of the way towards each measurement."""

    def observe(
        self, active: Sequence[Any], measured_s: float, *, is_first: bool = False, between_s: float = 0.0
    ) -> None:
        self.scale += 0.1 * (measured_s / Steps().step_latency_s(active) - self.scale)


@dataclass(frozen=True)
class Case:
    """A trace and how it is served.

    `gap` is the longest time between arrivals in ticks (0: all at once), `burst` the number of requests that arrive
    together, and `slo` the range of SLOs in standalone latencies, None for requests without one.
    """

    policy: str
    gap: int = 700
    burst: int = 1
    count: int = 300
    steps: tuple[int, ...] = (10, 10, 20)
    slo: tuple[float, float] | None = (2.0, 8.0)
    is_learning: bool = False
    times: StageTimes = StageTimes.constant(SIZES, 0.005, 0.02)  # noqa: RUF009  immutable
    durations: StepDurations | None = None
    max_batch_size: int = 6
    num_gpus: int = 1
    max_prepared_ahead: int | None = None


DISTURBED = StepDurations(
    ProfiledSteps(Steps(), Steps(1.25)),
    {1: 1.1, 6: 1.2},
    between_s=0.0015,
    slowdown=((0.0, 0.3, 0.2), (0.4, 0.0, 0.5), (0.1, 0.6, 0.0)),
)
SLOW_PREPARE = StageTimes({SIZES[0]: 0.04, SIZES[2]: 0.11}, {SIZES[1]: 0.05})
CASES = {
    "fcfs": Case("fcfs", gap=3000),
    "fcfs, overload on two GPUs": Case("fcfs", gap=500, num_gpus=2),
    "static": Case("static", gap=1600),
    "static, bursts, slow to prepare": Case("static", gap=3000, burst=7, times=SLOW_PREPARE, max_prepared_ahead=2),
    "static, three GPUs, disturbed": Case("static", gap=200, num_gpus=3, durations=DISTURBED),
    "continuous": Case("continuous", gap=1200),
    "continuous, all at once": Case("continuous", gap=0, max_batch_size=16),
    "continuous, no stage but steps, no SLO": Case("continuous", times=StageTimes(), slo=None),
    "continuous, slow to prepare, one ahead": Case("continuous", times=SLOW_PREPARE, max_prepared_ahead=1),
    "continuous, four GPUs, disturbed": Case("continuous", gap=150, num_gpus=4, durations=DISTURBED),
    "nirvana, overload": Case("nirvana", gap=300, steps=(10, 13, 30)),
    "edf": Case("edf", gap=1200),
    "edf, bursts, disturbed": Case("edf", gap=4000, burst=9, durations=DISTURBED, max_batch_size=4),
    "edf, slow to prepare, two GPUs": Case("edf", gap=300, times=SLOW_PREPARE, num_gpus=2, max_prepared_ahead=3),
    "slack": Case("slack", gap=1100),
    "slack, overload, slow to prepare": Case("slack", gap=200, count=600, times=SLOW_PREPARE),
    "slack, overload on three GPUs, disturbed": Case("slack", gap=60, count=600, num_gpus=3, durations=DISTURBED),
    "slack, learning": Case("slack", is_learning=True, durations=DISTURBED, burst=3, gap=1800),
    "slack, learning on two GPUs": Case("slack", gap=150, is_learning=True, num_gpus=2, max_batch_size=16),
    "distrifusion on four GPUs": Case("distrifusion", gap=1200, num_gpus=4, durations=DISTURBED),
}


# The systems among the cases; the others are policies.
SYSTEM_OF = {"nirvana": "nirvana", "distrifusion": "distrifusion-fcfs"}


def trace(case: Case, seed: int, alone_s: Callable[[Request], float]) -> list[Request]:
    rng, tick, requests = random.Random(seed), 0, []
    for request_id in range(case.count):
        if request_id % case.burst == 0:
            tick += rng.randint(0, case.gap)
        what = Request(request_id, f"a {request_id}", rng.choice(SIZES), rng.choice(case.steps), seed=rng.randint(0, 9))
        slo_s = None
        if case.slo is not None and rng.random() < 0.9:
            low, high = case.slo
            slo_s = alone_s(what) * (low + (high - low) * rng.random())
        requests.append(
            Request(
                request_id,
                what.prompt,
                what.resolution,
                what.num_inference_steps,
                seed=what.seed,
                arrival_s=tick / TICKS_PER_S,
                slo_s=slo_s,
            )
        )
    return requests


def serve(case: Case, seed: int) -> tuple[SimulationResult, list[RequestRecord]]:
    """Return the result, and the records in the order in which they became final."""

    def alone_s(request: Request) -> float:
        return standalone_latency_s(request, Steps(), case.times)

    finished: list[RequestRecord] = []
    requests, policy, speedups = trace(case, seed, alone_s), case.policy, None
    if policy in SYSTEM_OF:
        system = get_system(SYSTEM_OF[policy], is_simulated=True)
        requests, policy = list(map(system.adapt, requests)), system.policy
        speedups = PUBLISHED if system.spans_gpus else None
    result = simulate(
        requests,
        get_policy(policy),
        Learning() if case.is_learning else Steps(),
        max_batch_size=case.max_batch_size,
        num_gpus=case.num_gpus,
        speedups=speedups,
        times=case.times,
        durations=case.durations,
        max_prepared_ahead=case.max_prepared_ahead,
        standalone_s=alone_s,
        keep_steps=True,
        on_finish=finished.append,
    )
    return result, finished


def row_of(record: RequestRecord) -> dict[str, Any]:
    """Return a record's row without the fields that only cascades, edits, adapters and real steps set."""
    row = record.to_row()
    of_others = ("served_by", "confidence", "threshold", "strength", "mask_ratio", "active_share", "reused", "lora")
    assert {row.pop(name) for name in (*of_others, "steps_reused", "references")} == {None}
    return row


def digest(rows: object) -> str:
    """Return a digest of a JSON value; floats are written such that they read back bit for bit."""
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32]


def figures(case: Case, seed: int) -> dict[str, Any]:
    result, finished = serve(case, seed)
    records, steps = result.records, [row.to_row() for row in result.steps]
    # Steps did not have this column when the file was written.
    assert all(row.pop("computed") is None for row in steps)
    return {
        "records": digest([row_of(record) for record in records]),
        "steps": digest(steps),
        "finished": digest([record.request_id for record in finished]),
        "gpus": digest(sorted(result.gpu_of.items())),
        "completed": sum(record.status == "completed" for record in records),
        "in_time": sum(record.slo_met is True for record in records),
        "duration_s": result.duration_s,
        "busy_s": result.busy_s,
        "num_steps": result.num_steps,
        "mean_batch": sum(row.active for row in result.steps) / len(result.steps),
        "max_prepared": result.max_prepared,
        "num_decisions": result.num_decisions,
    }


@pytest.mark.parametrize("name", CASES)
def test_results_equal_the_stored_ones(name: str) -> None:
    assert figures(CASES[name], list(CASES).index(name)) == json.loads(FILE.read_text())[name]


if __name__ == "__main__":
    golden = {name: figures(case, seed) for seed, (name, case) in enumerate(CASES.items())}
    FILE.write_text(json.dumps(golden, indent=1) + "\n")
