"""Metrics of one run, from its request records. Key names follow the benchmark clients of vllm-omni and SGLang."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .request_state import RequestRecord


def summarize(
    records: Sequence[RequestRecord],
    duration_s: float,
    *,
    slo_scale: float | None,
    model: str,
    dataset: str,
) -> dict[str, Any]:
    """Summarize a run of `duration_s` seconds, from the start of the trace to the last request's end.

    Latency is from arrival to the finished image, over completed requests; queueing is from arrival to joining the
    active queue, over requests that joined. Percentiles interpolate linearly. SLO attainment counts all requests that
    have an SLO; requests that failed, were discarded or were cancelled have missed it. Goodput is the number of images
    within their SLO per second. `slo_scale` (the multiple of the standalone latency that defines the SLOs), `model` and
    `dataset` are included as given.

    Returns:
        The metrics, with times in seconds, and `per_resolution` from the smallest resolution to the largest. A metric
        without data is None, never NaN, so the result is plain JSON.

    Raises:
        RuntimeError: a request has not ended.
    """
    pending = [record.request_id for record in records if record.status == "pending"]
    if pending:
        raise RuntimeError(f"requests {pending} have not ended, so the run cannot be summarized")
    latencies = _known(record.latency_s for record in records)
    queueing = _known(record.queueing_s for record in records)
    ended = Counter(record.status for record in records)
    reasons = Counter(record.reason or "no reason given" for record in records if record.status == "discarded")
    num_met = sum(record.slo_met is True for record in records)
    has_slos = any(record.slo_s is not None for record in records)
    return {
        "model": model,
        "dataset": dataset,
        "duration": duration_s,
        "total_requests": len(records),
        "completed_requests": ended["completed"],
        "failed_requests": ended["failed"],
        "discarded_requests": ended["discarded"],
        "discarded_by_reason": dict(reasons.most_common()),
        "cancelled_requests": ended["cancelled"],
        "throughput_qps": len(latencies) / duration_s if duration_s > 0 else None,
        "goodput_qps": num_met / duration_s if has_slos and duration_s > 0 else None,
        "latency_mean": _mean(latencies),
        "latency_median": _percentile(latencies, 50),
        "latency_p50": _percentile(latencies, 50),
        "latency_p95": _percentile(latencies, 95),
        "latency_p99": _percentile(latencies, 99),
        "queueing_mean": _mean(queueing),
        "queueing_p95": _percentile(queueing, 95),
        "slo_scale": slo_scale,
        "slo_met_success": num_met,
        "slo_attainment_rate": slo_attainment_rate(records),
        "per_resolution": _per_resolution(records),
    }


def slo_attainment_rate(records: Iterable[RequestRecord]) -> float | None:
    """Return the share of requests with an SLO whose image was in time; None if no request has an SLO."""
    met = [record.slo_met for record in records if record.slo_met is not None]
    return sum(met) / len(met) if met else None


def _per_resolution(records: Sequence[RequestRecord]) -> dict[str, dict[str, Any]]:
    figures: dict[str, dict[str, Any]] = {}
    for resolution in sorted({record.resolution for record in records}, key=lambda size: (size.pixels, size)):
        mine = [record for record in records if record.resolution == resolution]
        latencies = _known(record.latency_s for record in mine)
        figures[str(resolution)] = {
            "requests": len(mine),
            "completed": len(latencies),
            "slo_attainment_rate": slo_attainment_rate(mine),
            "latency_mean": _mean(latencies),
            "latency_p95": _percentile(latencies, 95),
            "queueing_mean": _mean(_known(record.queueing_s for record in mine)),
        }
    return figures


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent, method="linear")) if values else None
