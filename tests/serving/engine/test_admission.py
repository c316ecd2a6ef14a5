"""Admission of requests by an engine's policy: drops, waits, preparation ahead, and learning step latencies."""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.cascade.policy import CascadePolicy
from patchedserve.serving.core.request_state import RequestView
from patchedserve.serving.engine.collectors import InMemory
from patchedserve.serving.engine.engine import Engine
from patchedserve.serving.engine.run_result import RunResult
from patchedserve.serving.models.build import build_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.scheduling.policies import Decision, get_policy
from patchedserve.serving.scheduling.policies.slack import TOO_LATE
from patchedserve.serving.scheduling.systems import get_system
from patchedserve.serving.simulator.simulator import simulate

from ...support.engine_runs import SMALL, requests_of, serve
from ...support.function_policy import FunctionPolicy
from ...support.plain import plain_latents
from ...support.tiny_models import largest_error, tiny_sdxl


def _drop_odd(now_s: float, waiting: Sequence[RequestView], active: Sequence[RequestView]) -> Decision:
    return Decision(
        admit=tuple(view.request_id for view in waiting if view.request_id % 2 == 0),
        drop=tuple((view.request_id, "odd") for view in waiting if view.request_id % 2),
    )


def test_policy_can_drop(model: ServedModel) -> None:
    result = serve(model, requests_of(5), FunctionPolicy(_drop_odd))
    assert [record.status for record in result.records] == ["completed", "discarded"] * 2 + ["completed"]
    assert result.records[1].reason == "odd"


def test_policy_can_wait_for_the_decoder(model: ServedModel) -> None:
    engine = Engine(model, CascadePolicy(lambda resolution, count: 0.0), max_batch_size=2, collector=InMemory())
    for request in requests_of(6):
        engine.submit(request)
    engine.close()
    results = list[RunResult]()
    # The end of an image must wake the loop, or it would sleep indefinitely.
    thread = threading.Thread(target=lambda: results.append(engine.run()), daemon=True)
    thread.start()
    thread.join(60)
    assert results, "the engine still waits"
    # All images of one batch end before the next batch is admitted.
    records = sorted(results[0].records, key=lambda record: record.admitted_s or 0.0)
    assert [record.status for record in records] == ["completed"] * 6
    for earlier, later in pairwise(records[place : place + 2] for place in (0, 2, 4)):
        assert max(record.finish_s or 0.0 for record in earlier) <= min(record.admitted_s or 0.0 for record in later)


class _Learning:
    """Predictor that records the step latencies that the engine reports."""

    def __init__(self) -> None:
        self.seen: list[tuple[tuple[Resolution, ...], float]] = []

    def step_latency_s(self, active: Sequence[Any]) -> float:
        return 1e-4 * len(active)

    def observe(
        self, active: Sequence[Any], measured_s: float, *, is_first: bool = False, between_s: float = 0.0
    ) -> None:
        self.seen.append((tuple(active), measured_s))


def test_slack_queries_the_predictor_and_trains_it(model: ServedModel) -> None:
    with pytest.raises(UsageError, match="policy slack looks ahead and needs step latencies"):
        Engine(model, get_policy("slack"))
    predictor = _Learning()
    requests = [replace(request, slo_s=(1e-6, 600.0)[i > 1]) for i, request in enumerate(requests_of(6))]
    result = serve(model, requests, get_policy("slack"), predictor=predictor)
    assert [record.status for record in result.records] == ["discarded"] * 2 + ["completed"] * 4
    assert {record.reason for record in result.records[:2]} == {TOO_LATE}
    assert [measured_s for _, measured_s in predictor.seen] == [row.duration_s for row in result.steps]
    assert [Counter(map(str, active)) for active, _ in predictor.seen] == [row.resolutions for row in result.steps]
    # The duration of each decision is recorded, both on its own and with the step that follows it.
    assert len(result.decision_times_s) >= 1
    assert all(0 < time_s < 0.1 for time_s in result.decision_times_s)
    assert sum(row.schedule_s for row in result.steps) == pytest.approx(sum(result.decision_times_s))


def test_nirvana_runs_fewer_steps(model: ServedModel) -> None:
    nirvana = get_system("nirvana")
    requests = [nirvana.adapt(Request(0, "a", SMALL, 10, seed=3))]
    result = serve(model, requests, get_policy(nirvana.policy), collector=InMemory(keep_latents=True))
    assert (result.records[0].num_inference_steps, len(result.steps)) == (8, 8)
    expected = plain_latents(model.pipe, Request(0, "a", SMALL, 8, seed=3))
    assert largest_error([result.latents[0][0]], [expected]) < 1e-3


def test_checked_steps_are_the_requested_ones() -> None:
    """The engine changes no request, so the model checks the number of steps that it will take."""
    from diffusers import DDIMScheduler

    pipe = tiny_sdxl()
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config)
    nirvana = get_system("nirvana")
    engine = Engine(build_model(pipe, name="ddim"), get_policy(nirvana.policy))
    asked = Request(0, "a", SMALL, 1200)  # 948 with nirvana's share; DDIM takes at most 1000
    with pytest.raises(UsageError, match="cannot take 1200 steps"):
        engine.submit(asked)
    engine.submit(nirvana.adapt(asked))


@pytest.mark.product(most=2)
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["continuous", "static", "edf"])
def test_number_of_prepared_requests_is_bounded(model: ServedModel, policy: str) -> None:
    # 30 requests arrive at once for 2 places.
    # Deadlines are further apart than the time to submit the next request.
    requests = [replace(request, slo_s=20.0 * (30 - i)) for i, request in enumerate(requests_of(30, steps=2))]
    result = serve(model, requests, get_policy(policy), max_batch_size=2, max_prepared_ahead=3)
    assert {record.status for record in result.records} == {"completed"}
    assert max(row.waiting for row in result.steps) >= 26
    assert result.max_prepared <= 2 + 3
    if policy == "edf":  # the last to arrive, which is admitted long before it is prepared, comes first
        # On a busy machine both of the first two are prepared before either is admitted, and are admitted together.
        admitted = sorted(result.records, key=lambda record: (record.admitted_s or 0.0, -record.request_id))
        assert [record.request_id for record in admitted][:2] == [29, 28]
    # A static batch takes its first step together, even if only one of its requests was prepared ahead.
    if policy == "static":
        assert [row.active for row in result.steps] == [2] * 28 + [1, 1, 1, 1]


def test_request_discarded_before_preparation_is_never_encoded(model: ServedModel) -> None:
    result = serve(model, requests_of(12, steps=1), FunctionPolicy(_drop_odd), max_batch_size=16, max_prepared_ahead=1)
    odd = [record for record in result.records if record.request_id % 2]
    assert {record.status for record in odd} == {"discarded"}
    # Only the one that was being encoded when the policy decided may have started.
    assert sum(record.prepare_start_s is not None for record in odd) <= 1


@pytest.mark.slow
def test_simulator_admits_in_the_order_of_the_engine(model: ServedModel) -> None:
    # All arrive at once or within the first step, so the policies determine the order, not the clock.
    requests = requests_of(9, steps=3)
    for name in ("fcfs", "static", "continuous"):
        real = serve(model, requests, get_policy(name), max_batch_size=3).records
        simulated = simulate(requests, get_policy(name), _Learning(), max_batch_size=3).records
        orders = [
            [record.request_id for record in sorted(records, key=lambda record: (record.admitted_s, record.request_id))]
            for records in (real, simulated)
        ]
        assert orders[0] == orders[1], name
        assert [record.num_inference_steps for record in real] == [record.num_inference_steps for record in simulated]
