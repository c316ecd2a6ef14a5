"""Replay of traces on the engine's clock."""

import time

import pytest

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.engine.engine import Engine
from patchedserve.serving.engine.replay import replay
from patchedserve.serving.models.build import with_engine
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions, StagesName
from patchedserve.serving.scheduling.policies import get_policy

SMALL = Resolution(32, 32)


@pytest.mark.product(most=1)
@pytest.mark.parametrize("stages", ["threads", "inline"])
def test_only_idle_time_is_skipped(stages: StagesName, model: ServedModel) -> None:
    model = with_engine(model, EngineOptions(stages=stages))
    arrivals_s = [30.0, 600.0, 600.0, 600.05, 4000.0]
    trace = [Request(number, "a", SMALL, 20, arrival_s=arrival_s) for number, arrival_s in enumerate(arrivals_s)]
    began_s = time.monotonic()
    result = replay(Engine(model, get_policy("fcfs")), list(map(model.checked, trace)), skips_idle=True)
    assert time.monotonic() - began_s < 500
    records = sorted(result.records, key=lambda record: record.request_id)
    assert [record.status for record in records] == ["completed"] * 5
    assert [record.arrival_s for record in records] == arrivals_s
    # A clock that is set forward while a request is open would add the gap to its latency.
    assert all(record.latency_s is not None and record.latency_s < 500 for record in records)
    assert all(record.prepare_start_s is not None and record.prepare_start_s >= record.arrival_s for record in records)
    assert result.duration_s == max(record.finish_s or 0 for record in records) > 4000
    assert all(row.start_s >= 30 for row in result.steps)
