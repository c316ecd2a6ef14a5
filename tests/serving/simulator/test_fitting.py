"""Promises of policies that fit requests into the batch, over whole traces: no resolution pays for the others, and no
request is discarded under light load.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import pytest

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.data.traces.traces import TraceConfig, assign_slos, generate_trace
from patchedserve.serving.core.request_state import RequestRecord
from patchedserve.serving.scheduling.policies import get_policy
from patchedserve.serving.simulator.simulator import simulate

SIZES = (Resolution(128, 128), Resolution(192, 192), Resolution(256, 256))
COSTS_S = dict(zip(SIZES, (0.003, 0.008, 0.013), strict=True))
CAPACITY = 3.4
"""Requests per second, of 30 steps each and all sizes in equal numbers, that batches of 16 complete."""


class Steps:
    """Step latencies with a large base and a cost for each image by size, roughly those of `emoji-xl` in bf16."""

    def step_latency_s(self, active: Sequence[Any]) -> float:
        return 0.015 + sum(COSTS_S[size] for size in active)


def alone_s(request: Request) -> float:
    return request.num_inference_steps * Steps().step_latency_s([request.resolution])


def served(name: str, count: int, load: float, seed: int, kind: Any = "poisson") -> list[RequestRecord]:
    cv = 2.5 if kind == "gamma" else 1.0
    config = TraceConfig(kind, load * CAPACITY, count, cv=cv, resolutions=SIZES, num_inference_steps=30, seed=seed)
    requests = assign_slos(generate_trace(config, ["a"]), alone_s, 5.0)
    return simulate(requests, get_policy(name), Steps(), standalone_s=alone_s).records


def in_time(records: Sequence[RequestRecord], size: Resolution | None = None) -> float:
    return fmean(bool(one.slo_met) for one in records if size in (None, one.resolution))


@pytest.mark.parametrize("count", [2000, pytest.param(10_000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", ["edf-fitting", "fair-fitting"])
def test_no_request_is_discarded_under_light_load(name: str, count: int) -> None:
    records = served(name, count, 0.3, seed=0)
    assert {record.status for record in records} == {"completed"}
    assert in_time(records) > 0.999


@pytest.mark.product(most=1)
@pytest.mark.parametrize("kind", ["poisson", "gamma"])
@pytest.mark.parametrize("load", [1.3, 2.0])
def test_no_resolution_is_sacrificed_for_others(load: float, kind: str) -> None:
    fair, edf, slack = (
        [one for seed in range(3) for one in served(name, 400, load, seed, kind)]
        for name in ("fair-fitting", "edf-fitting", "slack")
    )
    assert in_time(fair) - min(in_time(fair, size) for size in SIZES) < 0.1
    assert in_time(edf) - min(in_time(edf, size) for size in SIZES) > 0.1, "somebody would pay"
    assert in_time(fair) > in_time(slack)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_more_are_in_time_without_fairness_under_heavy_overload() -> None:
    mixed = [in_time(served(name, 1200, 2.0, seed=1)) for name in ("edf-fitting", "fair-fitting", "slack")]
    assert mixed == sorted(mixed, reverse=True)


def test_rare_resolution_is_served() -> None:
    """Under overload, one request in twenty is large and all others are small."""
    config = TraceConfig("poisson", 14.0, 1200, resolutions=SIZES[::2], mix=(19.0, 1.0), num_inference_steps=30)
    requests = assign_slos(generate_trace(config, ["a"]), alone_s, 5.0)
    records = simulate(requests, get_policy("fair-fitting"), Steps(), standalone_s=alone_s).records
    assert in_time(records) < 0.9, "an overload"
    assert in_time(records, SIZES[2]) > in_time(records) - 0.1


def test_request_without_deadline_completes_in_bounded_time_under_overload() -> None:
    config = TraceConfig("poisson", 2 * CAPACITY, 1500, resolutions=SIZES, num_inference_steps=30)
    requests = assign_slos(generate_trace(config, ["a"]), alone_s, 5.0)
    patient = Request(10_000, "a", SIZES[2], 30, arrival_s=requests[100].arrival_s)
    records = simulate(
        [*requests[:101], patient, *requests[101:]], get_policy("fair-fitting"), Steps(), standalone_s=alone_s
    ).records
    found = next(record for record in records if record.request_id == 10_000)
    assert found.status == "completed"
    # It waits for at most 20 times its standalone latency until no other request precedes it.
    assert (found.admitted_s or 0.0) - found.arrival_s < 22 * alone_s(patient)
