"""Figures of a run, compared with figures worked out by hand and by numpy."""

import json
import random

import numpy as np
import pytest

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.core.metrics import summarize
from patchedserve.serving.core.request_state import FINAL_STATUSES, RequestRecord, RequestState, RequestView, Status

SMALL, LARGE = Resolution(128, 128), Resolution(256, 256)
FACTS_KEYS = {
    "duration",
    "completed_requests",
    "failed_requests",
    "throughput_qps",
    "latency_mean",
    "latency_median",
    "latency_p50",
    "latency_p95",
    "latency_p99",
    "slo_attainment_rate",
    "slo_met_success",
    "slo_scale",
    "model",
    "dataset",
}


def ended(
    request_id: int,
    status: Status = "completed",
    *,
    resolution: Resolution = SMALL,
    arrival_s: float = 0.0,
    admitted_s: float | None = None,
    finish_s: float = 1.0,
    slo_s: float | None = None,
) -> RequestRecord:
    record = RequestRecord.of(Request(request_id, "p", resolution, arrival_s=arrival_s, slo_s=slo_s))
    record.admitted_s = admitted_s
    record.close(status, finish_s, None if status == "completed" else "why")
    return record


def summary_of(records: list[RequestRecord], duration_s: float = 10.0) -> dict:
    return summarize(records, duration_s, slo_scale=5.0, model="emoji-xl", dataset="poisson")


def test_metrics_of_a_run_match_manual_values() -> None:
    records = [
        ended(0, arrival_s=1, admitted_s=1.5, finish_s=3, slo_s=2),  # exactly in time
        ended(1, arrival_s=1, admitted_s=2.5, finish_s=5, slo_s=3),  # late
        ended(2, resolution=LARGE, arrival_s=2, admitted_s=2, finish_s=8),  # no SLO
        ended(3, "failed", arrival_s=2, admitted_s=3, finish_s=2.5, slo_s=9),
        ended(4, "discarded", resolution=LARGE, arrival_s=2, finish_s=2.5, slo_s=9),
        ended(5, "cancelled", arrival_s=3, finish_s=9, slo_s=9),
    ]
    summary = summary_of(records)
    assert {key: summary[key] for key in summary if key.endswith("_requests")} == {
        "total_requests": 6,
        "completed_requests": 3,
        "failed_requests": 1,
        "discarded_requests": 1,
        "cancelled_requests": 1,
    }
    assert summary["throughput_qps"] == pytest.approx(0.3)
    assert summary["goodput_qps"] == pytest.approx(0.1)
    assert summary["latency_mean"] == pytest.approx(4.0)
    assert summary["latency_median"] == summary["latency_p50"] == pytest.approx(4.0)
    assert summary["latency_p95"] == pytest.approx(5.8)
    assert summary["queueing_mean"] == pytest.approx((0.5 + 1.5 + 0 + 1) / 4)
    assert (summary["slo_met_success"], summary["slo_attainment_rate"]) == (1, pytest.approx(1 / 5))
    assert (summary["slo_scale"], summary["model"], summary["dataset"]) == (5.0, "emoji-xl", "poisson")
    assert list(summary["per_resolution"]) == ["128x128", "256x256"]
    large = summary["per_resolution"]["256x256"]
    assert large == {
        "requests": 2,
        "completed": 1,
        "slo_attainment_rate": 0.0,
        "latency_mean": 6.0,
        "latency_p95": 6.0,
        "queueing_mean": 0.0,
    }


def test_conventional_keys_are_present() -> None:
    assert set(summary_of([])) >= FACTS_KEYS


