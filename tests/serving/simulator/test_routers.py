"""Routers on the virtual clock: invariants of all routers, and edits whose records must be read."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request, TracedEdit
from patchedserve.data.resolution import Resolution
from patchedserve.data.traces.edits import EditDraws, read_mask_ratios
from patchedserve.data.traces.traces import TraceConfig, generate_trace
from patchedserve.data.work import Work, work_of
from patchedserve.serving.editing.costs import EditCosts
from patchedserve.serving.scheduling.policies import get_policy
from patchedserve.serving.scheduling.routers import ROUTERS
from patchedserve.serving.simulator.simulator import simulate
from patchedserve.serving.simulator.stage_times import StageTimes

S, L = Resolution(128, 128), Resolution(256, 256)
TIMES = StageTimes.constant((S, L), 0.25, 0.5)


class Steps:
    """Step latencies of 1 s plus 1 s for each whole image of 128x128 pixels."""

    def step_latency_s(self, active: Sequence[Resolution | Work]) -> float:
        parts = (each[0] * each[1] * (each[2] if isinstance(each, Work) else 1.0) for each in active)
        return 1.0 + sum(parts) / S.pixels


def edits(load_s: float = 4.0, memory_mb: float = 3e-6, share: float = 0.5) -> EditCosts:
    """Return costs of edits whose records take a byte per step; by default, three bytes fit in memory."""
    return EditCosts(
        lambda request: share if request.traced else 1.0,
        lambda record: record.num_inference_steps,
        lambda size: load_s,
        memory_mb,
    )


def edit(request_id: int, arrival_s: float, image: str = "emoji:0", steps: int = 2, ratio: float = 0.1) -> Request:
    traced = TracedEdit(image, "box:1", ratio)
    return Request(request_id, "", S, steps, arrival_s=arrival_s, traced=traced)


def test_edit_computes_its_share_and_reads_its_record_once() -> None:
    requests = [edit(0, 0.0), edit(1, 20.0), edit(2, 40.0, "emoji:1", steps=3), edit(3, 60.0)]
    result = simulate(requests, get_policy("continuous"), Steps(), times=TIMES, edits=edits())
    # An edit takes preparation, 4 s of reading, steps of 1.5 s and decoding. The third request's record does not fit
    # beside the first one's, which is evicted.
    assert [record.latency_s for record in result.records] == [7.75, 3.75, 9.25, 7.75]
    assert all(record.reused and record.active_share == 0.5 for record in result.records)
    whole = simulate(requests, get_policy("continuous"), Steps(), times=TIMES, edits=edits(share=1.0))
    assert [record.latency_s for record in whole.records] == [4.75, 4.75, 6.75, 4.75]
    assert not any(record.reused for record in whole.records)
    alike = simulate([replace(each, traced=None) for each in requests], get_policy("continuous"), Steps(), times=TIMES)
    assert [record.latency_s for record in alike.records] == [record.latency_s for record in whole.records]


def test_record_larger_than_memory_is_read_each_time() -> None:
    requests = [edit(number, 20.0 * number, steps=4) for number in range(3)]
    result = simulate(requests, get_policy("continuous"), Steps(), edits=edits())
    assert [record.latency_s for record in result.records] == [10.0] * 3


def test_edits_share_batches_with_new_images() -> None:
    requests = [Request(0, "", S, 2), edit(1, 0.0)]
    result = simulate(requests, get_policy("continuous"), Steps(), edits=edits(load_s=0.0))
    assert [record.denoise_end_s for record in result.records] == [5.0, 5.0]


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("policy", ["continuous", "edf", "slack", "static"])
def test_random_runs(name: str, policy: str) -> None:
    """Every request ends once, on one GPU and no faster than it can alone, and a repeated run is the same."""
    rng = random.Random(name + policy)
    for _ in range(5):
        config = TraceConfig(
            request_rate=rng.choice((0.2, 1.0, 5.0)),
            num_prompts=40,
            num_inference_steps=rng.randint(1, 6),
            resolutions=(S, L),
            seed=rng.randrange(99),
            edits=EditDraws(0.7, read_mask_ratios("public"), num_templates=5),
        )
        requests = [replace(each, slo_s=rng.uniform(5, 80)) for each in generate_trace(config, ["a"])]
        shares = {each.request_id: rng.choice((0.1, 0.4, 1.0)) for each in requests}
        given = EditCosts(
            lambda request, shares=shares: shares[request.request_id] if request.traced else 1.0,
            lambda record: record.resolution.pixels * record.num_inference_steps,
            lambda size: size / 1e5,
            memory_mb=0.2,
        )
        num_gpus = rng.randint(1, 5)

        def run(requests=requests, given=given, num_gpus=num_gpus):
            return simulate(
                requests,
                get_policy(policy),
                Steps(),
                num_gpus=num_gpus,
                max_batch_size=3,
                router=name,
                edits=given,
                times=TIMES,
            )

        result = run()
        assert result == run()
        assert [record.request_id for record in result.records] == list(range(40))
        assert set(result.gpu_of.values()) <= set(range(num_gpus))
        for request, record in zip(requests, result.records, strict=True):
            share = shares[request.request_id] if request.traced else 1.0
            least_s = 0.75 + request.num_steps * Steps().step_latency_s([work_of(request.resolution, share)])
            assert record.latency_s is None or record.latency_s >= least_s - 1e-9
            assert record.status == "completed" or policy == "slack"


def test_invalid_numbers_are_refused() -> None:
    with pytest.raises(UsageError, match="memory of records is 0 MB, but it must be above 0"):
        edits(memory_mb=0)
    with pytest.raises(UsageError, match="router is 'none'"):
        simulate([edit(0, 0.0)], get_policy("continuous"), Steps(), router="none")