def test_random_runs_agree_with_numpy_and_add_up() -> None:
    rng = random.Random(0)
    for _ in range(50):
        records = []
        for i in range(rng.randint(1, 60)):
            arrival_s = rng.uniform(0, 9)
            records.append(
                ended(
                    i,
                    rng.choice(["completed", "completed", "completed", "failed", "discarded", "cancelled"]),
                    resolution=rng.choice([SMALL, LARGE]),
                    arrival_s=arrival_s,
                    admitted_s=rng.choice([None, arrival_s + rng.uniform(0, 2)]),
                    finish_s=arrival_s + rng.uniform(2, 9),
                    slo_s=rng.choice([None, rng.uniform(2, 9)]),
                )
            )
        rng.shuffle(records)
        summary = summary_of(records)
        json.dumps(summary, allow_nan=False)
        assert sum(summary[f"{status}_requests"] for status in FINAL_STATUSES) == len(records)
        latencies = [r.finish_s - r.arrival_s for r in records if r.status == "completed" and r.finish_s is not None]
        if latencies:
            assert summary["latency_p99"] == pytest.approx(np.quantile(latencies, 0.99))
            assert summary["latency_mean"] == pytest.approx(np.mean(latencies))
        with_slo = [r for r in records if r.slo_s is not None]
        if with_slo:
            assert summary["slo_attainment_rate"] * len(with_slo) == pytest.approx(summary["slo_met_success"])
        parts = summary["per_resolution"].values()
        assert sum(part["requests"] for part in parts) == len(records)
        assert sum(part["completed"] for part in parts) == summary["completed_requests"]


@pytest.mark.parametrize("records", [[], [ended(0, "failed")]], ids=["nothing", "nothing completed"])
def test_unmeasurable_metrics_are_none(records: list[RequestRecord]) -> None:
    summary = summary_of(records)
    empty = ("latency_mean", "latency_median", "latency_p95", "latency_p99", "queueing_p95")
    assert [summary[key] for key in (*empty, "slo_attainment_rate", "goodput_qps")] == [None] * 7
    assert summary["throughput_qps"] == 0
    assert summary_of(records, duration_s=0.0)["throughput_qps"] is None
    json.dumps(summary, allow_nan=False)


def test_attainment_is_zero_if_all_are_missed() -> None:
    summary = summary_of([ended(0, "discarded", slo_s=1.0)])
    assert (summary["slo_attainment_rate"], summary["goodput_qps"], summary["slo_met_success"]) == (0.0, 0.0, 0)


def test_resolutions_are_sorted_by_size() -> None:
    sizes = [Resolution(256, 256), Resolution(64, 512), Resolution(512, 64), Resolution(128, 128)]
    summary = summary_of([ended(i, resolution=size) for i, size in enumerate(sizes)])
    assert list(summary["per_resolution"]) == ["128x128", "64x512", "512x64", "256x256"]


def test_unfinished_requests_are_an_internal_error() -> None:
    record = RequestRecord.of(Request(7, "p", SMALL, slo_s=1.0))
    assert record.slo_met is None
    with pytest.raises(RuntimeError, match=r"requests \[7\] have not ended"):
        summary_of([record])
    with pytest.raises(RuntimeError, match="request 7 has not ended"):
        record.to_row()
    with pytest.raises(RuntimeError, match="cannot end as pending"):
        record.close("pending", 1.0)
    record.close("completed", 1.0)
    with pytest.raises(RuntimeError, match="has already ended as completed"):
        record.close("failed", 2.0)


def test_record_moves_to_the_clock_of_another_process() -> None:
    record = ended(1, arrival_s=1.0, admitted_s=1.5, finish_s=3.0, slo_s=2.0)
    moved = record.shifted(10.0)
    assert (moved.arrival_s, moved.admitted_s, moved.denoise_end_s, moved.finish_s) == (11.0, 11.5, None, 13.0)
    assert (moved.slo_s, moved.latency_s, moved.slo_met) == (2.0, record.latency_s, True)
    assert record.arrival_s == 1.0


def test_views_show_progress_and_are_immutable() -> None:
    asked = Request(3, "p", LARGE, num_inference_steps=5, arrival_s=1.0, slo_s=2.0)
    state = RequestState.of(asked, RequestView.of(asked, 0.4))
    before = state.view_at(7)
    state.stage, state.first_step = "active", 5
    after = state.view_at(7)
    state.num_iterations = 10  # second order: 7 of 10 steps of the sampler are 3 of the 5 requested steps
    assert state.view_at(12).steps_done == 3
    assert (before.steps_done, before.num_steps, after.steps_done, after.num_steps) == (0, 5, 2, 5)
    assert (after.deadline_s, after.standalone_s, after.resolution, after.num_steps) == (3.0, 0.4, LARGE, 5)
    with pytest.raises(AttributeError):
        after.steps_done = 5  # type: ignore[misc]
